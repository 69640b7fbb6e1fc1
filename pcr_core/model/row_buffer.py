"""The KV memory of one row: preallocated, written in place.

``DynamicCache`` concatenates the whole KV of every layer at every step: on a CPU that
is a third of a decode step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pcr_core.index.chunk import LayerShape
from pcr_core.model.key_blocks import KEY_BLOCK, round_up


class RowBuffer:
    """Preallocated KV of one row (one running request). Engine thread only.

    Attributes:
        keys, values: Per layer ``[1, kv_heads, capacity, dim]``; capacity is a multiple
            of ``KEY_BLOCK``. Positions without KV hold zeros or stale but finite
            numbers: attention reads whole key blocks and masks them, and only a NaN
            or an infinity would come through a mask.
    """

    def __init__(
        self, shapes: Sequence[LayerShape], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._shapes = shapes
        self._dtype = dtype
        self._device = device
        self.capacity = 0
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def reserve(self, tokens: int, keep: int = 0) -> None:
        """Make room for ``tokens`` tokens.

        Args:
            tokens: How many.
            keep: Leading positions whose contents stay; the others may be lost.
        """
        if tokens <= self.capacity:
            return
        capacity = round_up(tokens, KEY_BLOCK)
        keys, values = self.keys, self.values
        self.release()  # so that a failed allocation leaves an empty buffer
        if not keep:
            keys, values = [], []  # the old before allocating the new
        for layer, shape in enumerate(self._shapes):
            self.keys.append(self._zeros(shape.kv_heads, capacity, shape.k_dim))
            self.values.append(self._zeros(shape.kv_heads, capacity, shape.v_dim))
            if keep:
                self.keys[layer][:, :, :keep] = keys[layer][:, :, :keep]
                self.values[layer][:, :, :keep] = values[layer][:, :, :keep]
                keys[layer] = values[layer] = keys[layer][:0]
        self.capacity = capacity

    def move_to(self, larger: RowBuffer, keep: int) -> None:
        """Take another buffer's memory over, with the first ``keep`` positions in it.

        Layer by layer, so that little is there twice.
        """
        for layer in range(len(self.keys)):
            for old, new in (
                (self.keys, larger.keys),
                (self.values, larger.values),
            ):
                new[layer][:, :, :keep] = old[layer][:, :, :keep]
                old[layer] = new[layer]
        self.capacity = larger.capacity
        larger.keys, larger.values, larger.capacity = [], [], 0

    def release(self) -> None:
        """Free the memory."""
        self.capacity = 0
        self.keys, self.values = [], []

    def clear(self, tokens: int) -> None:
        """Zero the first ``tokens`` positions, so that nothing non-finite stays.

        Called between requests, off the path to the first token.
        """
        for buffer in (*self.keys, *self.values):
            buffer[:, :, :tokens].zero_()

    def bytes_for(self, tokens: int) -> int:
        """What room for so many tokens takes."""
        per_token = sum(s.kv_heads * (s.k_dim + s.v_dim) for s in self._shapes)
        return round_up(tokens, KEY_BLOCK) * per_token * self._dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(buffer.nbytes for buffer in (*self.keys, *self.values))

    def _zeros(self, heads: int, tokens: int, dim: int) -> torch.Tensor:
        shape = (1, heads, tokens, dim)
        return torch.zeros(shape, dtype=self._dtype, device=self._device)
