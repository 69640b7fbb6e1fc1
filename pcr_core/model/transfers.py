"""Which KV one forward copies in and out, and in what order. Knows no model code.

Chunks come in runs of neighbours, so that one copy moves many. For each layer a forward
calls ``enter`` when the layer's new keys and values exist, and ``leave`` when they are
in the row: between the two the row is complete up to the last new token.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from pcr_core.model.row_buffer import RowBuffer
from pcr_core.model.streams import Copy, Span, Stopwatch, Streams
from pcr_core.timeline.interval import Interval


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


class Arrival(Protocol):
    """A chunk that is being read; its layers come one after the other."""

    @property
    def layers(self) -> int:
        """How many leading layers are there and verified; it only grows."""
        ...

    def wait(self, layer: int, /) -> None:
        """Block until a layer is there.

        Raises:
            ChunkLostError: If it will not come.
        """
        ...


@dataclass(slots=True)
class Run:
    """Chunks that follow each other both in the prompt and in memory.

    Attributes:
        position: Of the first token.
        count: Number of chunks.
        first: The first chunk.
        tokens: Leading tokens of each chunk; less than all only in a run of one.
        arrivals: Those of its chunks that are still being read.
    """

    position: int
    count: int
    first: ChunkTensors
    tokens: int
    arrivals: list[Arrival] = field(default_factory=list)

    def sides(
        self, buffer: RowBuffer, layer: int
    ) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """K, then V, of a layer: in the row and in the chunks.

        All of shape ``[count, kv_heads, tokens, dim]``.
        """
        rows = buffer.keys[layer], buffer.values[layer]
        for row, chunks in zip(rows, self.first.span(self.count, layer), strict=True):
            part = row[0, :, self.position : self.position + self.count * self.tokens]
            part = part.view(part.shape[0], self.count, self.tokens, -1)
            yield part.transpose(0, 1), chunks[:, :, : self.tokens]


class Transfers:
    """The copies of one forward at a time. Engine thread only.

    Args:
        buffer: The row.
        streams: Where copies run.
    """

    def __init__(self, buffer: RowBuffer, streams: Streams) -> None:
        self._buffer = buffer
        self._streams = streams
        self._loads: list[Run] = []
        self._stores: list[Run] = []
        self._queued = 0  # layers whose loads are
        self._waited = 0.0

    def begin(self, loads: Iterable[Run], stores: Iterable[Run]) -> None:
        """Prepare a forward; loads that can start now, do."""
        self._loads, self._stores = list(loads), list(stores)
        self._queued, self._waited = 0, 0.0
        if self._loads:
            self._streams.load.fence()  # what uses the row now comes first
            self._queue_loads(-1)

    def enter(self, layer: int) -> None:
        """What compute queues from now on comes after this layer's loads.

        Raises:
            ChunkLostError: If a chunk that is being read turns out to be lost.
        """
        if self._loads:
            self._queue_loads(layer)
            self._streams.load.wait(layer)

    def leave(self, layer: int) -> None:
        """The row holds all of this layer's KV: queue what is to be kept."""
        if self._stores:
            self._streams.offload.fence()
            copies = [
                Copy(target=chunks, source=row)
                for run in self._stores
                for row, chunks in run.sides(self._buffer, layer)
            ]
            self._streams.offload.copy(layer, copies)

    def end(self) -> Copied:
        """Wait until every copy is done, however the forward ended."""
        self._loads, self._stores = [], []
        try:
            loads = self._streams.load.drain()
        finally:
            stores = self._streams.offload.drain()
        return Copied(loads, stores, self._waited)

    def _queue_loads(self, due: int) -> None:
        """Queue the loads of layer ``due``, and those behind it that can start."""
        lane = self._streams.load
        last = min(due + lane.ahead, len(self._buffer.keys) - 1)
        while self._queued <= last:
            if not self._has_arrived(self._queued):
                if self._queued > due:
                    return
                self._await(self._queued)
            copies = [
                Copy(target=row, source=chunks)
                for run in self._loads
                for row, chunks in run.sides(self._buffer, self._queued)
            ]
            lane.copy(self._queued, copies)
            self._queued += 1

    def _has_arrived(self, layer: int) -> bool:
        return all(one.layers > layer for run in self._loads for one in run.arrivals)

    def _await(self, layer: int) -> None:
        began = time.perf_counter()
        try:
            for run in self._loads:
                for arrival in run.arrivals:
                    arrival.wait(layer)
        finally:
            self._waited += time.perf_counter() - began


@dataclass(frozen=True, slots=True)
class Copied:
    """What a forward's copies took.

    Attributes:
        loads, stores: When each layer's ran.
        waited: Seconds during which the forward waited for reads.
    """

    loads: Sequence[Span]
    stores: Sequence[Span]
    waited: float

    def intervals(self) -> list[Interval]:
        """As pieces of a timeline, in seconds of ``time.perf_counter``."""
        return [
            *(Interval("load", *span) for span in self.loads),
            *(Interval("offload", *span) for span in self.stores),
        ]


class LayerClock:
    """Notes when compute worked on which layer, in one forward.

    A layer's work is counted from the moment when its KV is in the row: its attention,
    what follows it, and the projections of the next layer. What comes before belongs to
    no layer: the embedding and the first projections.

    Args:
        stopwatch: Of the compute queue.
    """

    def __init__(self, stopwatch: Stopwatch) -> None:
        self._stopwatch = stopwatch
        self._begun = stopwatch.begin()
        self._stops: list[Any] = []
        self._starts: list[Any] = []

    def enter(self) -> None:
        """Compute has come to a layer's cache."""
        self._stops.append(self._stopwatch.mark())

    def leave(self) -> None:
        """Compute goes on from a layer's cache."""
        self._starts.append(self._stopwatch.mark())

    def end(self) -> None:
        """Compute has left the last layer."""
        self._stops.append(self._stopwatch.mark())

    @property
    def seconds(self) -> float:
        """How long the forward took, if it has ended. On a GPU it blocks until then."""
        seconds = self._stopwatch.seconds
        return seconds(self._stops[-1]) - seconds(self._begun)

    def intervals(self, tokens: int) -> list[Interval]:
        """As pieces of a timeline, in seconds of ``time.perf_counter``."""
        seconds = self._stopwatch.seconds
        starts = [self._begun, *self._starts]
        return [
            Interval(
                "compute", layer - 1 if layer else None, seconds(a), seconds(b), tokens
            )
            for layer, (a, b) in enumerate(zip(starts, self._stops, strict=False))
        ]


def in_runs(
    chunks: Mapping[int, ChunkTensors],
    indices: Iterable[int],
    chunk_tokens: int,
    arriving: Mapping[int, Arrival] | None = None,
) -> list[Run]:
    """Join chunks that follow each other in the prompt and in memory.

    Args:
        chunks: By index within the prompt.
        indices: Which of them, ascending.
        chunk_tokens: Tokens per chunk.
        arriving: Those that are still being read.
    """
    runs: list[Run] = []
    for index in indices:
        chunk, position = chunks[index], index * chunk_tokens
        last = runs[-1] if runs else None
        if (
            last is not None
            and last.position + last.count * chunk_tokens == position
            and last.first.index + last.count == chunk.index
        ):
            last.count += 1
        else:
            runs.append(Run(position, 1, chunk, chunk_tokens))
        if arriving is not None and index in arriving:
            runs[-1].arrivals.append(arriving[index])
    return runs
