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
)

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
        self._urgent: deque[ReadJob] = deque()
        self._ahead: deque[ReadJob] = deque()
        self._writes: deque[WriterJob] = deque()
        self._running: set[Job] = set()
        self._done: deque[Job] = deque()
        self._closing = False
        self._live_readers = readers
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
            if self._closing or self._reader_error is not None:
                self._end([job], self._reader_error or _closed())
                return
            (self._urgent if job.urgent else self._ahead).append(job)
            self._work.notify_all()

    def hurry(self, job: ReadJob) -> None:
        """Make a queued read urgent; no matter if it runs or has ended."""
        with self._lock:
            job.urgent = True
            if job in self._ahead:
                self._ahead.remove(job)
                self._urgent.append(job)

    def cancel(self, job: ReadJob) -> bool:
        """Take back a read that has not started; see ``Io``."""
        with self._lock:
            for queue in (self._urgent, self._ahead):
                if job in queue:
                    queue.remove(job)
                    return True
        return False

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
                    and wanted.isdisjoint(self._urgent)
                    and wanted.isdisjoint(self._ahead)
                    and wanted.isdisjoint(self._writes)
                ),
                timeout,
            )

    def wait_any(self, jobs: Iterable[Job], timeout: float | None = None) -> bool:
        """Block until one of these jobs has ended, or for ``timeout`` seconds."""
        wanted = set(jobs)
        with self._lock:
            return self._progress.wait_for(
                lambda: (
                    not wanted
                    <= self._running.union(self._urgent, self._ahead, self._writes)
                ),
                timeout,
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
            for job in self._writes:
                if isinstance(job, WriteJob):
                    job.outcome = WriteOutcome.DROPPED
            self._end_reads(_closed())
            self._end(self._writes, _closed())
            self._writes.clear()
            self._work.notify_all()
        for thread in self._threads:
            thread.join(max(1.0, deadline - time.monotonic()))
        hanging = [thread.name for thread in self._threads if thread.is_alive()]
        if hanging:
            _log.error("%s hangs in a system call; left behind", ", ".join(hanging))
        return not hanging

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

    def _end_reads(self, error: BaseException) -> None:
        """Fail every read that has not started. Lock held."""
        for queue in (self._urgent, self._ahead):
            self._end(queue, error)
            queue.clear()

    def _run_reader(self) -> None:
        while True:
            with self._lock:
                self._work.wait_for(
                    lambda: self._urgent or self._ahead or self._closing
                )
                queue = self._urgent or self._ahead
                if not queue:
                    return
                job = queue.popleft()
                self._running.add(job)
                job.parallel = sum(isinstance(one, ReadJob) for one in self._running)
            try:
                finish(self._backend, job)
            except BaseException as error:
                self._reader_died(job, error)
                return
            with self._lock:
                self._end([job])
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

    def _reader_died(self, job: ReadJob, error: BaseException) -> None:
        _log.critical("a reader thread died; its reads are recomputed", exc_info=error)
        with self._lock:
            self._live_readers -= 1
            self._end([job], error)
            if self._live_readers == 0:
                self._reader_error = error
                self._end_reads(error)

    def _writer_died(self, jobs: Sequence[WriterJob], error: BaseException) -> None:
        _log.critical("the writer died; nothing is stored any more", exc_info=error)
        with self._lock:
            self._writer_error = error
            self._end(jobs, error)
            self._end(self._writes, error)
            self._writes.clear()


def _closed() -> RuntimeError:
    return RuntimeError("the I/O pool is closed")
