"""What fits where, what hits, and when the first token comes: before buying anything.

Hits are those of a generated stream on tiers of the planned size; times follow from
them and the machine's rates, through a queue. Estimates: docs/capacity.md lists what is
left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from pcr_core.errors import ConfigError
from pcr_core.simulator.kv_size import KvSize
from pcr_core.simulator.lru_tiers import UNLIMITED, Found, find_all
from pcr_core.simulator.queueing import Job, Load
from pcr_core.simulator.rates import Rates
from pcr_core.simulator.workloads import Recipe, generate
from pcr_core.trace import Trace, TraceRequest


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be served, with what.

    Attributes:
        recipe: The stream: documents, their popularity, prompts.
        rate: Requests per second.
        kv: Size of the model's KV.
        rates: The machine's rates.
        dram_bytes, ssd_bytes: Budgets of the tiers; 0 for none.
        warm_up: Requests served before counting begins, beside those of the recipe.
        max_batch_size, max_prefill_tokens: As in ``EngineConfig``.
        seed: Of the stream.

    Raises:
        ConfigError: If a number cannot be.
    """

    recipe: Recipe
    rate: float
    kv: KvSize
    rates: Rates
    dram_bytes: int = 0
    ssd_bytes: int = 0
    warm_up: int = 0
    max_batch_size: int = 8
    max_prefill_tokens: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.rate) and self.rate > 0):
            raise ConfigError(f"rate is {self.rate}; it must be requests per second")
        _at_least(self, 0, "dram_bytes", "ssd_bytes", "warm_up", "seed")
        _at_least(self, 1, "max_batch_size", "max_prefill_tokens")
        _at_least(self.recipe, 1, "requests", "output_tokens", "chunk_tokens")
        _at_least(self.recipe, 1, "query_tokens")  # the last token is always computed
        _at_least(self.recipe, 0, "zipf", "spread")
        _at_least(self.recipe, 1, "document_tokens")
        if self.ssd_bytes and not self.rates.ssd_read:
            raise ConfigError(
                "there is an SSD tier, but its read rate is not known; give ssd_read "
                "in bytes per second, or 0 bytes of SSD"
            )

    def trace(self) -> Trace:
        """The stream, warm-up included, one request per second on average."""
        whole = replace(self.recipe, requests=self.recipe.requests + self.warm_up)
        return generate(whole, self.seed)


def _at_least(holder: Plan | Recipe, least: int, *names: str) -> None:
    for name in names:
        value = getattr(holder, name)
        if not (math.isfinite(value) and value >= least):
            raise ConfigError(f"{name} is {value}; it must be at least {least}")


@dataclass(frozen=True, slots=True)
class Times:
    """A time over all requests, in seconds.

    Attributes:
        mean, p50, p95: Mean, median and 95th percentile.
    """

    mean: float
    p50: float
    p95: float

    @classmethod
    def of(cls, sample: Sequence[float]) -> Times:
        """Of at least one value."""
        p50, p95 = np.percentile(sample, (50, 95)).tolist()
        return cls(float(np.mean(sample)), p50, p95)


@dataclass(frozen=True, slots=True)
class Forecast:
    """What one choice of tiers comes to.

    Attributes:
        cache: Which.
        dram_hits, ssd_hits: Share of prompt tokens found in that tier, from 0 to 1.
        recomputed: Share found on SSD, but computed: that is faster than reading.
        ttft: From arrival to the first token.
        queue: From arrival until the model is free.
        busy: Work that comes per second; from 1 on the queue grows without end, and
            times only tell how far it grew during the stream.
        most: Requests per second at which that begins.
    """

    cache: str
    dram_hits: float
    ssd_hits: float
    recomputed: float
    ttft: Times
    queue: Times
    busy: float
    most: float

    @property
    def hits(self) -> float:
        """Share of prompt tokens found in any tier, from 0 to 1."""
        return self.dram_hits + self.ssd_hits


@dataclass(frozen=True, slots=True)
class Prediction:
    """Forecasts side by side, and the sizes behind them.

    Attributes:
        plan: What was asked.
        mean_tokens: Mean length of a prompt, in tokens.
        chunk_bytes: KV of a chunk in DRAM.
        dram_chunks, ssd_chunks: Chunks that fit.
        distinct_chunks: Different chunks of documents that the stream asks for.
        forecasts: ``"none"``, ``"dram"`` if there is any, ``"dram + ssd"`` if there is
            an SSD tier, ``"no limit"``: DRAM without end.
    """

    plan: Plan
    mean_tokens: float
    chunk_bytes: int
    dram_chunks: int
    ssd_chunks: int
    distinct_chunks: int
    forecasts: tuple[Forecast, ...]

    def __getitem__(self, cache: str) -> Forecast:
        for forecast in self.forecasts:
            if forecast.cache == cache:
                return forecast
        raise KeyError(cache)

    @property
    def planned(self) -> Forecast:
        """That of the plan's own tiers."""
        return self.forecasts[-2]

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        found = asdict(self)
        for forecast, own in zip(found["forecasts"], self.forecasts, strict=True):
            forecast["hits"] = own.hits
        return found


def predict(plan: Plan) -> Prediction:
    """Play the stream on the plan's tiers, on parts of them, and without a limit.

    Takes seconds for millions of chunks. Equal plans give equal predictions.

    Raises:
        ConfigError: If the plan's recipe cannot be drawn, or a tier that is not empty
            cannot hold one chunk.
    """
    trace = plan.trace()
    tokens = trace.chunk_tokens
    dram = _fitting("dram_bytes", plan.dram_bytes, plan.kv.chunk_bytes(tokens))
    ssd = _fitting("ssd_bytes", plan.ssd_bytes, plan.kv.file_bytes(tokens))
    sizes: dict[str, tuple[float, float]] = {"none": (0, 0)}
    if dram:
        sizes["dram"] = (dram, 0)
    if ssd:
        sizes["dram + ssd"] = (dram, ssd)
    sizes["no limit"] = (UNLIMITED, 0)
    return Prediction(
        plan=plan,
        mean_tokens=trace.mean_tokens,
        chunk_bytes=plan.kv.chunk_bytes(tokens),
        dram_chunks=dram,
        ssd_chunks=ssd,
        distinct_chunks=len({key for r in trace.requests for key in r.chunks}),
        forecasts=tuple(
            _forecast(plan, trace, cache, *size) for cache, size in sizes.items()
        ),
    )


def _fitting(name: str, nbytes: int, chunk: int) -> int:
    if 0 < nbytes < chunk:
        raise ConfigError(
            f"{name} is {nbytes}, but one chunk takes {chunk} bytes; give more, fewer "
            "tokens per chunk, or 0 for no such tier"
        )
    return nbytes // chunk


def _forecast(
    plan: Plan, trace: Trace, cache: str, dram: float, ssd: float
) -> Forecast:
    found = find_all(trace, dram, ssd)[plan.warm_up :]
    requests = trace.requests[plan.warm_up :]
    bills = [_bill(plan, one, hit) for one, hit in zip(requests, found, strict=True)]
    load = Load([bill.job for bill in bills], plan.rates, plan.max_batch_size)
    replies = load.serve([request.arrival for request in requests], plan.rate)
    share = trace.chunk_tokens / sum(request.prompt_tokens for request in requests)
    return Forecast(
        cache=cache,
        dram_hits=share * sum(hit.dram for hit in found),
        ssd_hits=share * sum(hit.ssd for hit in found),
        recomputed=share * sum(bill.recomputed for bill in bills),
        ttft=Times.of([reply.ttft for reply in replies]),
        queue=Times.of([reply.queue for reply in replies]),
        busy=load.busy(plan.rate),
        most=load.most(),
    )


@dataclass(frozen=True, slots=True)
class _Bill:
    """What a request costs, and how many chunks are computed in spite of SSD."""

    job: Job
    recomputed: int


def _bill(plan: Plan, request: TraceRequest, found: Found) -> _Bill:
    """Read what is on SSD, or compute it: whichever takes less time by itself.

    The engine also splits a run between both (``tiers.load_plan``).
    """
    size, rates = plan.recipe.chunk_tokens, plan.rates
    here, stored = found.dram * size, (found.dram + found.ssd) * size
    compute = rates.compute_seconds(here, request.prompt_tokens - here)
    new = request.prompt_tokens - here
    read, recomputed = 0.0, found.ssd
    if found.ssd:
        behind = rates.compute_seconds(stored, request.prompt_tokens - stored)
        seconds = rates.read_seconds(found.ssd * plan.kv.file_bytes(size))
        if seconds + behind <= compute:
            read, recomputed = seconds, 0
            compute, new = behind, request.prompt_tokens - stored
    parts = -(-new // plan.max_prefill_tokens)
    return _Bill(
        Job(read, rates.overhead + compute, parts, request.output_tokens), recomputed
    )
