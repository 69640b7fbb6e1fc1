"""How much of an index is searched by the end of each stage."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from pcr_core import ConfigError

Stages = int | Sequence[int]


def checked(stages: Stages) -> Stages:
    """Return ``stages`` if it can be a schedule.

    Raises:
        ConfigError: If it is neither a positive number nor rising positive numbers.
    """
    if isinstance(stages, int) and not isinstance(stages, bool):
        if stages >= 1:
            return stages
    elif isinstance(stages, Sequence) and not isinstance(stages, (str, bytes)):
        efforts = list(stages)
        integers = all(type(effort) is int and effort > 0 for effort in efforts)
        if integers and all(one < next_ for one, next_ in pairwise(efforts)):
            return tuple(efforts)
    raise ConfigError(
        "stages is a number of stages, or the effort by the end of each but the last: "
        f"positive and rising, such as (1, 4, 16); it is {stages!r}"
    )


def efforts(stages: Stages, full: int) -> list[int]:
    """Return the effort by the end of each stage; the last one is ``full``.

    A number of stages halves the effort from each stage to the one before it. There
    are fewer stages where the effort is too small to be divided.

    Args:
        stages: See ``checked``.
        full: Effort of the plain search.
    """
    if isinstance(stages, int):
        wanted = [-(-full // (1 << back)) for back in reversed(range(stages))]
    else:
        wanted = list(stages)
    return [effort for effort in sorted(set(wanted)) if effort < full] + [full]
