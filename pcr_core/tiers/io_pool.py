"""I/O off the engine thread: reader threads, one writer thread, results in a queue.

The engine thread submits jobs and later collects them, finished, from ``poll()``. A
worker that dies fails its jobs, so nobody waits for ever.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from pcr_core.tiers.jobs import (
    Backend,
    Job,
    ReadJob,
    WriteJob,
    WriteOutcome,
    WriterJob,
    fail,
    finish,
    finish_group,
    finish_layers,
)
from pcr_core.tiers.read_queue import Busy, ReadQueue, Turn

_log = logging.getLogger("pcr_core.tiers")


class InlineIo:
    """Runs every job at once on the caller: deterministic, for tests and tools."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._done: deque[Job] = deque()

    def read(self, job: ReadJob) -> None:
        """Read now."""
        finish(self._backend, job)
        self._done.append(job)

    def read_layers(self, jobs: Sequence[ReadJob]) -> None:
        """Read all of them now."""
        for _ in finish_layers(self._backend, jobs):
            pass
        self._done.extend(jobs)

    def hurry(self, job: ReadJob) -> None:
        """Do nothing: it has ended."""

    def cancel(self, job: ReadJob) -> bool:
        """Return False: it has ended."""
        return False

    def write(self, job: WriterJob) -> None:
        """Write now, as a group of one."""
        finish_group(self._backend, [job])
        self._done.append(job)

    def poll(self) -> list[Job]:
        """Return the jobs run since the last call."""
        jobs = list(self._done)
        self._done.clear()
        return jobs

    def wait(self, jobs: Iterable[Job], timeout: float | None = None) -> bool:
        """Return True: they have ended."""
        return True

    def wait_any(self, jobs: Iterable[Job], timeout: float | None = None) -> bool:
        """Return True: they have ended."""
        return True

    def wait_layer(self, job: ReadJob, layer: int, timeout: float) -> bool:
        """Return True: it has ended."""
        return True

    def flush(self, timeout: float | None = None) -> bool:
        """Return True: nothing waits."""
        return True

    def close(self, timeout: float = 10.0) -> bool:
        """Return True: there is no thread."""
        return True


class IoPool:
    """Reader threads and one writer thread. Submit and poll from the engine thread.

    Queues have no limit of their own: whoever submits owns the slots, and knows how
    many of them may be here.

    Args:
        backend: Does the work.
        readers: Reader threads.
        group: Most jobs the writer takes at once; they share one index commit.
        on_progress: Called on a worker's thread after jobs have ended, so that an
            engine thread without other work knows that there is something to poll.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        readers: int = 2,
        group: int = 16,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self._backend = backend
        self._on_progress = on_progress
        self._group = group
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._progress = threading.Condition(self._lock)
        self._reads = ReadQueue()
        self._writes: deque[WriterJob] = deque()
        self._running: set[Job] = set()
        self._done: deque[Job] = deque()
        self._closing = False
        self._live_readers = readers
        self._busy = Busy(time.perf_counter)
        self._writer_error: BaseException | None = None
        self._reader_error: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._run_reader, name=f"pcr-read-{i}", daemon=True)
            for i in range(readers)
        ]
        self._threads.append(
            threading.Thread(target=self._run_writer, name="pcr-write", daemon=True)
        )
        for thread in self._threads:
            thread.start()

    def read(self, job: ReadJob) -> None:
        """Queue a read; urgent ones first, otherwise in the order they came."""
        with self._lock:
            if not self._refuses([job]):
                self._reads.add(job)
                self._work.notify_all()

    def read_layers(self, jobs: Sequence[ReadJob]) -> None:
        """Queue urgent reads that are made side by side, layer by layer."""
        with self._lock:
            if not self._refuses(jobs):
                self._reads.add_layers(jobs, self._live_readers)
                self._work.notify_all()

    def hurry(self, job: ReadJob) -> None:
        """Make a queued read urgent; no matter if it runs or has ended."""
        with self._lock:
            self._reads.hurry(job)

    def cancel(self, job: ReadJob) -> bool:
        """Take back a read that has not started; see ``Io``."""
        with self._lock:
            return self._reads.cancel(job)

    def write(self, job: WriterJob) -> None:
        """Queue a job of the writer."""
        with self._lock:
            if self._closing or self._writer_error is not None:
                self._end([job], self._writer_error or _closed())
                return
            self._writes.append(job)
            self._work.notify_all()

    def poll(self) -> list[Job]:
        """Return the jobs that ended since the last call."""
        with self._lock:
            jobs = list(self._done)
            self._done.clear()
        return jobs

    def wait(self, jobs: Iterable[Job], timeout: float | None = None) -> bool:
        """Block until these jobs have ended, or for ``timeout`` seconds."""
        wanted = set(jobs)
        with self._lock:
            return self._progress.wait_for(
                lambda: (
                    wanted.isdisjoint(self._running)
                    and wanted.isdisjoint(self._reads)
                    and wanted.isdisjoint(self._writes)
                ),
                timeout,
            )

    def wait_any(self, jobs: Iterable[Job], timeout: float | None = None) -> bool:
        """Block until one of these jobs has ended, or for ``timeout`` seconds."""
        wanted = set(jobs)
        with self._lock:
            return self._progress.wait_for(
                lambda: not wanted <= self._running.union(self._reads, self._writes),
                timeout,
            )

    def wait_layer(self, job: ReadJob, layer: int, timeout: float) -> bool:
        """Block until a read has come further, or has ended; see ``Io``."""
        with self._lock:
            return self._progress.wait_for(
                lambda: job.layers > layer or self._has_ended(job), timeout
            )

    def flush(self, timeout: float | None = None) -> bool:
        """Block until the writer has nothing left to do."""
        with self._lock:
            return self._progress.wait_for(self._writer_idle, timeout)

    def close(self, timeout: float = 10.0) -> bool:
        """Finish queued writes for ``timeout`` seconds, drop the rest, join.

        A thread that hangs in a system call for longer than that is reported in the
        log and left behind; it is a daemon.

        Returns:
            False if a thread was left behind: it still uses the backend.
        """
        deadline = time.monotonic() + timeout
        self.flush(timeout)
        with self._lock:
            self._closing = True
            for running in self._running:
                if isinstance(running, ReadJob):
                    running.wanted = False
            for job in self._writes:
                if isinstance(job, WriteJob):
                    job.outcome = WriteOutcome.DROPPED
            self._end(self._reads.clear(), _closed())
            self._end(self._writes, _closed())
            self._writes.clear()
            self._work.notify_all()
        for thread in self._threads:
            thread.join(max(1.0, deadline - time.monotonic()))
        hanging = [thread.name for thread in self._threads if thread.is_alive()]
        if hanging:
            _log.error("%s hangs in a system call; left behind", ", ".join(hanging))
        return not hanging

    def _refuses(self, jobs: Sequence[ReadJob]) -> bool:
        """Fail reads for which there is no reader any more. Lock held."""
        if self._closing or self._reader_error is not None:
            self._end(jobs, self._reader_error or _closed())
            return True
        return False

    def _has_ended(self, job: ReadJob) -> bool:
        return job.outcome is not None and job not in self._running

    def _writer_idle(self) -> bool:
        busy = any(not isinstance(job, ReadJob) for job in self._running)
        return not self._writes and not busy

    def _end(self, jobs: Iterable[Job], error: BaseException | None = None) -> None:
        """Hand jobs over to ``poll``, failed if there is an error. Lock held."""
        ended = list(jobs)
        if error is not None:
            fail(ended, error)
        self._running.difference_update(ended)
        self._done.extend(ended)
        self._progress.notify_all()

    def _run_reader(self) -> None:
        while (turn := self._take_turn()) is not None:
            with self._lock:
                mark = self._busy.change(1)
            try:
                for _ in turn.run(self._backend, turn.jobs):
                    self._tell(turn, mark)
            except BaseException as error:
                self._reader_died(turn, error)
                return
            with self._lock:
                self._busy.change(-1)

    def _take_turn(self) -> Turn | None:
        """Wait for something to read; ``None`` at the end."""
        with self._lock:
            self._work.wait_for(lambda: self._reads or self._closing)
            turn = self._reads.take()
            if turn is not None:
                self._running.update(turn.jobs)
            return turn

    def _tell(self, turn: Turn, mark: tuple[float, float]) -> None:
        """Hand over what has ended, and wake whoever waits for the rest."""
        with self._lock:
            ended = [job for job in turn.jobs if job.outcome and job in self._running]
            for job in ended:
                job.parallel = self._busy.mean(mark)
            self._end(ended)
        if ended:
            self._on_progress()

    def _run_writer(self) -> None:
        while True:
            with self._lock:
                self._work.wait_for(lambda: self._writes or self._closing)
                if not self._writes:
                    return
                jobs = self._take_group()
            try:
                finish_group(self._backend, jobs)
            except BaseException as error:
                self._writer_died(jobs, error)
                return
            with self._lock:
                self._end(jobs)
            self._on_progress()

    def _take_group(self) -> list[WriterJob]:
        jobs: list[WriterJob] = []
        while self._writes and len(jobs) < self._group:
            jobs.append(self._writes.popleft())
        self._running.update(jobs)
        return jobs

    def _reader_died(self, turn: Turn, error: BaseException) -> None:
        _log.critical("a reader thread died; its reads are recomputed", exc_info=error)
        with self._lock:
            self._live_readers -= 1
            self._busy.change(-1)
            self._end([job for job in turn.jobs if job in self._running], error)
            if self._live_readers == 0:
                self._reader_error = error
                self._end(self._reads.clear(), error)

    def _writer_died(self, jobs: Sequence[WriterJob], error: BaseException) -> None:
        _log.critical("the writer died; nothing is stored any more", exc_info=error)
        with self._lock:
            self._writer_error = error
            self._end(jobs, error)
            self._end(self._writes, error)
            self._writes.clear()


def _closed() -> RuntimeError:
    return RuntimeError("the I/O pool is closed")
