"""Time and I/O that are computed: a disk of declared latency and bandwidth."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass

from pcr_core.tiers.jobs import Job, ReadJob, WriterJob, finish_group, finish_layers
from pcr_core.tiers.read_queue import Busy, ReadQueue, Turn


class VirtualTime:
    """Seconds that pass only when somebody says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(eq=False)
class Running:
    """What a reader is doing: its next step ends then."""

    turn: Turn
    steps: Generator[None, None, None]
    begins: float
    ends: float
    mark: tuple[float, float]


class VirtualIo:
    """Readers that share a disk, urgent reads first. Writes are free.

    A read takes ``latency + readers * bytes / bandwidth``, as if all readers were
    always busy. Layer by layer, each layer takes its part of that.

    Attributes:
        waited: Seconds that waiting let pass.
        order: Keys in the order in which their reads started.
    """

    def __init__(
        self, backend, time: VirtualTime, latency=0.0, bandwidth=1e9, readers=1
    ) -> None:
        self._backend = backend
        self._time = time
        self.latency = latency
        self.bandwidth = bandwidth
        self._queue = ReadQueue()
        self._asked: dict[ReadJob, float] = {}
        self._running: list[Running] = []
        self._readers = readers
        self._free = [0.0] * readers
        self._done: deque[Job] = deque()
        self._at = 0.0
        self._busy = Busy(lambda: self._at)
        self.waited = 0.0
        self.order: list[bytes] = []

    def start_afresh(self) -> None:
        """Forget the past: the clock was put back and no read is under way."""
        self._free = [self._time.now] * self._readers
        self._at = self._time.now
        self._busy = Busy(lambda: self._at)
        self.order.clear()

    def seconds(self, job: ReadJob) -> float:
        return self.latency + self._readers * len(job.view) / self.bandwidth

    def read(self, job: ReadJob) -> None:
        self._catch_up()
        self._queue.add(job)
        self._asked[job] = self._time.now
        self._catch_up()

    def read_layers(self, jobs: Sequence[ReadJob]) -> None:
        self._catch_up()
        self._queue.add_layers(jobs, self._readers)
        self._asked.update(dict.fromkeys(jobs, self._time.now))
        self._catch_up()

    def hurry(self, job: ReadJob) -> None:
        self._catch_up()
        self._queue.hurry(job)

    def cancel(self, job: ReadJob) -> bool:
        self._catch_up()
        return self._queue.cancel(job)

    def write(self, job: WriterJob) -> None:
        finish_group(self._backend, [job])
        self._done.append(job)

    def poll(self) -> list[Job]:
        self._catch_up()
        jobs = list(self._done)
        self._done.clear()
        return jobs

    def wait(self, jobs: Iterable[Job], timeout: float | None = None) -> bool:
        """Let time pass until the jobs have ended."""
        wanted = list(jobs)
        return self._until(lambda: all(job.outcome for job in wanted), timeout)

    def wait_any(self, jobs: Iterable[Job], timeout: float | None = None) -> bool:
        """Let time pass until one of the jobs has ended."""
        wanted = list(jobs)
        return self._until(lambda: any(job.outcome for job in wanted), timeout)

    def wait_layer(self, job: ReadJob, layer: int, timeout: float) -> bool:
        """Let time pass until the job has come so far."""
        return self._until(lambda: job.layers > layer or bool(job.outcome), timeout)

    def flush(self, timeout: float | None = None) -> bool:
        return True

    def close(self, timeout: float = 10.0) -> bool:
        return self._until(lambda: not self._running, None)

    def _until(self, condition: Callable[[], bool], timeout: float | None) -> bool:
        start = self._time.now
        self._catch_up()
        while not condition():
            end = min(one.ends for one in self._running)
            if timeout is not None and end > start + timeout:
                self._time.now = start + timeout
                self.waited += timeout
                return False
            self._time.now = max(self._time.now, end)
            self._catch_up()
        self.waited += self._time.now - start
        return True

    def _catch_up(self) -> None:
        """Let the readers do what they have done by now."""
        while True:
            while self._free and (turn := self._queue.take()) is not None:
                self._begin(turn, self._free.pop(0))
            ended = [one for one in self._running if one.ends <= self._time.now]
            if not ended:
                return
            self._step(min(ended, key=lambda one: one.ends))

    def _begin(self, turn: Turn, free: float) -> None:
        for job in turn.jobs:
            self.order.append(job.chunk.key)
            job.begun = True
        begins = max([free, *(self._asked[job] for job in turn.jobs)])
        steps = turn.run(self._backend, turn.jobs)
        ends = begins + self._step_seconds(turn)
        self._at = max(self._at, begins)
        one = Running(turn, steps, begins, ends, self._busy.change(1))
        self._running.append(one)

    def _step(self, one: Running) -> None:
        """A read ends, or a layer of reads side by side."""
        waiting = [job for job in one.turn.jobs if job.outcome is None]
        next(one.steps)
        self._at = one.ends
        for job in waiting:
            if job.outcome is not None:
                job.seconds = (one.ends - one.begins) / len(one.turn.jobs)
                job.parallel = self._busy.mean(one.mark)
                self._done.append(job)
        if all(job.outcome for job in one.turn.jobs):
            self._busy.change(-1)
            one.steps.close()
            self._running.remove(one)
            self._free.append(one.ends)
        else:
            one.ends += self._step_seconds(one.turn)

    def _step_seconds(self, turn: Turn) -> float:
        by_layer = turn.run is finish_layers
        layers = len(turn.jobs[0].format.layout.layers) if by_layer else 1
        return sum(map(self.seconds, turn.jobs)) / layers
