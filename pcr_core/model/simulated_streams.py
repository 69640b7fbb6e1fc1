"""Copy streams for tests: declared bandwidth on a virtual clock, and no mercy.

Every copy is put off as far as the waits allow, and its destination holds NaN until
then, so that a missing wait shows as a wrong number on a CPU, in every run. A copy that
is not ordered behind what compute has done to its memory never becomes right, and one
whose source is changed before the copy is known to be done becomes wrong. What it all
takes is told by a virtual clock, so no test depends on the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from pcr_core.model.streams import Copy, Lane, Overlap, Span, Streams

_FAR = 1 << 30


class SimulatedCompute:
    """The compute queue. Whoever runs the model tells what it has done.

    Attributes:
        now: Virtual seconds: how far compute has come.
        forwards: Forwards that have ended.
        layers: Layers that have ended, in all forwards.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.forwards = 0
        self.layers = 0

    def begin(self) -> float:
        """Now."""
        return self.now

    def mark(self) -> float:
        """Now."""
        return self.now

    def seconds(self, mark: float) -> float:
        """The mark."""
        return mark

    def layer_ends(self, seconds: float) -> None:
        """A layer's work has taken so long."""
        self.now += seconds
        self.layers += 1

    def forward_ends(self) -> None:
        """A forward has ended."""
        self.forwards += 1


@dataclass(slots=True)
class _Queued:
    """One layer's copies.

    Attributes:
        span: When they run.
        copies: What is copied.
        ordered: Whether they come after the last change of their memory.
        sources: What the sources held when the copies were queued.
        done: Whether compute has waited for them. They may run until they are drained
            all the same, as far as the host knows.
    """

    span: Span
    copies: Sequence[Copy]
    ordered: bool
    sources: list[torch.Tensor]
    done: bool = False


class SimulatedLane:
    """Copies beside compute, as late as they may run.

    Args:
        compute: The compute queue.
        bandwidth: Bytes per virtual second.
        progress: How far compute is, as far as this lane's memory is concerned: copies
            must be fenced after the last change of it.
    """

    ahead = _FAR

    def __init__(
        self,
        compute: SimulatedCompute,
        bandwidth: float,
        progress: Callable[[], int],
    ) -> None:
        self._compute = compute
        self._bandwidth = bandwidth
        self._progress = progress
        self._fenced: int | None = None
        self._free = 0.0
        self._queue: list[_Queued] = []

    @property
    def lent(self) -> int:
        """Copies whose memory has not been given back by ``drain``."""
        return len(self._queue)

    def fence(self) -> None:
        """See ``Lane``; spoils copies that were not drained, like ``drain``."""
        self._spoil_the_changed()
        self._fenced = self._progress()

    def copy(self, layer: int, copies: Sequence[Copy]) -> None:
        """See ``Lane``; poisons the targets."""
        size = sum(one.source.nbytes for one in copies)
        start = max(self._free, self._compute.now)
        self._free = start + size / self._bandwidth
        queued = _Queued(
            Span(layer, start, self._free),
            copies,
            ordered=self._fenced == self._progress(),
            sources=[one.source.clone() for one in copies],
        )
        for one in copies:
            one.target.fill_(float("nan"))
        self._queue.append(queued)

    def wait(self, layer: int) -> None:
        """See ``Lane``."""
        for queued in self._queue:
            if queued.span.layer == layer:
                _perform(queued)
                self._compute.now = max(self._compute.now, queued.span.stop)

    def drain(self) -> list[Span]:
        """See ``Lane``; spoils copies whose source has changed since they began."""
        self._spoil_the_changed()
        for queued in self._queue:
            _perform(queued)
            self._compute.now = max(self._compute.now, queued.span.stop)
        spans = [queued.span for queued in self._queue]
        self._queue = []
        return spans

    def _spoil_the_changed(self) -> None:
        for queued in self._queue:
            if queued.done and not _unchanged(queued):
                _spoil(queued)


class SimulatedInlineLane:
    """Copies on the compute queue: each takes its time there."""

    ahead = 0

    def __init__(self, compute: SimulatedCompute, bandwidth: float) -> None:
        self._compute = compute
        self._bandwidth = bandwidth
        self._spans: list[Span] = []

    def fence(self) -> None:
        """Nothing: one queue is in order."""

    def copy(self, layer: int, copies: Sequence[Copy]) -> None:
        """See ``Lane``."""
        start = self._compute.now
        for one in copies:
            one.target.copy_(one.source)
            self._compute.now += one.source.nbytes / self._bandwidth
        self._spans.append(Span(layer, start, self._compute.now))

    def wait(self, layer: int) -> None:
        """Nothing: one queue is in order."""

    def drain(self) -> list[Span]:
        """See ``Lane``."""
        spans, self._spans = self._spans, []
        return spans


def _perform(queued: _Queued) -> None:
    if queued.done or not queued.ordered:
        return  # what is not ordered ran too early, and stays wrong
    queued.done = True
    for one in queued.copies:
        one.target.copy_(one.source)


def _unchanged(queued: _Queued) -> bool:
    """Whether the sources still hold what they did; a NaN is equal to itself."""
    pairs = zip(queued.copies, queued.sources, strict=True)
    return all(torch.equal(_bits(one.source), _bits(was)) for one, was in pairs)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def _spoil(queued: _Queued) -> None:
    for one in queued.copies:
        one.target.fill_(float("nan"))


def simulated_streams(
    mode: Overlap, compute: SimulatedCompute, *, load: float, offload: float
) -> Streams:
    """Streams of declared bandwidth.

    Args:
        mode: What runs beside compute.
        compute: The compute queue.
        load: Bytes per virtual second into the row.
        offload: Bytes per virtual second out of it.
    """

    def lane(direction: Overlap, bandwidth: float, progress: Callable[[], int]) -> Lane:
        if mode not in (direction, "both"):
            return SimulatedInlineLane(compute, bandwidth)
        return SimulatedLane(compute, bandwidth, progress)

    return Streams(
        mode,
        # A load overwrites what earlier forwards may still read; an offload reads what
        # this very layer has just written.
        lane("up", load, lambda: compute.forwards),
        lane("down", offload, lambda: compute.layers),
        compute,
    )
