"""A disk on a virtual clock: declared latency and bandwidth, no waiting in tests."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from pcr_core.tiers.jobs import Job, ReadJob, WriterJob, finish, finish_group


class VirtualTime:
    """Seconds that pass only when somebody says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class VirtualIo:
    """One reader: ``latency + bytes / bandwidth`` each, urgent first. Writes are free.

    Attributes:
        waited: Seconds that ``wait`` let pass.
        order: Keys in the order in which their reads started.
    """

    def __init__(self, backend, time: VirtualTime, latency=0.0, bandwidth=1e9) -> None:
        self._backend = backend
        self._time = time
        self._latency = latency
        self._bandwidth = bandwidth
        self._urgent: deque[tuple[float, ReadJob]] = deque()
        self._ahead: deque[tuple[float, ReadJob]] = deque()
        self._running: tuple[float, ReadJob] | None = None
        self._free = 0.0
        self._done: deque[Job] = deque()
        self.waited = 0.0
        self.order: list[bytes] = []

    def seconds(self, job: ReadJob) -> float:
        return self._latency + len(job.view) / self._bandwidth

    def read(self, job: ReadJob) -> None:
        self._catch_up()
        queue = self._urgent if job.urgent else self._ahead
        queue.append((self._time.now, job))
        self._catch_up()

    def hurry(self, job: ReadJob) -> None:
        self._catch_up()
        for entry in [e for e in self._ahead if e[1] is job]:
            self._ahead.remove(entry)
            self._urgent.append(entry)

    def cancel(self, job: ReadJob) -> bool:
        self._catch_up()
        for queue in (self._urgent, self._ahead):
            for entry in [e for e in queue if e[1] is job]:
                queue.remove(entry)
                return True
        return False

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
        wanted = set(jobs)
        start = self._time.now
        while any(job.outcome is None for job in wanted):
            assert self._running is not None
            end = self._running[0]
            if timeout is not None and end > start + timeout:
                self._time.now = start + timeout
                self.waited += timeout
                return False
            self._time.now = max(self._time.now, end)
            self._catch_up()
        self.waited += self._time.now - start
        return True

    def flush(self, timeout: float | None = None) -> bool:
        return True

    def close(self, timeout: float = 10.0) -> bool:
        while self._running is not None:
            self._time.now = self._running[0]
            self._catch_up()
        return True

    def _catch_up(self) -> None:
        """Let the reader do what it has done by now."""
        while True:
            if self._running is not None:
                end, job = self._running
                if end > self._time.now:
                    return
                finish(self._backend, job)
                job.seconds = self.seconds(job)
                self._done.append(job)
                self._running, self._free = None, end
            queue = self._urgent or self._ahead
            if not queue:
                return
            asked, job = queue.popleft()
            self.order.append(job.chunk.key)
            self._running = (max(self._free, asked) + self.seconds(job), job)
