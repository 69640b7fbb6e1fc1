"""The device tier: rows at rest, whose KV the next request may go on from.

A finished row keeps its KV. A request that begins with the same tokens takes the row
over and computes, or loads, from there on; nothing is copied. A row at rest has no
claim on its memory: whoever needs a row takes the one that is worth least.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pcr_core.model.row_buffer import RowBuffer


@dataclass(slots=True, eq=False)
class RestingRow:
    """A row that no request uses.

    Attributes:
        buffer: Its memory.
        tokens: The tokens whose KV it holds, from position 0 on.
    """

    buffer: RowBuffer
    tokens: np.ndarray[tuple[int], np.dtype[np.int64]]

    def common(self, tokens: np.ndarray[tuple[int], np.dtype[np.int64]]) -> int:
        """How many leading tokens it has in common with others."""
        count = min(len(self.tokens), len(tokens))
        differ = self.tokens[:count] != tokens[:count]
        return int(differ.argmax()) if differ.any() else count


class RowPool:
    """Rows for requests. Engine thread only.

    Args:
        make: Makes an empty row.
        most: Rows that keep their KV, at most. With none, one is kept for its memory.

    Attributes:
        most: See above.
    """

    def __init__(self, make: Callable[[], RowBuffer], most: int) -> None:
        self._make = make
        self.most = most
        self._resting: list[RestingRow] = []  # the longest at rest first
        self._taken: list[RowBuffer] = []
        self._barred: set[int] = set()  # ids of taken rows that must not be kept

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        rows = [row.buffer for row in self._resting]
        return sum(row.nbytes for row in (*rows, *self._taken))

    def common(self, tokens: Sequence[int]) -> int:
        """How many leading tokens of a prompt a row at rest holds. Pure."""
        wanted = np.asarray(tokens, dtype=np.int64)
        return max((row.common(wanted) for row in self._resting), default=0)

    def take(self, tokens: Sequence[int]) -> tuple[RowBuffer, int]:
        """A row for a request.

        The one that holds most of its tokens, unless that throws away more than it
        saves while there is another to be had.

        Args:
            tokens: Its prompt.

        Returns:
            The row, and how many leading tokens' KV it holds.
        """
        wanted = np.asarray(tokens, dtype=np.int64)
        best = max(self._resting, key=lambda row: row.common(wanted), default=None)
        common = best.common(wanted) if best is not None else 0
        if best is None or 2 * common < len(best.tokens):
            best, common = self._least(), 0
        if best is None:
            buffer = self._make()
        else:
            self._resting.remove(best)
            buffer = best.buffer
        self._taken.append(buffer)
        return buffer, common

    def give_back(self, buffer: RowBuffer, tokens: Sequence[int], reach: int) -> None:
        """Lay a row to rest.

        Args:
            buffer: The row.
            tokens: Tokens whose KV it holds and others may go on from; none if its
                contents must go.
            reach: Positions that may have been written.
        """
        self._taken.remove(buffer)
        if id(buffer) in self._barred or not self.most:
            self._barred.discard(id(buffer))
            tokens = ()
        if not len(tokens):
            buffer.clear(reach)
        self._resting.append(RestingRow(buffer, np.asarray(tokens, dtype=np.int64)))
        while len(self._resting) > max(1, self.most):
            self._resting.remove(self._shortest())

    def forget(self) -> None:
        """Drop all contents at rest, and those of taken rows when they come back."""
        for row in self._resting:
            row.buffer.clear(row.buffer.capacity)
            row.tokens = row.tokens[:0]
        self._barred = {id(buffer) for buffer in self._taken}

    def close(self) -> None:
        """Free all memory."""
        for buffer in (*(row.buffer for row in self._resting), *self._taken):
            buffer.release()
        self._resting, self._taken = [], []

    def _least(self) -> RestingRow | None:
        """The row to overwrite, or ``None`` to make a new one."""
        empty = [row for row in self._resting if not len(row.tokens)]
        if empty:
            return empty[0]
        if len(self._resting) + len(self._taken) < self.most:
            return None
        return self._resting[0] if self._resting else None

    def _shortest(self) -> RestingRow:
        """The row to do without: an empty one, or the longest at rest."""
        return next((r for r in self._resting if not len(r.tokens)), self._resting[0])
