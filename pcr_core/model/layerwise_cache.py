"""A transformers ``Cache`` that takes stored KV in, and gives new KV out, per layer.

The recipe (papers.md of PCR, section "layer-wise overlapping", on unmodified model
code): the cache reports the planned prefix length before the data is there, because
masks and positions are built first; each layer copies its own part of the stored
chunks when its ``update`` is called, just before attention needs it; and it hands the
layer's new KV to the chunks being filled at once, instead of after the forward.

Buffers are preallocated and written in place. ``DynamicCache`` concatenates the whole
KV of every layer at every step: on a CPU that is a third of a decode step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from pcr_core.index.chunk import LayerShape
from pcr_core.model import _compat
from pcr_core.model.attention import KEY_BLOCK, round_up


class ChunkTensors(Protocol):
    """One chunk's memory, seen layer by layer. A DRAM slot is one."""

    def layer(self, index: int, /) -> tuple[torch.Tensor, torch.Tensor]:
        """K ``[kv_heads, chunk_tokens, k_dim]`` and V ``[..., v_dim]``."""
        ...


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

    def reserve(self, tokens: int) -> None:
        """Make room for ``tokens`` tokens. Contents are lost when the buffer grows."""
        if tokens <= self.capacity:
            return
        self.keys, self.values = [], []  # free the old before allocating the new
        self.capacity = round_up(tokens, KEY_BLOCK)
        for shape in self._shapes:
            self.keys.append(self._zeros(shape.kv_heads, shape.k_dim))
            self.values.append(self._zeros(shape.kv_heads, shape.v_dim))

    def clear(self, tokens: int) -> None:
        """Zero the first ``tokens`` positions, so that nothing non-finite stays.

        Called between requests, off the path to the first token.
        """
        for buffer in (*self.keys, *self.values):
            buffer[:, :, :tokens].zero_()

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(buffer.nbytes for buffer in (*self.keys, *self.values))

    def _zeros(self, heads: int, dim: int) -> torch.Tensor:
        return torch.zeros(
            1, heads, self.capacity, dim, dtype=self._dtype, device=self._device
        )


class _Layer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of ``LayerwiseCache``; positions are kept by the cache."""

    is_sliding = False
    is_compileable = False

    def __init__(self, owner: LayerwiseCache, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owner = owner
        self._index = index
        self.keys = self._k = owner.buffer.keys[index]
        self.values = self._v = owner.buffer.values[index]
        self.is_initialized = True

    def lazy_initialization(self, *_: Any, **__: Any) -> None:
        """Nothing to do: the buffers exist."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Load this layer's chunks, append the new KV, hand out what is complete."""
        owner, tokens = self._owner, self._owner.chunk_tokens
        for at, chunk in owner.loads:
            k, v = chunk.layer(self._index)
            self._k[0, :, at : at + tokens].copy_(k, non_blocking=True)
            self._v[0, :, at : at + tokens].copy_(v, non_blocking=True)
        start, stop = owner.length, owner.length + key_states.shape[2]
        self._k[:, :, start:stop] = key_states
        self._v[:, :, start:stop] = value_states
        for at, chunk in owner.stores:
            k, v = chunk.layer(self._index)
            k.copy_(self._k[0, :, at : at + tokens], non_blocking=True)
            v.copy_(self._v[0, :, at : at + tokens], non_blocking=True)
        return self._k, self._v

    def get_mask_sizes(self, query: int | torch.Tensor, *_: Any) -> tuple[int, int]:
        """All keys up to the end of the last block the queries reach."""
        stop = self._owner.length + _compat.query_length(query)
        return min(round_up(stop, KEY_BLOCK), self._owner.buffer.capacity), 0

    def get_seq_length(self, *_: Any) -> int:
        """Tokens before the next query: the planned prefix, loaded or not yet."""
        return self._owner.length

    def get_max_length(self) -> int:
        """Tokens the buffer can hold."""
        return self._owner.buffer.capacity

    get_max_cache_shape = get_max_length  # its name before transformers 5.x renamed it


class LayerwiseCache(Cache):
    """The KV of one row during one request. Engine thread only.

    Attributes:
        length: Tokens whose KV is in place, or will be when their layer runs.
        loads: ``(position, chunk)`` to copy in during the next forward.
        stores: ``(position, chunk)`` to copy out during the next forward.
    """

    def __init__(self, buffer: RowBuffer, chunk_tokens: int) -> None:
        self.buffer = buffer
        self.chunk_tokens = chunk_tokens
        self.length = 0
        self.loads: list[tuple[int, ChunkTensors]] = []
        self.stores: list[tuple[int, ChunkTensors]] = []
        super().__init__(layers=[_Layer(self, i) for i in range(len(buffer.keys))])

    def begin(
        self,
        start: int,
        loads: Iterable[tuple[int, ChunkTensors]] = (),
        stores: Iterable[tuple[int, ChunkTensors]] = (),
    ) -> None:
        """Prepare a forward whose first query has position ``start``."""
        self.length = start
        self.loads = list(loads)
        self.stores = list(stores)

    def end(self, tokens: int) -> None:
        """Note that a forward has added ``tokens`` tokens (padding not counted)."""
        self.length += tokens
        self.loads, self.stores = [], []


def at_positions(
    chunks: Mapping[int, ChunkTensors], indices: Iterable[int], chunk_tokens: int
) -> list[tuple[int, ChunkTensors]]:
    """Pair each chunk with the position of its first token."""
    return [(index * chunk_tokens, chunks[index]) for index in indices]
