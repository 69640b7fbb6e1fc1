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
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from pcr_core.index.chunk import LayerShape
from pcr_core.model import _compat
from pcr_core.model.attention import KEY_BLOCK, round_up


class ChunkTensors(Protocol):
    """One chunk's memory, seen layer by layer. A DRAM slot is one.

    Attributes:
        index: Chunks whose indices follow each other are neighbours in memory.
    """

    index: int

    def span(self, count: int, layer: int, /) -> tuple[torch.Tensor, torch.Tensor]:
        """K ``[count, kv_heads, chunk_tokens, k_dim]`` and V ``[..., v_dim]``.

        Of this chunk and the ``count - 1`` that follow it in memory.
        """
        ...


@dataclass(slots=True)
class Run:
    """Chunks that follow each other both in the prompt and in memory.

    Attributes:
        position: Of the first token.
        count: Number of chunks.
        first: The first chunk.
    """

    position: int
    count: int
    first: ChunkTensors


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
        self.release()  # the old before allocating the new
        capacity = round_up(tokens, KEY_BLOCK)
        for shape in self._shapes:
            self.keys.append(self._zeros(shape.kv_heads, capacity, shape.k_dim))
            self.values.append(self._zeros(shape.kv_heads, capacity, shape.v_dim))
        self.capacity = capacity  # last: a failed allocation leaves an empty buffer

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

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(buffer.nbytes for buffer in (*self.keys, *self.values))

    def _zeros(self, heads: int, tokens: int, dim: int) -> torch.Tensor:
        shape = (1, heads, tokens, dim)
        return torch.zeros(shape, dtype=self._dtype, device=self._device)


@dataclass(slots=True)
class _Forward:
    """What all layers of a cache share.

    Not the cache itself: layers that referred to it would make a cycle, and buffers of
    closed engines would wait for the collector.
    """

    buffer: RowBuffer
    chunk_tokens: int
    length: int = 0
    reach: int = 0
    loads: list[Run] = field(default_factory=list)
    stores: list[Run] = field(default_factory=list)


class _Layer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of ``LayerwiseCache``; positions are kept by the cache."""

    is_sliding = False
    is_compileable = False

    def __init__(self, owner: _Forward, index: int) -> None:
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
        owner = self._owner
        for run in owner.loads:
            k, v = run.first.span(run.count, self._index)
            self._chunks(self._k, run).copy_(k, non_blocking=True)
            self._chunks(self._v, run).copy_(v, non_blocking=True)
        start, stop = owner.length, owner.length + key_states.shape[2]
        owner.reach = max(owner.reach, stop)
        self._k[:, :, start:stop] = key_states
        self._v[:, :, start:stop] = value_states
        for run in owner.stores:
            k, v = run.first.span(run.count, self._index)
            k.copy_(self._chunks(self._k, run), non_blocking=True)
            v.copy_(self._chunks(self._v, run), non_blocking=True)
        return self._k, self._v

    def _chunks(self, buffer: torch.Tensor, run: Run) -> torch.Tensor:
        """The run's part of a buffer as ``[count, kv_heads, chunk_tokens, dim]``."""
        tokens = self._owner.chunk_tokens
        part = buffer[0, :, run.position : run.position + run.count * tokens]
        return part.view(part.shape[0], run.count, tokens, -1).transpose(0, 1)

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
    """The KV of one row during one request. Engine thread only."""

    def __init__(self, buffer: RowBuffer, chunk_tokens: int) -> None:
        self._forward = _Forward(buffer, chunk_tokens)
        super().__init__(
            layers=[_Layer(self._forward, i) for i in range(len(buffer.keys))]
        )

    @property
    def buffer(self) -> RowBuffer:
        """Where the KV is."""
        return self._forward.buffer

    @property
    def length(self) -> int:
        """Tokens whose KV is in place, or will be when their layer runs."""
        return self._forward.length

    @length.setter
    def length(self, tokens: int) -> None:
        self._forward.length = tokens

    @property
    def reach(self) -> int:
        """Positions that a forward may have written, a broken one included."""
        return self._forward.reach

    @property
    def loads(self) -> list[Run]:
        """Stored chunks to copy in during the next forward."""
        return self._forward.loads

    @property
    def stores(self) -> list[Run]:
        """Chunks to fill during the next forward."""
        return self._forward.stores

    def begin(
        self,
        start: int,
        loads: Iterable[Run] = (),
        stores: Iterable[Run] = (),
    ) -> None:
        """Prepare a forward whose first query has position ``start``."""
        self._forward.length = start
        self._forward.loads = list(loads)
        self._forward.stores = list(stores)

    def end(self, tokens: int) -> None:
        """Note that a forward has added ``tokens`` tokens (padding not counted)."""
        self._forward.length += tokens
        self._forward.loads, self._forward.stores = [], []


def in_runs(
    chunks: Mapping[int, ChunkTensors], indices: Iterable[int], chunk_tokens: int
) -> list[Run]:
    """Join chunks that follow each other in the prompt and in memory.

    Args:
        chunks: By index within the prompt.
        indices: Which of them, ascending.
        chunk_tokens: Tokens per chunk.
    """
    runs: list[Run] = []
    for index in indices:
        chunk, position = chunks[index], index * chunk_tokens
        if runs:
            last = runs[-1]
            adjacent = last.position + last.count * chunk_tokens == position
            if adjacent and last.first.index + last.count == chunk.index:
                last.count += 1
                continue
        runs.append(Run(position, 1, chunk))
    return runs
