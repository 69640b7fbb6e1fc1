"""The device tier: rows at rest, whose KV the next request may go on from.

A finished row keeps its KV. A request that begins with the same tokens takes the row
over and computes, or loads, from there on; nothing is copied. A row at rest has no
claim on its memory: whoever needs a row takes the one that is worth least, there is a
limit to what all of them hold, and if memory runs out they go first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pcr_core.errors import DeviceMemoryError
from pcr_core.model.row_buffer import RowBuffer

Tokens = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(slots=True, eq=False)
class RestingRow:
    """A row that no request uses.

    Attributes:
        buffer: Its memory.
        tokens: The tokens whose KV it holds, from position 0 on.
    """

    buffer: RowBuffer
    tokens: Tokens

    def common(self, tokens: Tokens) -> int:
        """How many leading tokens it has in common with others."""
        count = min(len(self.tokens), len(tokens))
        differ = self.tokens[:count] != tokens[:count]
        return int(differ.argmax()) if differ.any() else count


class RowPool:
    """Rows for requests. Engine thread only.

    Args:
        make: Makes an empty row.
        most: Rows that keep their KV, at most, those in use among them. With none, one
            is kept for its memory.
        most_bytes: What all rows at rest may hold together. A longer row is not kept.
        align: Computing starts at multiples of this many tokens.
        most_taken_bytes: What all rows in use may hold together.

    Attributes:
        most: See above.
        spare: Frees memory beside the rows when it runs out; returns whether it did.
    """

    def __init__(
        self,
        make: Callable[[], RowBuffer],
        most: int,
        most_bytes: float = math.inf,
        align: int = 1,
        most_taken_bytes: float = math.inf,
    ) -> None:
        self.most = most
        self._make = make
        self._most_bytes = most_bytes
        self._align = align
        self._most_taken = most_taken_bytes
        self.spare: Callable[[], bool] = lambda: False
        self._resting: list[RestingRow] = []  # the longest at rest first
        self._taken: list[RowBuffer] = []
        self._barred: set[int] = set()  # ids of taken rows that must not be kept

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.resting_bytes + sum(buffer.nbytes for buffer in self._taken)

    @property
    def resting_bytes(self) -> int:
        """Bytes of the rows at rest."""
        return sum(row.buffer.nbytes for row in self._resting)

    @property
    def taken_bytes(self) -> int:
        """Bytes of the rows in use."""
        return sum(buffer.nbytes for buffer in self._taken)

    def fits(self, room: int) -> bool:
        """Whether one row more, of so many positions, is within the limit."""
        return self.taken_bytes + self._make().bytes_for(room) <= self._most_taken

    def resident(self, prompt: Sequence[int]) -> int:
        """With how many leading tokens in place a prompt would start now. Pure."""
        wanted = _packed(prompt)
        return self._usable(self._choose(wanted, 0), wanted)

    def take(self, prompt: Sequence[int], room: int) -> tuple[RowBuffer, int]:
        """A row for a request.

        Args:
            prompt: Whose KV is taken over, as far as the row holds it.
            room: Positions it is to have.

        Returns:
            The row, and how many leading tokens need not be computed. The last one
            always is, for its logits.

        Raises:
            DeviceMemoryError: If there is no memory for it.
        """
        wanted = _packed(prompt)
        row = self._choose(wanted, room)
        resident = self._usable(row, wanted)
        if row is not None:
            self._resting.remove(row)
        buffer = row.buffer if row is not None else self._make()
        surplus = buffer.nbytes - buffer.bytes_for(room)
        if surplus > 0 and 2 * buffer.nbytes > self._most_taken - self.taken_bytes:
            buffer.release()  # others would find no room beside so long a row
            resident = 0
        if not self.fits(room):
            raise DeviceMemoryError(self._over(room))
        resident = self._make_room(buffer, room, resident)
        self._taken.append(buffer)
        return buffer, resident

    def grow(self, buffer: RowBuffer, room: int, keep: int) -> None:
        """Make room in a row that is in use.

        Args:
            buffer: The row; it may come back with less room than asked for when
                that is all there is, but with ``keep + 1`` positions at least.
            room: Positions it is to have.
            keep: Leading positions that stay.

        Raises:
            DeviceMemoryError: If there is no memory for it; the row is as it was.
        """
        beside = self.taken_bytes - buffer.nbytes
        for wanted in (room, keep + 1):
            if beside + buffer.bytes_for(wanted) <= self._most_taken:
                self._grow_taken(buffer, wanted, keep)
                return
        raise DeviceMemoryError(self._over(keep + 1))

    def _grow_taken(self, buffer: RowBuffer, room: int, keep: int) -> None:
        larger = self._make()
        for attempt in range(2):
            try:
                larger.reserve(room)
                break
            except (RuntimeError, MemoryError) as error:
                larger.release()
                if attempt or not self.give_up():
                    raise DeviceMemoryError(
                        f"there is no memory for the KV of {room} tokens; use a "
                        "smaller max_tokens or max_batch_size"
                    ) from error
        buffer.move_to(larger, keep)

    def _over(self, room: int) -> str:
        return (
            f"row_bytes={self._most_taken:.0f} leaves no room for the KV of {room} "
            "tokens; raise it, or use a shorter prompt or a smaller max_tokens"
        )

    def give_back(self, buffer: RowBuffer, tokens: Sequence[int], reach: int) -> None:
        """Lay a row to rest.

        Args:
            buffer: The row.
            tokens: Tokens whose KV it holds and others may go on from; none if its
                contents must go.
            reach: Positions that may have been written since it was taken.
        """
        self._taken.remove(buffer)
        if id(buffer) in self._barred:
            self._barred.discard(id(buffer))
            tokens, reach = (), buffer.capacity
        if not (self.most and len(tokens)):
            tokens = ()
            buffer.clear(reach)
        if buffer.nbytes > self._most_bytes:
            buffer.release()
            return
        self._resting.append(RestingRow(buffer, _packed(tokens)))
        while self._too_many():
            self._drop(self._least())

    def forget(self) -> None:
        """Drop all contents at rest, and those of taken rows when they come back."""
        for row in self._resting:
            row.buffer.clear(row.buffer.capacity)
            row.tokens = _packed(())  # a slice would keep the ids
        self._barred = {id(buffer) for buffer in self._taken}

    def give_up(self) -> bool:
        """Free all memory at rest, and what is spare; returns whether there was any."""
        freed = self.spare() or self.resting_bytes > 0
        while self._resting:
            self._drop(self._resting[0])
        return freed

    def close(self) -> None:
        """Free all memory."""
        self.give_up()
        for buffer in self._taken:
            buffer.release()
        self._taken = []

    # --- which row ---

    def _choose(self, wanted: Tokens, room: int) -> RestingRow | None:
        """The row for a prompt; ``None`` to make a new one.

        The one that holds most of its tokens, unless more would be thrown away than
        taken over; else an empty one, a new one, or the longest at rest.
        """
        saved = {row: self._usable(row, wanted) for row in self._resting}
        fitting = [
            row for row in self._resting if 0 < len(row.tokens) <= 2 * saved[row]
        ]
        if fitting:
            return max(fitting, key=lambda row: (saved[row], -len(row.tokens)))
        empty = [row for row in self._resting if not len(row.tokens)]
        if empty:
            return min(empty, key=lambda row: _misfit(row.buffer, room))
        if len(self._resting) + len(self._taken) < self.most:
            return None
        return self._resting[0] if self._resting else None

    def _usable(self, row: RestingRow | None, wanted: Tokens) -> int:
        """Of the tokens in place, those that need not be computed again."""
        if row is None or not len(wanted):
            return 0
        return min(row.common(wanted), len(wanted) - 1) // self._align * self._align

    def _too_many(self) -> bool:
        if len(self._resting) > max(1, self.most):
            return True
        return self.resting_bytes > self._most_bytes

    def _least(self) -> RestingRow:
        """The row to do without: an empty one, or the longest at rest."""
        return next((r for r in self._resting if not len(r.tokens)), self._resting[0])

    def _drop(self, row: RestingRow) -> None:
        self._resting.remove(row)
        row.buffer.release()

    # --- its memory ---

    def _make_room(self, buffer: RowBuffer, room: int, resident: int) -> int:
        """Grow a row, at the cost of those at rest if need be.

        Returns:
            How many leading tokens it still holds.
        """
        ample = self._ample(buffer, room) if resident else room
        if _grow(buffer, ample, resident) is None:
            return resident
        self.give_up()
        error = _grow(buffer, room, 0)
        if error is not None:
            raise DeviceMemoryError(
                f"there is no memory for the KV of {room} tokens ({error}); use a "
                "shorter prompt, a smaller max_tokens or another device"
            )
        return 0

    def _ample(self, buffer: RowBuffer, room: int) -> int:
        """Room for what follows, too: a conversation would grow at every turn.

        Not more than may be kept, nor more than is left beside the rows in use.
        """
        ample = buffer.capacity + buffer.capacity // 2
        if room <= buffer.capacity or ample <= room:
            return room
        left = self._most_taken - self.taken_bytes
        return ample if buffer.bytes_for(ample) <= min(self._most_bytes, left) else room


def _packed(tokens: Sequence[int]) -> Tokens:
    return np.array(tokens, dtype=np.int64)


def _misfit(buffer: RowBuffer, room: int) -> tuple[bool, int]:
    """Orders rows by how well they fit: the smallest that is enough, or the largest."""
    short = buffer.capacity < room
    return short, -buffer.capacity if short else buffer.capacity


def _grow(buffer: RowBuffer, room: int, keep: int) -> str | None:
    """Grow a row, or empty it and say why not.

    The error itself would keep what the failed attempt holds.
    """
    try:
        buffer.reserve(room, keep=keep)
    except (RuntimeError, MemoryError) as error:  # torch raises the former
        buffer.release()
        return (str(error) or type(error).__name__).splitlines()[0]
    return None
