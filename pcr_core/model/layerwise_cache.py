"""A transformers ``Cache`` that takes stored KV in, and gives new KV out, per layer.

The recipe (PCR, arXiv 2603.23049, layer-wise overlapping, on unmodified model code):
the cache reports the planned prefix length before the data is there, because masks and
positions are built first; a layer's ``update`` waits for that layer's part of the
stored chunks only, just before attention needs it; and it hands the layer's new KV to
the chunks being filled at once, instead of after the forward. What is copied, and on
which queues, is up to ``Transfers``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from pcr_core.model import _compat
from pcr_core.model.key_blocks import KEY_BLOCK, round_up
from pcr_core.model.row_buffer import RowBuffer
from pcr_core.model.streams import Streams
from pcr_core.model.transfers import Copied, Run, Transfers


class Clock(Protocol):
    """Notes when compute comes to a layer's cache, and when it goes on."""

    def enter(self) -> None:
        """Compute has come to a layer's cache."""

    def leave(self) -> None:
        """Compute goes on from it."""


class NoClock:
    """Notes nothing: decode steps are not drawn layer by layer."""

    def enter(self) -> None:
        """Nothing."""

    def leave(self) -> None:
        """Nothing."""


NO_CLOCK = NoClock()


class _Forward:
    """What all layers of a cache share.

    Not the cache itself: layers that referred to it would make a cycle, and buffers of
    closed engines would wait for the collector.
    """

    def __init__(self, buffer: RowBuffer, streams: Streams) -> None:
        self.buffer = buffer
        self.transfers = Transfers(buffer, streams)
        self.clock: Clock = NO_CLOCK
        self.length = 0
        self.reach = 0


class _Layer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of ``LayerwiseCache``; positions are kept by the cache."""

    is_sliding = False
    is_compileable = False

    def __init__(self, forward: _Forward, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._forward = forward
        self._index = index
        self.keys = self._k = forward.buffer.keys[index]
        self.values = self._v = forward.buffer.values[index]
        self.is_initialized = True

    def lazy_initialization(self, *_: Any, **__: Any) -> None:
        """Nothing to do: the buffers exist."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Wait for this layer's chunks, append the new KV, send off what is kept."""
        forward = self._forward
        forward.clock.enter()
        forward.transfers.enter(self._index)
        start, stop = forward.length, forward.length + key_states.shape[2]
        forward.reach = max(forward.reach, stop)
        self._k[:, :, start:stop] = key_states
        self._v[:, :, start:stop] = value_states
        forward.transfers.leave(self._index)
        forward.clock.leave()
        return self._k, self._v

    def get_mask_sizes(self, query: int | torch.Tensor, *_: Any) -> tuple[int, int]:
        """All keys up to the end of the last block the queries reach."""
        stop = self._forward.length + _compat.query_length(query)
        return min(round_up(stop, KEY_BLOCK), self._forward.buffer.capacity), 0

    def get_seq_length(self, *_: Any) -> int:
        """Tokens before the next query: the planned prefix, loaded or not yet."""
        return self._forward.length

    def get_max_length(self) -> int:
        """Tokens the buffer can hold."""
        return self._forward.buffer.capacity

    get_max_cache_shape = get_max_length  # its name before transformers 5.x renamed it


class LayerwiseCache(Cache):
    """The KV of one row during one request. Engine thread only.

    Args:
        buffer: The row's memory.
        streams: Where copies run.
    """

    def __init__(self, buffer: RowBuffer, streams: Streams) -> None:
        self._forward = _Forward(buffer, streams)
        self._streams = streams
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

    @property
    def reach(self) -> int:
        """Positions that a forward may have written, a broken one included."""
        return self._forward.reach

    def begin(
        self,
        start: int,
        loads: Iterable[Run] = (),
        stores: Iterable[Run] = (),
        clock: Clock = NO_CLOCK,
    ) -> None:
        """Prepare a forward whose first query has position ``start``.

        Args:
            start: See above.
            loads: Stored chunks to copy in.
            stores: Chunks to fill.
            clock: Notes when compute works on which layer.
        """
        self._forward.length = start
        self._forward.clock = clock
        self._forward.transfers.begin(loads, stores)

    def extend(self) -> None:
        """Say that a decode step of several rows has added one token."""
        self._forward.length += 1

    def moved(self) -> LayerwiseCache:
        """The same row after its buffer has got other memory."""
        cache = LayerwiseCache(self._forward.buffer, self._streams)
        cache._forward.length = self._forward.length
        cache._forward.reach = self._forward.reach
        return cache

    def copy_from(self, other: LayerwiseCache) -> None:
        """Take over what another row holds; there must be room for it."""
        length = other.length
        ours, theirs = self.buffer, other.buffer
        for mine, its in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
            for to, source in zip(mine, its, strict=True):
                to[:, :, :length] = source[:, :, :length]
        self._forward.length = self._forward.reach = length

    def rewind(self, tokens: int) -> None:
        """Take back the last ``tokens`` tokens; their places are written again."""
        self._forward.length -= tokens

    def touch(self) -> None:
        """Say that the next position may be written."""
        self._forward.reach = max(self._forward.reach, self._forward.length + 1)

    def end(self, tokens: int) -> Copied:
        """End a forward that has added ``tokens`` tokens (padding not counted).

        Waits for its copies. To be called after a forward that failed, too, with 0:
        until then its chunks are in use.
        """
        self._forward.length += tokens
        self._forward.clock = NO_CLOCK
        return self._forward.transfers.end()
