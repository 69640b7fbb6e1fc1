"""The eviction policies and their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from pcr_core.errors import ConfigError
from pcr_core.index.adaptive import Adaptive
from pcr_core.index.policies import (
    EvictionPolicy,
    LookAheadLru,
    Lru,
    Pgdsf,
    Rank,
    StatefulPolicy,
)

__all__ = [
    "POLICIES",
    "Adaptive",
    "EvictionPolicy",
    "LookAheadLru",
    "Lru",
    "Pgdsf",
    "Rank",
    "StatefulPolicy",
    "make_policy",
]

POLICIES: Mapping[str, Callable[[int], EvictionPolicy]] = MappingProxyType(
    {
        "lookahead-lru": lambda capacity: LookAheadLru(),
        "lru": lambda capacity: Lru(),
        "pgdsf": lambda capacity: Pgdsf(),
        "adaptive": Adaptive,
    }
)
"""What makes a policy of each name, given the chunks that its tier holds."""


def make_policy(name: str, *, capacity: int = 0) -> EvictionPolicy:
    """Return a new policy for one tier; two tiers need two.

    Args:
        name: One of ``POLICIES``.
        capacity: Chunks that the tier holds; only ``"adaptive"`` asks for it.

    Raises:
        ConfigError: If there is no such policy, or ``"adaptive"`` gets no capacity.
    """
    if name not in POLICIES:
        known = ", ".join(repr(known) for known in POLICIES)
        raise ConfigError(f"eviction is {name!r}; use one of {known}")
    return POLICIES[name](capacity)
