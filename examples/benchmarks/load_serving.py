"""Sends requests at their times, and keeps what became of each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from examples.benchmarks.load_work import Arrival
from pcr_core import Completion, Engine, PcrError, Result, SamplingParams


@dataclass
class Sent:
    """A request under way.

    Attributes:
        number: Its place in the stream.
        due: Seconds after the start at which it was to be sent.
        sent: When it was.
        completion: Its completion.
        heard: When text came, on the clock of ``time.perf_counter``.
    """

    number: int
    due: float
    sent: float
    completion: Completion
    heard: list[float] = field(default_factory=list)

    def hear(self) -> None:
        """Something has come."""
        self.heard.append(time.perf_counter())


@dataclass(frozen=True)
class Answer:
    """A request that ended well.

    Attributes:
        number: Its place in the stream.
        sent: Seconds after the start at which it was sent.
        result: What it got.
    """

    number: int
    sent: float
    result: Result


@dataclass(frozen=True)
class Served:
    """What one run gave.

    Attributes:
        seconds: From the first arrival to the last token.
        answers: Of the requests that ended well, in order of arrival.
        gaps: Seconds between texts of one answer, all requests together.
        late: Seconds by which requests were sent later than due, at most.
        failed: Messages of requests that did not end well.
    """

    seconds: float
    answers: list[Answer]
    gaps: list[float]
    late: float
    failed: list[str]


def serve(
    engine: Engine,
    arrivals: Sequence[Arrival],
    rate: float,
    output: int,
    concurrency: int | None = None,
) -> Served:
    """Send every request at its time and wait for all of them.

    Args:
        engine: Serves them.
        arrivals: The stream.
        rate: Requests per second.
        output: Tokens of every answer.
        concurrency: Requests under way at most; ``None`` for no limit.
    """
    params = SamplingParams(max_tokens=output, min_tokens=output)
    slots = threading.Semaphore(concurrency or len(arrivals))
    begun, sent, failed = time.perf_counter(), list[Sent](), list[str]()
    for number, arrival in enumerate(arrivals):
        due = arrival.at / rate
        time.sleep(max(0.0, begun + due - time.perf_counter()))
        slots.acquire()
        try:
            completion = engine.submit(arrival.prompt, params)
        except PcrError as error:
            failed.append(str(error))
            slots.release()
            continue
        one = Sent(number, due, time.perf_counter() - begun, completion)
        completion.subscribe(one.hear)
        completion.subscribe(_releasing(completion, slots))
        sent.append(one)
    answers = []
    for one in sent:
        try:
            answers.append(Answer(one.number, one.sent, one.completion.result()))
        except PcrError as error:
            failed.append(str(error))
    gaps = [b - a for one in sent for a, b in zip(one.heard, one.heard[1:])]  # noqa: B905
    late = max((one.sent - one.due for one in sent), default=0.0)
    return Served(time.perf_counter() - begun, answers, gaps, late, failed)


def _releasing(
    completion: Completion, slots: threading.Semaphore
) -> Callable[[], None]:
    """A listener that gives the slot back once, when the request is over."""
    over = threading.Lock()

    def listen() -> None:
        if completion.done and over.acquire(blocking=False):
            slots.release()

    return listen
