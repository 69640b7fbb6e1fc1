"""Time and I/O that are computed: a disk of declared latency and bandwidth."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from pcr_core.tiers.jobs import Job, ReadJob, WriterJob, finish, finish_group


class VirtualTime:
    """Seconds that pass only when somebody says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class VirtualIo:
    """Readers that share a disk, urgent reads first. Writes are free.

    A read takes ``latency + readers * bytes / bandwidth``, as if all readers were
    always busy.

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
        self._urgent: deque[tuple[float, ReadJob]] = deque()
        self._ahead: deque[tuple[float, ReadJob]] = deque()
        self._running: list[tuple[float, ReadJob]] = []
        self._readers = readers
        self._free = [0.0] * readers
        self._done: deque[Job] = deque()
        self.waited = 0.0
        self.order: list[bytes] = []

    def start_afresh(self) -> None:
        """Forget the past: the clock was put back and no read is under way."""
        self._free = [self._time.now] * self._readers
        self.order.clear()

    def seconds(self, job: ReadJob) -> float:
        return self.latency + self._readers * len(job.view) / self.bandwidth

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
        wanted = list(jobs)
        return self._until(lambda: all(job.outcome for job in wanted), timeout)

    def wait_any(self, jobs: Iterable[Job], timeout: float | None = None) -> bool:
        """Let time pass until one of the jobs has ended."""
        wanted = list(jobs)
        return self._until(lambda: any(job.outcome for job in wanted), timeout)

    def flush(self, timeout: float | None = None) -> bool:
        return True

    def close(self, timeout: float = 10.0) -> bool:
        return self._until(lambda: not self._running, None)

    def _until(self, condition: Callable[[], bool], timeout: float | None) -> bool:
        start = self._time.now
        self._catch_up()
        while not condition():
            end = min(end for end, _ in self._running)
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
            while self._free and (queue := self._urgent or self._ahead):
                asked, job = queue.popleft()
                self.order.append(job.chunk.key)
                job.begun = True
                job.parallel = len(self._running) + 1
                begins = max(self._free.pop(0), asked)
                self._running.append((begins + self.seconds(job), job))
            ended = [one for one in self._running if one[0] <= self._time.now]
            if not ended:
                return
            end, job = min(ended, key=lambda one: one[0])
            self._running.remove((end, job))
            finish(self._backend, job)
            job.seconds = self.seconds(job)
            self._done.append(job)
            self._free.append(end)
