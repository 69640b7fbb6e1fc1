"""Who takes part in a comparison, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pcr_core.errors import ConfigError
from pcr_core.index.adaptive import Adaptive
from pcr_core.index.ghosts import REMEMBERED_PER_CHUNK
from pcr_core.index.node import Node
from pcr_core.index.policies import EvictionPolicy, LookAheadLru, Lru, Pgdsf, Rank
from pcr_core.simulator.optimum import FarthestUse
from pcr_core.simulator.replay import Contender, Price, flat_price
from pcr_core.trace import Trace

NAMES = (
    "lru",
    "lookahead-lru",
    "gdsf",
    "pgdsf",
    "pgdsf+memory",
    "lfu",
    "lfu+memory",
    "adaptive",
    "optimum",
)
"""All contenders. Those with ``+memory`` know the use counts of evicted chunks;
``pgdsf+memory`` is the engine's ``"pgdsf"``. ``gdsf``, ``pgdsf`` without memory, and
both ``lfu`` are for comparison only. The last one knows the future."""

USUAL = tuple(name for name in NAMES if name not in ("gdsf", "lfu"))
"""Those that tell something where all tokens cost the same: ``gdsf`` is ``pgdsf``
there, and ``lfu`` lags behind ``lfu+memory``."""


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
    "gdsf": lambda trace, capacity: Pgdsf(),
    "pgdsf": lambda trace, capacity: Pgdsf(),
    "pgdsf+memory": lambda trace, capacity: Pgdsf(),
    "lfu": lambda trace, capacity: Lfu(),
    "lfu+memory": lambda trace, capacity: Lfu(),
    "adaptive": lambda trace, capacity: Adaptive(capacity),
    "optimum": lambda trace, capacity: FarthestUse(trace),
}


def contenders(
    names: Sequence[str] = NAMES,
    windows: Sequence[int | None] = (6, 64),
    price: Price = flat_price,
) -> list[Contender]:
    """Return the contenders of these names, in this order.

    Args:
        names: Some of ``NAMES``.
        windows: Look-ahead LRU takes part once with each; ``None`` is the engine's
            ``"auto"``, which ``adaptive`` always has.
        price: What computing a token costs. Not for ``gdsf``: a chunk's cost is its
            size there, whatever is before it, which is what sets RAGCache's PGDSF apart
            from it (arXiv 2404.12457, 5.1).

    Raises:
        ConfigError: For an unknown name, no window, or one below 1.
    """
    if not windows or any(window is not None and window < 1 for window in windows):
        raise ConfigError("a look-ahead window must be at least 1 request, or 'auto'")
    found = []
    for name in names:
        if name not in _MAKERS:
            raise ConfigError(f"no policy {name!r}; there are: {', '.join(NAMES)}")
        told = flat_price if name == "gdsf" else price
        found += [_make(name, window, told) for window in _windows_of(name, windows)]
    return found


def _windows_of(name: str, windows: Sequence[int | None]) -> Sequence[int | None]:
    if name == "lookahead-lru":
        return windows
    return (None,) if name == "adaptive" else (0,)


def _make(name: str, window: int | None, price: Price) -> Contender:
    remembers = name.endswith("+memory") or name == "adaptive"
    remembered = REMEMBERED_PER_CHUNK if remembers else 0
    return Contender(name, _MAKERS[name], window, remembered, price)
