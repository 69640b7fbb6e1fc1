"""An engine on a virtual clock: one request at a time, a second for each new word."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pcr_core import (
    CancelledError,
    Completion,
    EngineClosedError,
    PromptTooLongError,
    QueueFullError,
    Result,
    SamplingParams,
    Timing,
    Usage,
)


class Clock:
    """Runs what is due, in the order of time, then of asking."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def at(self, time: float, work: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time, next(self._count), work))

    def post(self, work: Callable[[], None]) -> None:
        """What a worker's thread does, in no time."""
        self.at(self.now, work)

    def run(self) -> None:
        while self._due:
            self.now, _, work = heapq.heappop(self._due)
            work()


@dataclass
class _Request:
    prompt: str
    completion: Completion


class VirtualEngine:
    """Computes the words of a prompt that no earlier prompt began with.

    As the real one does: a forward under way is finished even if it is cancelled, and
    stays stored.
    """

    def __init__(self, clock: Clock, *, longest: int = 1000, most: int = 100) -> None:
        self.clock = clock
        self.closed = False
        self.submitted: list[str] = []
        self.hinted: list[str] = []
        self.priorities: list[int] = []
        self.completions: list[Completion] = []
        self.documents: list[Sequence[Any]] = []
        self._stored: set[tuple[str, ...]] = set()
        self._waiting: deque[_Request] = deque()
        self._running: _Request | None = None
        self._longest, self._most = longest, most

    @property
    def idle(self) -> bool:
        return self._running is None and not self._waiting

    def prefetch(self, prompt: str) -> None:
        self._check(prompt)
        self.hinted.append(prompt)

    def submit(
        self,
        prompt: str,
        params: SamplingParams,
        *,
        documents: Sequence[Any] = (),
        priority: int = 0,
    ) -> Completion:
        self._check(prompt)
        self.priorities.append(priority)
        if len(self._waiting) >= self._most:
            raise QueueFullError("full")
        self.submitted.append(prompt)
        self.documents.append(documents)
        request = _Request(prompt, Completion())
        self.completions.append(request.completion)
        self._waiting.append(request)
        if self._running is None:
            self._next()
        return request.completion

    def stored(self, words: Sequence[str]) -> int:
        """How many leading words need not be computed."""
        longest = len(words)
        while longest and tuple(words[:longest]) not in self._stored:
            longest -= 1
        return longest

    def _check(self, prompt: str) -> None:
        if self.closed:
            raise EngineClosedError("closed")
        if len(prompt.split()) > self._longest:
            raise PromptTooLongError(len(prompt.split()), self._longest)

    def _next(self) -> None:
        self._running = None
        while self._waiting:
            request = self._waiting.popleft()
            if request.completion.cancelled:
                request.completion.fail(CancelledError("cancelled"))
                continue
            self._running = request
            words = request.prompt.split()
            cached = min(self.stored(words), len(words) - 1)
            seconds = len(words) - cached
            end = partial(self._end, request, words, cached)
            self.clock.at(self.clock.now + seconds, end)
            return

    def _end(self, request: _Request, words: list[str], cached: int) -> None:
        self._stored |= {tuple(words[:n]) for n in range(1, len(words) + 1)}
        usage = Usage(len(words), 1, {"dram": cached})
        answer = f"answer to {request.prompt}"
        # The row is free before the caller knows.
        self._running = None
        request.completion.finish(
            Result(answer, [1], None, "stop", usage, Timing(total=self.clock.now))
        )
        if self._running is None:
            self._next()
