"""Chunks that begin like others: found by their tokens, not by their key.

A key names a whole chunk, so it cannot tell that two chunks behind the same tokens have
their first hundred in common. Here is kept which tokens the chunks with a slot hold, 4
bytes a token. Knows nothing of states. Engine thread only.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence

from pcr_core.index.chunk import token_bytes
from pcr_core.index.node import Node
from pcr_core.prefix import shared_prefix

_WIDTH = 4


class Siblings:
    """Chunks by the chunk before them, sorted by their tokens.

    The one that has most leading tokens in common with others is then next to where
    those would stand.
    """

    def __init__(self) -> None:
        self._families: dict[bytes, list[tuple[bytes, Node]]] = {}
        self._places: dict[Node, tuple[bytes, bytes]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._places)

    def add(self, node: Node, parent: bytes, tokens: Sequence[int]) -> None:
        """Learn what a chunk holds.

        Args:
            node: The chunk.
            parent: Key of the chunk before it, or the root.
            tokens: Its token ids.
        """
        packed = token_bytes(tokens)
        self._places[node] = parent, packed
        insort(self._families.setdefault(parent, []), (packed, node))

    def remove(self, node: Node) -> None:
        """Forget a chunk."""
        parent, packed = self._places.pop(node)
        family = self._families[parent]
        del family[bisect_left(family, (packed, node))]
        if not family:
            del self._families[parent]

    def nearest(
        self, parent: bytes, tokens: Sequence[int], allowed: Callable[[Node], bool]
    ) -> tuple[Node | None, int]:
        """The chunk that has most leading tokens in common with others.

        Args:
            parent: Key of the chunk before it, or the root.
            tokens: The others.
            allowed: Whether a chunk may be the one.

        Returns:
            It, or ``None``, and how many tokens these are.
        """
        family = self._families.get(parent)
        if not family:
            return None, 0
        packed = token_bytes(tokens)
        at = bisect_left(family, (packed,))
        best: tuple[Node | None, int] = None, 0
        for way in (range(at - 1, -1, -1), range(at, len(family))):
            found = next((family[i] for i in way if allowed(family[i][1])), None)
            if found is None:
                continue
            shared = shared_prefix(packed, found[0]) // _WIDTH
            if shared > best[1]:
                best = found[1], shared
        return best
