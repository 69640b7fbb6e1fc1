"""Copy streams of a CUDA device.

Both directions go over streams of their own, between pinned DRAM and the device. Three
things keep the memory of a copy in place until it is done: the lane holds its tensors
until it is drained, ``record_stream`` tells the allocator that another stream uses
them, and events order compute and copies both ways. No index tensors are used: chunks
are copied as slices, so there is nothing else for an event to cover.

Where DRAM could not be pinned, the driver copies through a buffer of its own and holds
the caller up meanwhile: slower, and no less right.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from pcr_core.model.streams import Copy, Overlap, Span, Streams

_ANCHOR_SECONDS = 1.0
"""The device's clock drifts from the host's, and tells intervals in 24 bits."""
_AHEAD = 2
"""Layers queued before they are needed. All of them at once would keep the host from
launching the first layer: a long prefix takes thousands of calls."""


class _Anchor(NamedTuple):
    """A moment that both clocks know."""

    event: Any
    seconds: float


class _Mark(NamedTuple):
    """An event, and the anchor from which it is told."""

    event: Any
    anchor: _Anchor


class CudaStopwatch:
    """Events on the compute stream, told in host time.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._anchor = self._anchored()

    def begin(self) -> _Mark:
        """See ``Stopwatch``; now and then waits for compute, to compare the clocks."""
        if time.perf_counter() - self._anchor.seconds > _ANCHOR_SECONDS:
            self._anchor = self._anchored()
        return self.mark()

    def mark(self, stream: Any = None) -> _Mark:
        """A place in a stream; in the compute stream, if none is named."""
        return _Mark(self._event(stream), self._anchor)

    def seconds(self, mark: _Mark) -> float:
        """When the stream came by there; blocks until it has."""
        event, anchor = mark
        event.synchronize()
        return anchor.seconds + float(anchor.event.elapsed_time(event)) / 1e3

    def _anchored(self) -> _Anchor:
        event = self._event(None)
        event.synchronize()
        return _Anchor(event, time.perf_counter())

    def _event(self, stream: Any) -> Any:
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(stream or torch.cuda.current_stream(self._device))
        return event


class CudaLane:
    """Copies on one stream, which may be the compute stream itself.

    Args:
        device: The device.
        stream: Where copies are queued.
        ahead: Layers worth queueing before they are needed.
        stopwatch: Times them.
    """

    def __init__(
        self, device: torch.device, stream: Any, ahead: int, stopwatch: CudaStopwatch
    ) -> None:
        self.ahead = ahead
        self._device = device
        self._stream = stream
        self._stopwatch = stopwatch
        self._marks: list[tuple[int, _Mark, _Mark]] = []
        self._done: dict[int, _Mark] = {}  # by layer
        self._lent: list[Sequence[Copy]] = []

    def fence(self) -> None:
        """Have the stream wait for what compute has queued."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, layer: int, copies: Sequence[Copy]) -> None:
        """Queue a layer's copies.

        Raises:
            RuntimeError: If one of them cannot be queued; those before it run, and
                are waited for like any other.
        """
        self._lent.append(copies)
        began = self._stopwatch.mark(self._stream)
        try:
            with torch.cuda.stream(self._stream):
                for one in copies:
                    self._queue(one)
        finally:
            done = self._stopwatch.mark(self._stream)
            self._marks.append((layer, began, done))
            self._done[layer] = done

    def wait(self, layer: int) -> None:
        """Have the compute stream wait for a layer's copies."""
        if layer in self._done:
            compute = torch.cuda.current_stream(self._device)
            compute.wait_event(self._done[layer].event)

    def drain(self) -> list[Span]:
        """Wait on the host for every copy."""
        try:
            return [
                Span(
                    layer, self._stopwatch.seconds(began), self._stopwatch.seconds(done)
                )
                for layer, began, done in self._marks
            ]
        finally:
            self._marks, self._lent = [], []
            self._done.clear()

    def _queue(self, one: Copy) -> None:
        """Queue one copy, chunk by chunk; the lane's stream is the current one.

        A chunk's keys are contiguous in DRAM, so each is one transfer and, on the
        device, one kernel that spreads it over the row. Several chunks in one call
        would be gathered by the processor first, into pageable memory.
        """
        for tensor in (one.target, one.source):
            if tensor.is_cuda:
                tensor.record_stream(self._stream)
        for target, source in zip(
            one.target.unbind(0), one.source.unbind(0), strict=True
        ):
            target.copy_(source, non_blocking=True)


def cuda_streams(device: torch.device, mode: Overlap) -> Streams:
    """The queues of a CUDA device; see ``streams_opened``."""
    stopwatch = CudaStopwatch(device)

    def lane(direction: Overlap) -> CudaLane:
        if mode in (direction, "both"):
            side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            return CudaLane(device, side, _AHEAD, stopwatch)
        compute = torch.cuda.current_stream(device)
        return CudaLane(device, compute, 0, stopwatch)

    return Streams(mode, lane("up"), lane("down"), stopwatch)
