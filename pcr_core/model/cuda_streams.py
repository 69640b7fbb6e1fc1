"""Copy streams of a CUDA device.

Both directions go over streams of their own, between pinned DRAM and the device. Three
things keep the memory of a copy in place until it is done: the lane holds its tensors
until it is drained, ``record_stream`` tells the allocator that another stream uses
them, and events order compute and copies both ways. No index tensors are used: chunks
are copied as slices, so there is nothing else for an event to cover.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from pcr_core.model.streams import Copy, Overlap, Span, Streams


class CudaStopwatch:
    """Events on the compute stream, told in host time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.synchronize(device)
        self._origin, self._began = self.mark(), time.perf_counter()
        self._origin.synchronize()

    def mark(self, stream: Any = None) -> Any:
        """An event on a stream; the compute stream, if none is named."""
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(stream or torch.cuda.current_stream(self._device))
        return event

    def seconds(self, mark: Any) -> float:
        """When the event was reached; it must have been."""
        mark.synchronize()
        return self._began + float(self._origin.elapsed_time(mark)) / 1e3


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
        self._events: list[tuple[int, Any, Any]] = []
        self._done: dict[int, Any] = {}
        self._lent: list[Sequence[Copy]] = []

    def fence(self) -> None:
        """Have the stream wait for what compute has queued."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, layer: int, copies: Sequence[Copy]) -> None:
        """Queue a layer's copies, chunk by chunk.

        A chunk's keys are contiguous in DRAM, so each is one transfer and, on the
        device, one kernel that spreads it over the row. Several chunks in one call
        would be gathered by the processor first, into pageable memory.
        """
        began = self._stopwatch.mark(self._stream)
        with torch.cuda.stream(self._stream):
            for one in copies:
                pairs = zip(one.target.unbind(0), one.source.unbind(0), strict=True)
                for target, source in pairs:
                    target.copy_(source, non_blocking=True)
                for tensor in (one.target, one.source):
                    if tensor.is_cuda:
                        tensor.record_stream(self._stream)
        done = self._stopwatch.mark(self._stream)
        self._events.append((layer, began, done))
        self._done[layer] = done
        self._lent.append(copies)

    def wait(self, layer: int) -> None:
        """Have the compute stream wait for a layer's copies."""
        if layer in self._done:
            torch.cuda.current_stream(self._device).wait_event(self._done[layer])

    def drain(self) -> list[Span]:
        """Wait on the host for every copy."""
        spans = [
            Span(layer, self._stopwatch.seconds(began), self._stopwatch.seconds(done))
            for layer, began, done in self._events
        ]
        self._events, self._lent = [], []
        self._done.clear()
        return spans


def cuda_streams(device: torch.device, mode: Overlap) -> Streams:
    """The queues of a CUDA device; see ``streams_opened``."""
    stopwatch = CudaStopwatch(device)

    def lane(direction: Overlap) -> CudaLane:
        if mode in (direction, "both"):
            side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            return CudaLane(device, side, 1 << 30, stopwatch)
        compute = torch.cuda.current_stream(device)
        return CudaLane(device, compute, 0, stopwatch)

    return Streams(mode, lane("up"), lane("down"), stopwatch)
