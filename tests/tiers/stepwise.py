"""I/O whose jobs end one by one, when the test says so, and in the order it likes."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence

from pcr_core.tiers.jobs import (
    Job,
    ReadJob,
    WriterJob,
    finish_group,
)
from pcr_core.tiers.read_queue import ReadQueue, Turn
from tests.tiers.virtual import VirtualTime

_STEP = 0.1
"""Seconds that an operation takes: less than whoever waits waits at a time."""


class StepIo:
    """Reads in any order, writes first in, first out. Nothing happens by itself.

    Whoever waits has jobs ended for it, one at a time, each taking a second, unless
    the disk hangs: then the time goes by. Reads layer by layer take as many steps as
    the backend says.

    Attributes:
        reads: Queued, by what a reader takes at a time; they can still be taken back.
        begun: Under way; they cannot.
        writes: The writer's queue.
        hanging: Nobody who waits for a read gets anything.
        pick: Chooses which of so many reads goes on next.
    """

    def __init__(
        self,
        backend,
        time: VirtualTime | None = None,
        pick: Callable[[int], int] = lambda count: 0,
    ) -> None:
        self._backend = backend
        self._time = time or VirtualTime()
        self._done: list[Job] = []
        self._steps: dict[Turn, Generator[None, None, None]] = {}
        self.reads: list[Turn] = []
        self.begun: list[Turn] = []
        self.writes: list[WriterJob] = []
        self.hanging = False
        self.pick = pick

    # --- what the test does ---

    def begin_read(self, which: int = 0) -> None:
        turn = self.reads.pop(which)
        for job in turn.jobs:
            job.begun = True
        self.begun.append(turn)
        self._steps[turn] = turn.run(self._backend, turn.jobs)

    def step_read(self, which: int = 0) -> None:
        """A read ends or, if it goes layer by layer, comes a step further."""
        turn = self.begun[which]
        more = next(self._steps[turn], self) is not self
        for job in turn.jobs:
            if job.outcome is not None and job not in self._done:
                job.seconds = _STEP  # not what this machine takes: examples must repeat
                self._done.append(job)
        turn.jobs = [job for job in turn.jobs if job.outcome is None]
        if not turn.jobs:
            self._steps.pop(turn).close()
            self.begun.remove(turn)
        else:
            assert more, "a read has ended without an outcome"

    def run_reads(self) -> None:
        while self.reads:
            self.begin_read()
        while self.begun:
            self.step_read()

    def run_writes(self, count: int | None = None) -> None:
        """Do the first ``count`` jobs of the writer, in one group."""
        jobs, self.writes = self.writes[:count], self.writes[len(self.writes[:count]) :]
        if jobs:
            finish_group(self._backend, jobs)
            self._done += jobs

    def run_all(self) -> None:
        self.run_reads()
        self.run_writes()

    # --- Io ---

    def read(self, job: ReadJob) -> None:
        self._queue(lambda queue: queue.add(job))

    def read_layers(self, jobs: Sequence[ReadJob]) -> None:
        self._queue(lambda queue: queue.add_layers(jobs, 2))

    def hurry(self, job: ReadJob) -> None:
        job.urgent = True

    def cancel(self, job: ReadJob) -> bool:
        for turn in self.reads:
            if job in turn.jobs:
                turn.jobs.remove(job)
                if not turn.jobs:
                    self.reads.remove(turn)
                return True
        return False

    def write(self, job: WriterJob) -> None:
        self.writes.append(job)

    def poll(self) -> list[Job]:
        jobs, self._done = self._done, []
        return jobs

    def wait(self, jobs: Iterable[Job], timeout: float | None = None) -> bool:
        wanted = set(jobs)
        while not wanted.isdisjoint(self._open()):
            if not self._one_goes_on(wanted, timeout):
                return False
        return True

    def wait_any(self, jobs: Iterable[Job], timeout: float | None = None) -> bool:
        wanted = set(jobs)
        while wanted <= self._open():
            if not self._one_goes_on(wanted, timeout):
                return False
        return True

    def wait_layer(self, job: ReadJob, layer: int, timeout: float) -> bool:
        while job.layers <= layer and job in self._open():
            if not self._one_goes_on({job}, timeout):
                return False
        return True

    def flush(self, timeout: float | None = None) -> bool:
        self.run_writes()
        return True

    def close(self, timeout: float = 10.0) -> bool:
        self.run_all()
        return True

    def _queue(self, add: Callable[[ReadQueue], None]) -> None:
        queue = ReadQueue()
        add(queue)
        while (turn := queue.take()) is not None:
            self.reads.append(turn)

    def _open(self) -> set[Job]:
        turns = [*self.reads, *self.begun]
        return {*self.writes, *(job for turn in turns for job in turn.jobs)}

    def _one_goes_on(self, wanted: set[Job], timeout: float | None) -> bool:
        if not wanted.isdisjoint(self.writes):
            self._time.now += _STEP
            self.run_writes(1)
            return True
        if self.hanging or (timeout is not None and timeout < _STEP):
            assert timeout is not None, "this would wait for ever"
            self._time.now += timeout
            return False
        self._time.now += _STEP
        if not self.begun or self.pick(2):
            queued = [turn for turn in self.reads if not wanted.isdisjoint(turn.jobs)]
            queued = queued or self.reads
            if queued:
                turn = queued[self.pick(len(queued))]
                self.begin_read(self.reads.index(turn))
        self.step_read(self.pick(len(self.begun)))
        return True
