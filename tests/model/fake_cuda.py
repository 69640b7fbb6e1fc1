"""``torch.cuda`` as far as the copy streams use it, on a CPU, and without mercy.

The compute stream runs at once. What is queued on another stream runs as late as events
allow, its destination poisoned until then: each stream is a ``SimulatedLane``. So the
code that is written for a GPU is run, and its waits are tested, where there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from pcr_core.model.simulated_streams import SimulatedCompute, SimulatedLane
from pcr_core.model.streams import Copy, Overlap


class FakeEvent:
    """A place in a stream."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda

    def record(self, stream: FakeStream) -> None:
        self.stream, self.position = stream, stream.queued
        self._time = stream.time

    def synchronize(self) -> None:
        self.stream.host_waits(self.position)

    def elapsed_time(self, later: FakeEvent) -> float:
        return (later._time - self._time) * 1e3


class FakeStream:
    """A stream beside compute, or, without a lane, the compute stream."""

    def __init__(self, compute: SimulatedCompute, lane: SimulatedLane | None) -> None:
        self._compute = compute
        self.lane = lane
        self.queued = 0

    @property
    def time(self) -> float:
        lane = self.lane
        return self._compute.now if lane is None else max(lane._free, self._compute.now)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert self.lane is not None
        self.lane.copy(self.queued, [Copy(target, source)])
        self.queued += 1

    def wait_stream(self, other: FakeStream) -> None:
        assert other.lane is None, "streams wait for compute only"
        if self.lane is not None:
            self.lane.fence()

    def wait_event(self, event: FakeEvent) -> None:
        assert self.lane is None, "only compute waits for events"
        if event.stream.lane is not None:
            for number in range(event.position):
                event.stream.lane.wait(number)

    def host_waits(self, position: int) -> None:
        """The host blocks until so many copies have run."""
        if self.lane is None:
            return
        queue = self.lane._queue
        self.lane._queue = [one for one in queue if one.span.layer < position]
        self.lane.drain()
        self.lane._queue = [one for one in queue if one.span.layer >= position]


class _OnStream(TorchFunctionMode):
    """Copies inside the block are queued."""

    def __init__(self, stream: FakeStream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.copy_:
            assert kwargs == {"non_blocking": True}, "the host must not wait"
            self._stream.copy(*args)
            return args[0]
        return func(*args, **(kwargs or {}))


class FakeCuda:
    """One device.

    Args:
        mode: Which streams will be made: first the one for loads, then for offloads.
        compute: The compute queue.
        load, offload: Bytes per virtual second.
    """

    def __init__(
        self, mode: Overlap, compute: SimulatedCompute, *, load: float, offload: float
    ) -> None:
        self._compute = compute
        self._current = self._main = FakeStream(compute, None)
        up = SimulatedLane(compute, load, lambda: compute.forwards)
        down = SimulatedLane(compute, offload, lambda: compute.layers)
        self._lanes = {"none": [], "up": [up], "down": [down], "both": [up, down]}[mode]

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Stand in for ``torch.cuda``."""
        stand_ins: dict[str, Callable[..., Any]] = {
            "Event": lambda enable_timing: FakeEvent(self),
            "Stream": lambda device: FakeStream(self._compute, self._lanes.pop(0)),
            "current_stream": lambda device: self._current,
            "stream": self._on,
        }
        for name, stand_in in stand_ins.items():
            patch.setattr(torch.cuda, name, stand_in)

    @contextmanager
    def _on(self, stream: FakeStream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            if stream.lane is None:
                yield
            else:
                with _OnStream(stream):
                    yield
        finally:
            self._current = before
