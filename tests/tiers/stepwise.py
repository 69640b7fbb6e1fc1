"""I/O whose jobs end one by one, when the test says so, and in the order it likes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pcr_core.tiers.jobs import (
    Job,
    ReadJob,
    WriterJob,
    finish,
    finish_group,
)
from tests.tiers.virtual import VirtualTime

_STEP = 0.1
"""Seconds that an operation takes: less than whoever waits waits at a time."""


class StepIo:
    """Reads in any order, writes first in, first out. Nothing happens by itself.

    Whoever waits has jobs ended for it, one at a time, each taking a second, unless
    the disk hangs: then the time goes by.

    Attributes:
        reads: Queued; they can still be taken back.
        begun: Under way; they cannot.
        writes: The writer's queue.
        hanging: Nobody who waits for a read gets anything.
        pick: Chooses which of so many reads ends next.
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
        self.reads: list[ReadJob] = []
        self.begun: list[ReadJob] = []
        self.writes: list[WriterJob] = []
        self.hanging = False
        self.pick = pick

    # --- what the test does ---

    def begin_read(self, which: int = 0) -> None:
        job = self.reads.pop(which)
        job.begun = True
        self.begun.append(job)

    def end_read(self, which: int = 0) -> None:
        job = self.begun.pop(which)
        finish(self._backend, job)
        job.seconds = _STEP  # not what this machine takes: examples must repeat
        self._done.append(job)

    def run_reads(self) -> None:
        while self.reads:
            self.begin_read()
        while self.begun:
            self.end_read()

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
        self.reads.append(job)

    def hurry(self, job: ReadJob) -> None:
        job.urgent = True

    def cancel(self, job: ReadJob) -> bool:
        if job not in self.reads:
            return False
        self.reads.remove(job)
        return True

    def write(self, job: WriterJob) -> None:
        self.writes.append(job)

    def poll(self) -> list[Job]:
        jobs, self._done = self._done, []
        return jobs

    def wait(self, jobs: Iterable[Job], timeout: float | None = None) -> bool:
        wanted = set(jobs)
        while not wanted.isdisjoint([*self.reads, *self.begun, *self.writes]):
            if not self._one_ends(wanted, timeout):
                return False
        return True

    def wait_any(self, jobs: Iterable[Job], timeout: float | None = None) -> bool:
        wanted = set(jobs)
        if wanted <= {*self.reads, *self.begun, *self.writes}:
            return self._one_ends(wanted, timeout)
        return True

    def flush(self, timeout: float | None = None) -> bool:
        self.run_writes()
        return True

    def close(self, timeout: float = 10.0) -> bool:
        self.run_all()
        return True

    def _one_ends(self, wanted: set[Job], timeout: float | None) -> bool:
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
            queued = [job for job in self.reads if job in wanted] or self.reads
            if queued:
                job = queued[self.pick(len(queued))]
                self.begin_read(self.reads.index(job))
        self.end_read(self.pick(len(self.begun)))
        return True
