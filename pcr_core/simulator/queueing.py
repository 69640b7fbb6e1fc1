"""From what each request costs to when its first token comes, first come first served.

Two servers in a row: the disk reads what is only on SSD, from arrival on (the engine's
prefetch), then the model computes the rest, one prompt at a time. Each recursion is a
maximum of sums, as Lindley's (1952): with requests closer together nobody is earlier.

Answers are generated meanwhile, a step between two parts of a prompt. Their number is
taken as its mean (Little's law), so that a request waits for steps it did not cause,
but not for one particular answer: right on average, too narrow in its spread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from pcr_core.simulator.rates import Rates

_ROUNDS = 60


class Job(NamedTuple):
    """What a request costs.

    Attributes:
        read: Seconds of the disk.
        compute: Seconds of the model until the first token.
        parts: Forwards into which its prompt is cut.
        output: Tokens generated.
    """

    read: float
    compute: float
    parts: int
    output: int


class Reply(NamedTuple):
    """When a request got its first token, in seconds after it came.

    Attributes:
        queue: Until the model was free for it.
        ttft: Until its first token.
    """

    queue: float
    ttft: float


@dataclass(frozen=True)
class Load:
    """Jobs as a stream; means over all of them.

    Args:
        jobs: At least one.
        rates: For decode steps.
        rows: Answers generated at a time, at most.
    """

    jobs: Sequence[Job]
    rates: Rates
    rows: int

    def interference(self, rate: float) -> tuple[float, float]:
        """Seconds of decode steps per part of a prompt, and per request beside that.

        The second is for what does not fit between parts once all rows are taken.
        Neither falls when ``rate`` rises.

        Args:
            rate: Requests per second.
        """
        _, parts, steps = self._means
        running = self._running(rate)
        rows = min(float(self.rows), max(1.0, running))
        each = (1 - math.exp(-running)) * self.rates.step_seconds(rows)
        missing = max(0.0, steps / self.rows - parts) if running >= self.rows else 0.0
        return each, missing * self.rates.step_seconds(self.rows)

    def _running(self, rate: float) -> float:
        """Mean number of answers being generated (Little's law); ``rows`` is all.

        More of them take longer, so that they are more: iterated from one on, which
        gives the least solution, and never a smaller one for a higher rate.
        """
        compute, parts, steps = self._means
        idle = max(0.0, 1 - rate * compute)
        running = 0.0
        for _ in range(_ROUNDS):
            step = self.rates.step_seconds(running)
            alone = step / idle if idle > 0 else math.inf
            turn = min(alone, step + compute / parts)  # from one step to the next
            running = min(float(self.rows), rate * steps * turn)
        return running

    def busy(self, rate: float) -> float:
        """Seconds of work per second, of the busier of model and disk."""
        compute, parts, _ = self._means
        each, more = self.interference(rate)
        read = float(np.mean([job.read for job in self.jobs]))
        return rate * max(compute + parts * each + more, read)

    def most(self) -> float:
        """Requests per second beyond which the queue grows without end."""
        low, high = 0.0, 1.0
        while self.busy(high) < 1:
            low, high = high, 2 * high
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if self.busy(middle) < 1 else (low, middle)
        return low

    def serve(self, arrivals: Sequence[float], rate: float) -> list[Reply]:
        """Serve one job per arrival.

        Args:
            arrivals: Seconds at a mean of one request per second, rising.
            rate: Requests per second; arrivals are that much closer together.
        """
        each, more = self.interference(rate)
        read_end = first_token = -math.inf
        replies = []
        for job, moment in zip(self.jobs, arrivals, strict=True):
            arrival = moment / rate
            start = max(arrival, first_token)
            if job.read > 0:
                read_end = max(arrival, read_end) + job.read
                start = max(start, read_end)
            first_token = start + job.compute + job.parts * each + more
            replies.append(Reply(start - arrival, first_token - arrival))
        return replies

    @cached_property
    def _means(self) -> tuple[float, float, float]:
        """Compute seconds, parts, and decode steps behind the first token."""
        compute, parts, output = np.mean(
            [(job.compute, job.parts, job.output) for job in self.jobs], axis=0
        ).tolist()
        return compute, parts, max(0.0, output - 1)
