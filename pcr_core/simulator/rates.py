"""What a machine does per second: stated, measured, or read from a file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from pcr_core.errors import ConfigError
from pcr_core.stats import Decisions

Points = tuple[tuple[float, float], ...]

ATTENTION = 4096.0
"""Depth in tokens at which a token takes twice as long as the first, where only one
rate is known: a guess, as in ``pcr_core.cost``. Give a second depth instead."""


@dataclass(frozen=True)
class Rates:
    """A machine's measured rates.

    Attributes:
        prefill: Depth in the prompt in tokens, and the tokens per second that are
            computed there. Between depths, seconds per token are interpolated; behind
            the last they go on as before it, because attention grows with depth. With
            one depth only, ``ATTENTION`` says how.
        overhead: Seconds that a request takes beside the tokens it computes.
        ssd_read: Bytes per second read from SSD; 0 for unknown.
        ssd_latency: Seconds until the first of them are there.
        decode_step: Seconds for one token of one answer.
        decode_row: Seconds that each further answer adds to such a step.

    Raises:
        ConfigError: If a number is not finite, negative, or no rate is given.
    """

    prefill: Points
    overhead: float = 0.0
    ssd_read: float = 0.0
    ssd_latency: float = 0.0
    decode_step: float = 0.0
    decode_row: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "prefill", _points(self.prefill))
        for item in fields(self)[1:]:
            value = getattr(self, item.name)
            if not _is_number(value) or value < 0:
                raise ConfigError(
                    f"rate {item.name} is {value!r}; it must be a number from 0 on"
                )

    @classmethod
    def of(cls, decisions: Decisions, **others: float) -> Rates:
        """From ``engine.stats().decisions`` and what is not measured there.

        Raises:
            ConfigError: If the engine has not prefilled anything yet.
        """
        if decisions.prefill_rate <= 0:
            raise ConfigError(
                "the engine has measured no prefill yet; run some prompts, then ask "
                "engine.stats().decisions"
            )
        point = (Decisions.RATED / 2, decisions.prefill_rate)
        given = {"ssd_read": decisions.read_bandwidth, **others}
        return cls(prefill=(point,), **given)

    def compute_seconds(self, cached: int, new: int) -> float:
        """Seconds to compute ``new`` tokens behind ``cached`` ones."""
        return self._until(cached + new) - self._until(cached)

    def read_seconds(self, nbytes: int) -> float:
        """Seconds to read bytes from SSD; 0 for none.

        Raises:
            ConfigError: If the rate is not known.
        """
        if nbytes <= 0:
            return 0.0
        if self.ssd_read <= 0:
            raise ConfigError(
                "there is an SSD tier, but its read rate is not known; give ssd_read "
                "in bytes per second, or take 0 bytes of SSD"
            )
        return self.ssd_latency + nbytes / self.ssd_read

    def step_seconds(self, rows: float) -> float:
        """Seconds of a step that gives each of ``rows`` answers a token."""
        return self.decode_step + max(0.0, rows - 1.0) * self.decode_row

    def as_dict(self) -> dict[str, Any]:
        """What ``read_rates`` reads."""
        return asdict(self)

    @cached_property
    def _knots(self) -> Points:
        return _knots(self.prefill)

    def _until(self, depth: float) -> float:
        """Seconds to compute everything before a depth: an integral over knots."""
        total = 0.0
        for (low, at_low), (high, at_high) in pairwise(self._knots):
            if depth <= low:
                break
            end = min(depth, high)
            at_end = at_low + (at_high - at_low) * (end - low) / (high - low)
            total += (end - low) * (at_low + at_end) / 2
        return total


def read_rates(path: Path) -> Rates:
    """Read rates from JSON: ``Rates.as_dict()``, or ``asdict`` of ``Decisions``.

    Raises:
        ConfigError: If the file cannot be read or holds something else.
    """
    try:
        found = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read rates {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} must hold an object with the rates")
    if "prefill_rate" in found:
        return _of_decisions(path, found)
    known = {item.name for item in fields(Rates)}
    if "prefill" not in found or not set(found) <= known:
        raise ConfigError(
            f"{path} holds {', '.join(sorted(found)) or 'nothing'}; rates are prefill "
            f"(needed), {', '.join(sorted(known - {'prefill'}))}"
        )
    return Rates(**found)


def _of_decisions(path: Path, found: Mapping[str, Any]) -> Rates:
    names = [item.name for item in fields(Decisions)]
    try:
        return Rates.of(Decisions(**{name: found[name] for name in names}))
    except (KeyError, TypeError):
        raise ConfigError(
            f"{path} has a prefill_rate but is not dataclasses.asdict() of "
            f"engine.stats().decisions, which has {', '.join(names)}"
        ) from None


def _is_number(value: object) -> bool:
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and math.isfinite(value)
    )


def _points(given: Any) -> Points:
    """Checked and in order of depth."""
    try:
        points = sorted((depth, rate) for depth, rate in given)
    except (TypeError, ValueError):
        points = []
    numbers = all(_is_number(x) for point in points for x in point)
    if not points or not numbers or any(d < 0 or r <= 0 for d, r in points):
        raise ConfigError(
            f"rate prefill is {given!r}; it must be pairs of a depth in tokens and the "
            "tokens per second computed there, such as ((0, 1200), (4096, 700))"
        )
    if len({depth for depth, _ in points}) < len(points):
        raise ConfigError("rate prefill has two rates for one depth; give one")
    return tuple((float(depth), float(rate)) for depth, rate in points)


_FAR = 1e9  # tokens


def _knots(points: Points) -> Points:
    """Depths and seconds per token there, from 0 to beyond every prompt."""
    cost = [(depth, 1.0 / rate) for depth, rate in points]
    if len(cost) == 1:
        (depth, each), first = cost[0], cost[0][1] / (1 + cost[0][0] / ATTENTION)
        slope = first / ATTENTION
        cost = [(0.0, first)] if depth == 0 else [(0.0, first), (depth, each)]
    else:
        (d0, s0), (d1, s1) = cost[-2:]
        slope = max(0.0, (s1 - s0) / (d1 - d0))
    if cost[0][0] > 0:
        cost.insert(0, (0.0, cost[0][1]))
    last, each = cost[-1]
    return (*cost, (last + _FAR, each + slope * _FAR))
