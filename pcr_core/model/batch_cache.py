"""A transformers ``Cache`` for one decode step of several rows of different lengths.

Each row keeps its own buffer. A layer's ``update`` writes every row's new KV where that
row ends, and returns the rows' buffers as they are; the engine's attention function
goes over them row by row. Nothing is padded to a common length and nothing is copied,
so a row's attention has the bits that it has alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from pcr_core.model.layerwise_cache import LayerwiseCache


class RowsKv:
    """Keys or values of one layer, row by row, in place of a tensor.

    Attributes:
        positions: Of each row's query; what is behind it may be anything finite.
    """

    def __init__(
        self, buffers: Sequence[torch.Tensor], positions: Sequence[int]
    ) -> None:
        self._buffers = buffers
        self.positions = positions

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Each row's buffer ``[1, kv_heads, capacity, dim]``."""
        return iter(self._buffers)


class _Layer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of all rows."""

    is_sliding = False
    is_compileable = False

    def __init__(
        self, rows: Sequence[LayerwiseCache], index: int, positions: Sequence[int]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._positions = positions
        self._k = [row.buffer.keys[index] for row in rows]
        self._v = [row.buffer.values[index] for row in rows]
        self.is_initialized = True

    def lazy_initialization(self, *_: Any, **__: Any) -> None:
        """Nothing to do: the buffers exist."""

    def update(  # type: ignore[override]
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[RowsKv, RowsKv]:
        """Append ``[rows, kv_heads, 1, dim]``, one token to each row."""
        for row, at in enumerate(self._positions):
            self._k[row][0, :, at] = key_states[row, :, 0]
            self._v[row][0, :, at] = value_states[row, :, 0]
        return RowsKv(self._k, self._positions), RowsKv(self._v, self._positions)

    def get_mask_sizes(self, *_: Any) -> tuple[int, int]:
        """As for the longest row; each row's mask is made by attention."""
        return max(self._positions) + 1, 0

    def get_seq_length(self, *_: Any) -> int:
        """Of the longest row; positions are handed to the model."""
        return max(self._positions)

    def get_max_length(self) -> int:
        """Tokens that every row can hold."""
        return min(k.shape[2] for k in self._k)

    get_max_cache_shape = get_max_length  # its name before transformers 5.x renamed it


class BatchCache(Cache):
    """The KV of several rows for one forward of one token each. Engine thread only.

    Args:
        rows: Each with room for one token more.
    """

    def __init__(self, rows: Sequence[LayerwiseCache]) -> None:
        positions = [row.length for row in rows]
        layers = range(len(rows[0].buffer.keys))
        super().__init__(layers=[_Layer(rows, i, positions) for i in layers])
