"""What happens to a prefetch that is not complete when its request's turn comes.

The names and meanings are those of SGLang's HiCache.
"""

from __future__ import annotations

from dataclasses import dataclass

from pcr_core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class StopPolicy:
    """How reads are made ahead, and how long a request waits for them.

    Attributes:
        ahead: Whether to read for requests that still wait.
        recompute: Whether a chunk whose read has not started may be computed instead,
            where the measured rates say that this is faster.
        patience: Seconds that a request waits for its reads, in all; what has not
            arrived then is computed.
    """

    ahead: bool = True
    recompute: bool = True
    patience: float = float("inf")


def stop_policy(name: str, timeout: float) -> StopPolicy:
    """The policy of a name.

    Args:
        name: ``"best_effort"``: go on at once, reading or computing what is missing,
            whichever is faster. ``"wait_complete"``: never compute what can be read.
            ``"timeout"``: the same, for at most ``timeout`` seconds. ``"off"``: no
            reads before the request runs, then as ``"best_effort"``.
        timeout: Seconds.

    Raises:
        ConfigError: For another name.
    """
    policies = {
        "best_effort": StopPolicy(),
        "wait_complete": StopPolicy(recompute=False),
        "timeout": StopPolicy(recompute=False, patience=timeout),
        "off": StopPolicy(ahead=False),
    }
    if name not in policies:
        raise ConfigError(f"prefetch must be one of {', '.join(policies)}; not {name}")
    return policies[name]
