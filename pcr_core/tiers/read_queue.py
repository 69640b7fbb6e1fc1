"""Reads that have not begun, in the order in which readers take them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

from pcr_core.tiers.jobs import Backend, ReadJob, finish, finish_layers

Run = Callable[[Backend, Sequence[ReadJob]], Generator[None, None, None]]


@dataclass(slots=True, eq=False)
class Turn:
    """What one reader does in one go.

    Attributes:
        jobs: The reads.
        run: Does them; yields whenever there is something new.
    """

    jobs: list[ReadJob]
    run: Run


class Busy:
    """How many readers are at work. Not locked: its owner is.

    Args:
        clock: Seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since = clock()
        self._now = 0
        self._seconds = 0.0

    def change(self, by: int) -> tuple[float, float]:
        """So many more are at work.

        Returns:
            The time, and the seconds that all have worked until then, for ``mean``.
        """
        now = self._clock()
        self._seconds += self._now * (now - self._since)
        self._since = now
        self._now += by
        return now, self._seconds

    def mean(self, mark: tuple[float, float]) -> float:
        """Readers at work since an earlier ``change``, on average, but at least one."""
        now, seconds = self.change(0)
        spent = now - mark[0]
        return max(1.0, (seconds - mark[1]) / spent) if spent > 0.0 else 1.0


class ReadQueue:
    """Urgent reads first, otherwise first in, first out. Not locked: its owner is."""

    def __init__(self) -> None:
        self._urgent: deque[Turn] = deque()
        self._ahead: deque[Turn] = deque()

    def add(self, job: ReadJob) -> None:
        """Queue the read of a whole chunk."""
        queue = self._urgent if job.urgent else self._ahead
        queue.append(Turn([job], _whole))

    def add_layers(self, jobs: Sequence[ReadJob], readers: int) -> None:
        """Queue reads layer by layer, shared out among so many readers.

        Neighbours go to different readers, so that all come forward evenly.
        """
        for number in range(min(readers, len(jobs))):
            self._urgent.append(Turn(list(jobs[number::readers]), finish_layers))

    def hurry(self, job: ReadJob) -> None:
        """Make a read urgent, if it is still here."""
        job.urgent = True
        turn = _find(self._ahead, job)
        if turn is not None:
            self._ahead.remove(turn)
            self._urgent.append(turn)

    def cancel(self, job: ReadJob) -> bool:
        """Take a read out; False if it is not here."""
        for queue in (self._urgent, self._ahead):
            turn = _find(queue, job)
            if turn is not None:
                turn.jobs.remove(job)
                if not turn.jobs:
                    queue.remove(turn)
                return True
        return False

    def take(self) -> Turn | None:
        """What is to be done next, if there is anything."""
        queue = self._urgent or self._ahead
        return queue.popleft() if queue else None

    def clear(self) -> list[ReadJob]:
        """Take everything out."""
        jobs = list(self)
        self._urgent.clear()
        self._ahead.clear()
        return jobs

    def __iter__(self) -> Iterator[ReadJob]:
        for queue in (self._urgent, self._ahead):
            for turn in queue:
                yield from turn.jobs

    def __bool__(self) -> bool:
        return bool(self._urgent or self._ahead)


def _whole(backend: Backend, jobs: Sequence[ReadJob]) -> Generator[None, None, None]:
    for job in jobs:
        finish(backend, job)
    yield


def _find(queue: deque[Turn], job: ReadJob) -> Turn | None:
    return next((turn for turn in queue if job in turn.jobs), None)
