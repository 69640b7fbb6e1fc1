"""Memory of decode steps that never moves while a recording of one is in use.

A row that decodes is copied into a slot, once; what the steps add there goes back into
the row's own buffer when it leaves. So recordings depend on the slots alone: rows come,
go and grow without one being made anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from pcr_core.index.chunk import LayerShape
from pcr_core.model.key_blocks import KEY_BLOCK
from pcr_core.model.layerwise_cache import LayerwiseCache


def rows_for(count: int) -> int:
    """Rows of a step for ``count`` rows: a power of two."""
    return 1 << (count - 1).bit_length()


def places_for(tokens: int) -> int:
    """Places of a step whose longest row has ``tokens`` tokens: doubled key blocks."""
    return KEY_BLOCK * rows_for(-(-tokens // KEY_BLOCK))


@dataclass(slots=True)
class _Seat:
    """A row's place.

    Attributes:
        slot: Its index.
        copied: Leading tokens that the row's own buffer holds as well.
    """

    slot: int
    copied: int


class DecodeSlots:
    """Slots of one length. Engine thread only.

    Args:
        shapes: KV shape of every layer.
        dtype: Of the KV.
        device: Where it is.
        most_bytes: What all of them may take, as long as memory is not short.
        moving: Called before the memory moves or goes.

    Attributes:
        keys, values: Per layer ``[rows, kv_heads, places, dim]``, finite everywhere.
        rows, places: How many there are.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        dtype: torch.dtype,
        device: torch.device,
        most_bytes: float,
        moving: Callable[[], None],
    ) -> None:
        self._shapes = shapes
        self._dtype = dtype
        self._device = device
        self._most_bytes = most_bytes
        self._moving = moving
        self._seats: dict[LayerwiseCache, _Seat] = {}
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.rows = self.places = 0

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(part.nbytes for part in (*self.keys, *self.values))

    def seat(self, rows: Sequence[LayerwiseCache]) -> list[int] | None:
        """Have these rows, and no others, in the first ``rows_for(len(rows))`` slots.

        Returns:
            The slot of each; ``None`` if there is no room for all, or not for one
            token more of each: then none of them has a slot.
        """
        places = places_for(max(row.length for row in rows) + 1)
        if not self._reserve(rows_for(len(rows)), places):
            self.clear()
            return None
        first = rows_for(len(rows))
        for row, seat in list(self._seats.items()):
            if row not in rows or seat.slot >= first:
                self.leave(row)
        free = set(range(first)) - {seat.slot for seat in self._seats.values()}
        for row in rows:
            if row not in self._seats:
                self._enter(row, free.pop())
        return [self._seats[row].slot for row in rows]

    def _enter(self, row: LayerwiseCache, slot: int) -> None:
        length, buffer = row.length, row.buffer
        for ours, its in ((self.keys, buffer.keys), (self.values, buffer.values)):
            for to, source in zip(ours, its, strict=True):
                to[slot, :, :length] = source[0, :, :length]
        self._seats[row] = _Seat(slot, length)

    def leave(self, row: LayerwiseCache) -> None:
        """Copy what steps have added into the row's buffer, and clear its slot.

        A row that has no slot is left alone.
        """
        seat = self._seats.pop(row, None)
        if seat is None:
            return
        start, stop, buffer = seat.copied, row.length, row.buffer
        for ours, its in ((self.keys, buffer.keys), (self.values, buffer.values)):
            for source, to in zip(ours, its, strict=True):
                to[0, :, start:stop] = source[seat.slot, :, start:stop]
                source[seat.slot].zero_()

    def clear(self) -> None:
        """Have every row leave."""
        for row in list(self._seats):
            self.leave(row)

    def release(self) -> None:
        """Have every row leave, and free the memory."""
        self.clear()
        self._moving()
        self.keys, self.values = [], []
        self.rows = self.places = 0

    def give_up(self) -> None:
        """Free the memory, and take at most half as much from now on: it was short.

        Else it would be taken again at the next step, and be missed again.
        """
        self._most_bytes /= 2
        self.release()

    def _reserve(self, rows: int, places: int) -> bool:
        """Grow if need be and possible; returns whether there is room.

        Never to another shape of the same size: two mixes of rows in turn would have
        every recording made anew each time.
        """
        if rows <= self.rows and places <= self.places:
            return True
        rows, places = max(rows, self.rows), max(places, self.places)
        if self._bytes_for(rows, places) > self._most_bytes:
            return False
        self.release()
        try:
            for shape in self._shapes:
                self.keys.append(self._zeros(rows, shape.kv_heads, places, shape.k_dim))
                self.values.append(
                    self._zeros(rows, shape.kv_heads, places, shape.v_dim)
                )
        except (RuntimeError, MemoryError):  # torch raises the former
            self.keys, self.values = [], []
            self._most_bytes /= 2
            return False
        self.rows, self.places = rows, places
        return True

    def _bytes_for(self, rows: int, places: int) -> int:
        per_token = sum(s.kv_heads * (s.k_dim + s.v_dim) for s in self._shapes)
        return rows * places * per_token * self._dtype.itemsize

    def _zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=self._dtype, device=self._device)
