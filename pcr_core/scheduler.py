"""Which request is next. Pure: no tensors, no I/O, no clock of its own.

First come, first served, with three reasons to change that: a request of higher
priority, one whose chunks are in memory while another's are still being read, and, with
``order="cache_aware"``, one that has much cached and little to compute (RAGCache, arXiv
2404.12457, cached / computed length). However good the reason, a request is overtaken
at most ``max_overtakes`` times: then it is next. So nobody starves.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

from pcr_core.index.chunk import ChunkKey
from pcr_core.request import Request

Order = Literal["fcfs", "cache_aware"]
_LOOKED_AT = 128
"""Requests whose standing is asked for at a time, those first that would run first."""


def sharers_together(prompts: Sequence[Sequence[ChunkKey]]) -> list[int]:
    """An order in which prompts that begin alike follow each other.

    Args:
        prompts: Chunk keys of each, root first.

    Returns:
        Indices, those of each beginning where the first with it comes.
    """
    first: dict[ChunkKey, int] = {}
    for keys in prompts:
        for key in keys:
            first.setdefault(key, len(first))
    return sorted(range(len(prompts)), key=lambda i: [first[k] for k in prompts[i]])


@dataclass(frozen=True, slots=True)
class Standing:
    """How a waiting request stands with the cache now.

    Attributes:
        ready: Whether none of its chunks is still being read.
        cached: Prompt tokens that need not be computed.
        computed: Prompt tokens that must be.
    """

    ready: bool = True
    cached: int = 0
    computed: int = 1

    @property
    def score(self) -> float:
        """RAGCache's order priority: the higher, the sooner."""
        return self.cached / max(1, self.computed)


def _alike(_: Request) -> Standing:
    return Standing()


@dataclass(slots=True, eq=False)
class _Entry:
    """A waiting request, its number in order of arrival, and how often it waited."""

    request: Request
    number: int
    overtaken: int = 0

    @property
    def urgency(self) -> tuple[int, float, int]:
        """Sorts by priority, then deadline, then arrival."""
        request = self.request
        deadline = math.inf if request.deadline is None else request.deadline
        return -request.priority, deadline, self.number


class Scheduler:
    """Waiting requests, in the order in which they will run. Engine thread only.

    Args:
        order: See above.
        max_overtakes: How often a request may be overtaken by a later one.
        standing: Says how a request stands with the cache; asked anew at every choice.

    Attributes:
        version: Changes whenever the queue does.
    """

    def __init__(
        self,
        order: Order = "fcfs",
        max_overtakes: int = 32,
        standing: Callable[[Request], Standing] = _alike,
    ) -> None:
        self.version = 0
        self._by_score = order == "cache_aware"
        self._bound = max_overtakes
        self._standing = standing
        self._waiting: list[_Entry] = []  # in order of arrival
        self._taken: dict[Request, _Entry] = {}  # may come back
        self._numbers = 0

    def add(self, request: Request) -> None:
        """Append a request to the queue."""
        self.version += 1
        self._numbers += 1
        self._waiting.append(_Entry(request, self._numbers))

    def peek(self) -> Request | None:
        """The request to run next, or ``None`` if none waits. Pure."""
        if len(self._waiting) < 2:
            return self._waiting[0].request if self._waiting else None
        return self._ordered()[0].request

    def next(self) -> Request | None:
        """Take the request to run next, or ``None`` if none waits."""
        request = self.peek()
        if request is not None:
            self.take(request)
        return request

    def take(self, request: Request) -> None:
        """Take out one request to run; those before it have been overtaken."""
        self.version += 1
        at = next(i for i, e in enumerate(self._waiting) if e.request is request)
        for earlier in self._waiting[:at]:
            earlier.overtaken += 1
        self._taken[request] = self._waiting.pop(at)

    def may_take(self, request: Request) -> bool:
        """Whether no request before this one must not be overtaken again. Pure."""
        before = takewhile(lambda entry: entry.request is not request, self._waiting)
        return all(entry.overtaken < self._bound for entry in before)

    def put_back(self, request: Request) -> None:
        """Have a request that was taken wait again, in its old place."""
        self.version += 1
        entry = self._taken.pop(request)
        insort(self._waiting, entry, key=lambda entry: entry.number)

    def done(self, request: Request) -> None:
        """Say that a request that was taken will not come back."""
        self._taken.pop(request, None)

    def upcoming(self, count: int) -> list[Request]:
        """The ``count`` requests that will run next, nearest first. Pure."""
        return [entry.request for entry in self._ordered()[:count]] if count else []

    def waiting(self) -> list[Request]:
        """All waiting requests, in order of arrival. Pure."""
        return [entry.request for entry in self._waiting]

    def drop(self, unwanted: Callable[[Request], bool]) -> list[Request]:
        """Take out the waiting requests that nobody wants any more."""
        gone = [e.request for e in self._waiting if unwanted(e.request)]
        if gone:
            self.version += 1
            left = set(gone)
            self._waiting = [e for e in self._waiting if e.request not in left]
        return gone

    def drain(self) -> list[Request]:
        """Take all waiting requests, for a closing engine to fail."""
        return self.drop(lambda request: True)

    def __len__(self) -> int:
        return len(self._waiting)

    def _ordered(self) -> Sequence[_Entry]:
        """Who must not be overtaken again, then the others by what speaks for them."""
        due = [e for e in self._waiting if e.overtaken >= self._bound]
        others = [e for e in self._waiting if e.overtaken < self._bound]
        if any(e.request.priority or e.request.deadline for e in others):
            others.sort(key=lambda entry: entry.urgency)
        return [*due, *self._by_standing(others)]

    def _by_standing(self, entries: Sequence[_Entry]) -> Iterable[_Entry]:
        """The first few, by how they stand with the cache, within one priority."""
        if len(entries) < 2:
            return entries
        first, rest = entries[:_LOOKED_AT], entries[_LOOKED_AT:]
        standings = {entry.number: self._standing(entry.request) for entry in first}

        def key(entry: _Entry) -> tuple[int, bool, float]:
            standing = standings[entry.number]
            score = standing.score if self._by_score else 0.0
            return -entry.request.priority, not standing.ready, -score

        return [*sorted(first, key=key), *rest]  # stable: else as they were
