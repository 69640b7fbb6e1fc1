"""The queue as the tree sees it: which chunks will be needed, and how soon."""

from __future__ import annotations

from collections.abc import Sequence

from pcr_core.index.chunk import ChunkKey
from pcr_core.index.prefix_tree import PrefixTree

MAX_WINDOW = 64
"""Further ahead nothing is gained: what is protected would fill the tier."""


class LookAhead:
    """Reserves the chunks of the requests that run next (PCR, arXiv 2603.23049).

    Engine thread only.

    Args:
        tree: Whose nodes to reserve.
    """

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree

    def update(self, window: Sequence[Sequence[ChunkKey]]) -> None:
        """Protect the whole path of each request, and nothing else.

        Of several requests that share a chunk the nearest counts. To be called after
        each submit, start, finish and cancel.

        Args:
            window: Keys of the first waiting requests, nearest request first.
        """
        positions: dict[ChunkKey, int] = {}
        for position in range(len(window) - 1, -1, -1):
            positions.update(dict.fromkeys(window[position], position))
        self._tree.reserve(positions)

    def clear(self) -> None:
        """Protect nothing."""
        self._tree.reserve({})


def window_size(budget_chunks: float, mean_chunks: float) -> int:
    """Return how many waiting requests to look at (CachedAttention, ATC'24).

    Args:
        budget_chunks: Chunks that the DRAM tier holds.
        mean_chunks: Mean length of a request, in chunks; 0 while none was seen.

    Returns:
        As many requests as fit into the tier, from 1 to ``MAX_WINDOW``.
    """
    if mean_chunks <= 0:
        return MAX_WINDOW
    return max(1, min(MAX_WINDOW, int(budget_chunks / mean_chunks)))
