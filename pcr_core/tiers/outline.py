"""A prompt as the planner sees it: chunks that will be there, and gaps between them."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Outline:
    """Which chunks of a prompt have to be computed in any case: those in none of sets.

    Attributes:
        there: Sets of chunk indices that will not be computed; they may be live views.
        chunks: Full chunks of the prompt.
        tokens: Length of the prompt.
        chunk_tokens: Tokens per chunk.
    """

    there: Sequence[Container[int]]
    chunks: int
    tokens: int
    chunk_tokens: int

    def gap(self, index: int) -> int:
        """The first chunk from ``index`` on that has to be computed.

        ``chunks`` if there is none: what follows the last full chunk always has to.
        """
        while self._has(index):
            index += 1
        return index

    def computed_before(self, index: int) -> int:
        """Tokens directly before a chunk that have to be computed."""
        first = index
        while first > 0 and not self._has(first - 1):
            first -= 1
        return (index - first) * self.chunk_tokens

    def computed_from(self, index: int) -> int:
        """Tokens from the start of a chunk on that have to be computed in one piece."""
        end = index
        while end < self.chunks and not self._has(end):
            end += 1
        stop = self.tokens if end == self.chunks else end * self.chunk_tokens
        return stop - index * self.chunk_tokens

    def _has(self, index: int) -> bool:
        return any(index in place for place in self.there)
