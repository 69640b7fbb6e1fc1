"""Replays a trace on one server with a DRAM tier of a given size, without bytes.

The tree, the policies and the look-ahead are the engine's own, driven as the tier
manager drives them: the window is shown first, the whole path is pinned, missing chunks
are inserted root first, evicting leaves, and the use is committed once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pcr_core.index.adaptive import Adaptive, ShadowCache
from pcr_core.index.chunk import ChunkKey
from pcr_core.index.look_ahead import LookAhead, window_size
from pcr_core.index.node import Host
from pcr_core.index.policies import EvictionPolicy
from pcr_core.simulator.optimum import usable_chunks
from pcr_core.trace import Trace, TraceRequest

Price = Callable[[int, int], float]
"""Tokens cached and tokens computed of a request, to the cost of computing one of them.
Only ratios matter."""


def flat_price(cached: int, computed: int) -> float:
    """Every token costs the same; a whole number keeps ties exact."""
    return 1.0


@dataclass(frozen=True, slots=True)
class Contender:
    """A policy as it takes part in a comparison.

    Attributes:
        name: Name of the policy.
        policy: Makes it, for a trace and a capacity in chunks.
        window: Waiting requests whose chunks are protected; ``None`` for as many as fit
            into the tier, the engine's ``"auto"``.
        remembered: Evicted chunks whose use counts are kept, per chunk of capacity.
        price: What the policy is told that computing a token costs.
    """

    name: str
    policy: Callable[[Trace, int], EvictionPolicy]
    window: int | None = 0
    remembered: int = 0
    price: Price = flat_price

    @property
    def label(self) -> str:
        """The name, with the window where there is one."""
        if self.window == 0:
            return self.name
        return f"{self.name} W={'auto' if self.window is None else self.window}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a contender made of a trace.

    Attributes:
        contender: Its name.
        window: Waiting requests whose chunks were protected.
        capacity: Size of the tier, in chunks.
        requests: Requests served.
        prompt_tokens: Tokens of all prompts.
        hit_tokens: Those that were not computed.
        queue: Requests waiting, averaged over time.
        wait: Seconds from arrival to the start of service, averaged over requests.
        evictions: Chunks that made room for others.
        bypassed: Chunks not kept because nothing could be evicted.
    """

    contender: str
    window: int
    capacity: int
    requests: int
    prompt_tokens: int
    hit_tokens: int
    queue: float
    wait: float
    evictions: int
    bypassed: int

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were not computed, from 0 to 1."""
        return self.hit_tokens / self.prompt_tokens


def service_rate(trace: Trace, load: float) -> float:
    """Tokens per second of the server that ``trace`` would keep busy without any hit.

    Args:
        trace: Whose arrivals to take.
        load: Share of the time that this server would be busy; above 1 its queue
            grows as long as requests come.
    """
    gaps = len(trace.requests) - 1
    span = trace.requests[-1].arrival - trace.requests[0].arrival
    gap = span / gaps if span > 0 else 1.0
    return trace.mean_tokens / gap / load


def replay(
    trace: Trace,
    contender: Contender,
    capacity: int,
    rate: float,
    *,
    after_each: Callable[[], None] = lambda: None,
) -> Outcome:
    """Serve all requests, one at a time, first come first served.

    Args:
        trace: The requests.
        contender: What decides about eviction.
        capacity: Chunks that the tier holds, at least 1.
        rate: Prompt tokens that the server computes per second.
        after_each: Called after each request, to show progress.
    """
    window = contender.window
    if window is None:
        window = window_size(capacity, trace.mean_chunks)
    tier, server = _Tier(trace, contender, capacity), _Server(trace, rate)
    paths = [request.chunks for request in trace.requests]
    hit_tokens = 0
    for index, request in enumerate(trace.requests):
        waiting = server.start(index)
        tier.look_ahead(paths[index + 1 : index + 1 + min(waiting, window)])
        hits = tier.serve(request) * trace.chunk_tokens
        server.compute(request.prompt_tokens - hits)
        hit_tokens += hits
        after_each()
    return Outcome(
        contender=contender.name,
        window=window,
        capacity=capacity,
        requests=len(paths),
        prompt_tokens=sum(request.prompt_tokens for request in trace.requests),
        hit_tokens=hit_tokens,
        queue=server.waited / server.span,
        wait=server.waited / len(paths),
        evictions=tier.evictions,
        bypassed=tier.bypassed,
    )


class _Server:
    """Computes one prompt at a time; knows who waits meanwhile.

    Attributes:
        waited: Seconds that requests have waited, summed over all started.
    """

    def __init__(self, trace: Trace, rate: float) -> None:
        self.waited = 0.0
        self._arrivals = [request.arrival for request in trace.requests]
        self._rate = rate
        self._free_at = self._arrivals[0]

    @property
    def span(self) -> float:
        """Seconds from the first arrival to the last end."""
        return self._free_at - self._arrivals[0]

    def start(self, index: int) -> int:
        """Take up a request as soon as possible; returns how many wait then."""
        arrival = self._arrivals[index]
        self._free_at = max(self._free_at, arrival)
        self.waited += self._free_at - arrival
        return bisect_right(self._arrivals, self._free_at, lo=index + 1) - (index + 1)

    def compute(self, tokens: int) -> None:
        """Be busy for so many tokens."""
        self._free_at += tokens / self._rate


class _Tier:
    """The DRAM tier and what decides about it."""

    def __init__(self, trace: Trace, contender: Contender, capacity: int) -> None:
        policy = contender.policy(trace, capacity)
        remembered = contender.remembered * capacity
        self._cache = ShadowCache(policy, capacity, remembered=remembered)
        self._look_ahead = LookAhead(self._cache.tree)
        self._adaptive = policy if isinstance(policy, Adaptive) else None
        self._chunk_tokens = trace.chunk_tokens
        self._price = contender.price

    @property
    def evictions(self) -> int:
        return self._cache.evictions

    @property
    def bypassed(self) -> int:
        return self._cache.bypassed

    def look_ahead(self, window: Sequence[Sequence[ChunkKey]]) -> None:
        self._look_ahead.update(window)
        if self._adaptive is not None:
            self._adaptive.look_ahead(window)

    def serve(self, request: TraceRequest) -> int:
        """Return how many chunks need not be computed."""
        usable = usable_chunks(request, self._chunk_tokens)
        nodes = self._cache.tree.match(request.chunks[:usable])
        hits = sum(node is not None and node.host is Host.READY for node in nodes)
        cached = hits * self._chunk_tokens
        cost = self._price(cached, request.prompt_tokens - cached)
        self._cache.request(request.chunks, cost)
        if self._adaptive is not None:
            self._adaptive.observe(request.chunks, cost=cost)
        return hits
