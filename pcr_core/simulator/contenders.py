"""Who takes part in a comparison, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pcr_core.errors import ConfigError
from pcr_core.index.adaptive import Adaptive
from pcr_core.index.ghosts import REMEMBERED_PER_CHUNK
from pcr_core.index.node import Node
from pcr_core.index.policies import EvictionPolicy, LookAheadLru, Lru, Pgdsf, Rank
from pcr_core.simulator.optimum import FarthestUse
from pcr_core.simulator.replay import Contender
from pcr_core.trace import Trace

NAMES = (
    "lru",
    "lookahead-lru",
    "pgdsf",
    "pgdsf+memory",
    "lfu+memory",
    "adaptive",
    "optimum",
)
"""All contenders. ``pgdsf`` forgets evicted chunks, ``+memory`` is the engine's; the
last one knows the future, and ``lfu+memory`` is for comparison only."""


class Lfu:
    """Least frequently used first, ties to the least recently used.

    Not offered by the engine: without ageing it collapses when the traffic has
    locality. Here to show what frequency alone can do.
    """

    epoch = 0

    def rank(self, node: Node) -> Rank:
        """Return the number of uses, then the stamp of the last."""
        return (node.uses, node.last_used)

    def used(self, node: Node) -> None:
        """Nothing to note."""

    def evicted(self, node: Node) -> None:
        """Nothing to note."""


_MAKERS: dict[str, Callable[[Trace, int], EvictionPolicy]] = {
    "lru": lambda trace, capacity: Lru(),
    "lookahead-lru": lambda trace, capacity: LookAheadLru(),
    "pgdsf": lambda trace, capacity: Pgdsf(),
    "pgdsf+memory": lambda trace, capacity: Pgdsf(),
    "lfu+memory": lambda trace, capacity: Lfu(),
    "adaptive": lambda trace, capacity: Adaptive(capacity),
    "optimum": lambda trace, capacity: FarthestUse(trace),
}


def contenders(
    names: Sequence[str] = NAMES, windows: Sequence[int | None] = (6, 64)
) -> list[Contender]:
    """Return the contenders of these names, in this order.

    Args:
        names: Some of ``NAMES``.
        windows: Look-ahead LRU takes part once with each; ``None`` is the engine's
            ``"auto"``, which ``adaptive`` always has.

    Raises:
        ConfigError: For an unknown name, no window, or one below 1.
    """
    if not windows or any(window is not None and window < 1 for window in windows):
        raise ConfigError("a look-ahead window must be at least 1 request, or 'auto'")
    found = []
    for name in names:
        if name not in _MAKERS:
            raise ConfigError(f"no policy {name!r}; there are: {', '.join(NAMES)}")
        found += [_make(name, window) for window in _windows_of(name, windows)]
    return found


def _windows_of(name: str, windows: Sequence[int | None]) -> Sequence[int | None]:
    if name == "lookahead-lru":
        return windows
    return (None,) if name == "adaptive" else (0,)


def _make(name: str, window: int | None) -> Contender:
    remembers = name.endswith("+memory") or name == "adaptive"
    return Contender(
        name, _MAKERS[name], window, REMEMBERED_PER_CHUNK if remembers else 0
    )
