"""Every policy on a real engine: the same answers, sound tiers, the right traffic."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest

from pcr_core import CancelledError, Engine
from tests.engine.kit import (
    GREEDY,
    Reads,
    answer,
    ask,
    busy,
    cache,
    fresh,
    gated_reads,
    slots_for,
    states,
    uncached,
    until,
)

EVICTIONS = ["lookahead-lru", "lru", "pgdsf", "adaptive"]
WRITES = ["write_through", "second_touch", "on_evict"]
PREFETCHES = ["best_effort", "wait_complete", "timeout", "off"]

reads = pytest.fixture(gated_reads)
Answers = dict[tuple[int, ...], Any]


def _family(dice: random.Random) -> list[list[int]]:
    """Prompts that share beginnings of every length, also within a chunk."""
    prompts: list[list[int]] = []
    for _ in range(14):
        parent = dice.choice(prompts) if prompts and dice.random() < 0.7 else []
        shared = parent[: dice.randrange(len(parent) + 1)]
        new = dice.choices(range(256), k=dice.randint(1, 120))
        prompts.append([*shared, *new][:230])
    return prompts


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return _family(random.Random("policies"))


@pytest.fixture(scope="module")
def expected(
    tmp_path_factory: Any,
    probes: Any,
    make_tiny_model: Any,
    tiny_tokenizer: Any,
    prompts: list[list[int]],
) -> Answers:
    """What a run without any cache answers."""
    from tests.engine.conftest import _maker

    folder = tmp_path_factory.mktemp("uncached")
    with _maker(folder, probes, make_tiny_model, tiny_tokenizer) as make:
        engine = uncached(make(ssd_bytes=0))
        return {tuple(prompt): answer(ask(engine, prompt)) for prompt in prompts}


def _play(
    engine: Engine, prompts: list[list[int]], expected: Answers, dice: random.Random
) -> None:
    """Bursts of requests, hints and cancellations."""
    for _ in range(8):
        burst = dice.choices(prompts, k=dice.randint(1, 5))
        if dice.random() < 0.3:
            engine.prefetch(dice.choice(prompts))
        waiting = [engine.submit(prompt, GREEDY) for prompt in burst]
        gone = dice.choice(waiting) if dice.random() < 0.2 else None
        if gone is not None:
            gone.cancel()
        for prompt, completion in zip(burst, waiting, strict=True):
            try:
                assert answer(completion.result(60)) == expected[tuple(prompt)]
            except CancelledError:
                assert completion is gone


@pytest.mark.parametrize(
    ("number", "eviction", "write_policy"),
    [(n, *pair) for n, pair in enumerate(itertools.product(EVICTIONS, WRITES))],
)
def test_policies_change_no_answer(
    make_engine: Any,
    prompts: Any,
    expected: Answers,
    number: int,
    eviction: str,
    write_policy: str,
) -> None:
    dice = random.Random(f"{eviction} {write_policy}")
    settings = {
        "eviction": eviction,
        "write_policy": write_policy,
        "prefetch": PREFETCHES[number % 4],
        "prefetch_timeout": 0.01,
        "lookahead_window": ("auto", 0, 2)[number % 3],
        "dram_bytes": dice.choice(["80KiB", "200KiB", "400KiB"]),
        "ssd_bytes": dice.choice(["90KiB", "400KiB", "4MiB"]),
    }
    for _ in range(2):
        with make_engine(**settings) as engine:
            _play(engine, prompts, expected, dice)
            report = engine.check()
            assert report.ok, report
            stats = engine.stats().cache
            assert stats.dram_bytes <= stats.dram_budget
            assert report.ssd_bytes <= stats.ssd_budget
            assert stats.corrupt == stats.missing == stats.write_errors == 0


# --- when chunks are written ---


def test_write_through_writes_at_once(make_engine: Any) -> None:
    engine, prompt = make_engine(), fresh(100)
    ask(engine, prompt)
    until(lambda: engine.stats().cache.written == 3, "writing")
    ask(engine, prompt)
    assert engine.flush(60)
    assert engine.stats().cache.written == 3, "nothing durable is written again"


def test_second_touch_writes_what_comes_back(make_engine: Any) -> None:
    engine = make_engine(write_policy="second_touch")
    once, twice = fresh(100), fresh(100)
    ask(engine, once)
    ask(engine, twice)
    assert engine._loop.tiers._io.flush(60)
    assert engine.stats().cache.written == 0
    ask(engine, twice)
    until(lambda: engine.stats().cache.written == 3, "writing")
    ask(engine, twice)
    assert engine._loop.tiers._io.flush(60)
    assert engine.stats().cache.written == 3


def test_second_touch_remembers_what_was_evicted_in_between(make_engine: Any) -> None:
    size = slots_for(make_engine(), 8)
    engine = make_engine(write_policy="second_touch", dram_bytes=size)
    prompt = fresh(100)
    for _ in range(2):
        ask(engine, prompt)
        assert "dram" in states(engine, prompt)
        ask(engine, fresh(8 * 32))
    until(lambda: engine.stats().cache.written == 3, "writing")


@pytest.mark.parametrize("write_policy", WRITES)
def test_warm_is_durable_under_every_policy(
    make_engine: Any, write_policy: str
) -> None:
    engine = make_engine(write_policy=write_policy)
    prompts = [fresh(70), fresh(100)]
    engine.warm(prompts)
    assert engine.stats().cache.ssd_chunks == 2 + 3
    engine.close()
    again = make_engine(write_policy=write_policy)
    assert ask(again, prompts[0]).usage.cached_by_tier == {"ssd": 64}


def test_on_evict_writes_what_leaves_and_the_rest_at_the_end(make_engine: Any) -> None:
    size = slots_for(make_engine(), 30)
    settings = {"write_policy": "on_evict", "dram_bytes": size}
    engine = make_engine(**settings)
    prompts = [fresh(100) for _ in range(15)]
    results = [answer(ask(engine, prompt)) for prompt in prompts[:3]]
    assert engine._loop.tiers._io.flush(60)
    assert engine.stats().cache.written == 0, "there is room yet"
    results += [answer(ask(engine, prompt)) for prompt in prompts[3:]]
    until(lambda: engine.stats().cache.written > 0, "writing")
    assert engine.stats().cache.written < 3 * 15
    engine.close()
    again = make_engine(**settings)
    stored = sum(states(again, prompt).count("ssd") for prompt in prompts)
    assert stored == 3 * 15 - cache(engine).write_drops - cache(engine).bypassed_inserts
    assert stored > 30, "more than DRAM holds"
    assert [answer(ask(again, prompt)) for prompt in prompts] == results


def test_without_an_ssd_tier_nothing_is_written(make_engine: Any) -> None:
    for write_policy in WRITES:
        with make_engine(write_policy=write_policy, ssd_bytes=0) as engine:
            prompt = fresh(100)
            before = answer(ask(engine, prompt))
            assert answer(ask(engine, prompt)) == before
            assert engine.flush(60)
            stats = engine.stats().cache
            assert stats.written == stats.ssd_chunks == stats.write_errors == 0
            assert engine.check().ok


# --- load or recompute ---


def test_slow_reads_are_computed_instead(
    make_engine: Any, reads: Reads, prompts: Any, expected: Answers
) -> None:
    with make_engine() as first:
        for prompt in prompts:
            ask(first, prompt)
    engine = make_engine(prefetch="off")
    assert engine.stats().decisions.crossover_tokens is None
    reads.seconds = 0.2
    longest = sorted(prompts, key=len)[-8:]
    for prompt in longest:
        assert answer(ask(engine, prompt)) == expected[tuple(prompt)]
    stats = engine.stats()
    assert stats.cache.recomputed > 0
    assert stats.decisions.crossover_tokens == math.inf
    assert stats.decisions.prefill_rate > 0
    nbytes = engine._loop.tiers._format.file_nbytes
    assert 0 < stats.decisions.read_bandwidth < 4 * nbytes / 0.2
    assert "computing is always faster" in str(stats)
    begun = reads.begun
    ask(engine, longest[0])
    assert reads.begun == begun, "what was computed is in DRAM now"
    assert engine.check().ok


def test_a_queue_on_a_slow_disk_computes_what_is_late(
    make_engine: Any, reads: Reads, prompts: Any, expected: Answers
) -> None:
    with make_engine() as first:
        for prompt in prompts:
            ask(first, prompt)
    engine = make_engine()
    reads.seconds = 0.1
    queue = sorted(prompts, key=len)[-6:]
    with busy(engine, queue) as waiting:
        pass
    for prompt, completion in zip(queue, waiting, strict=True):
        assert answer(completion.result(60)) == expected[tuple(prompt)]
    stats = engine.stats().cache
    assert stats.read > 0
    assert stats.recomputed > 0
    assert engine.check().ok


def test_slow_computing_is_read_instead(
    make_engine: Any, prompts: Any, expected: Answers, monkeypatch: Any
) -> None:
    with make_engine() as first:
        for prompt in prompts:
            ask(first, prompt)
    engine = make_engine(prefetch="off")
    observe = engine._loop.tiers.prefill_times.observe
    monkeypatch.setattr(
        engine._loop.tiers.prefill_times,
        "observe",
        lambda cached, new, seconds: observe(cached, new, 0.05 * new),
    )
    for prompt in sorted(prompts, key=len)[-6:]:
        assert answer(ask(engine, prompt)) == expected[tuple(prompt)]
    stats = engine.stats()
    assert stats.decisions.crossover_tokens == 0.0
    assert stats.cache.recomputed == 0
    assert "loading is always faster" in str(stats)
    assert stats.decisions.prefill_rate == pytest.approx(20, rel=0.2)


# --- what is said of it ---


def test_decisions_name_the_policy(make_engine: Any) -> None:
    for eviction in EVICTIONS:
        with make_engine(eviction=eviction) as engine:
            ask(engine, fresh(100))
            decisions = engine.stats().decisions
            adaptive = eviction == "adaptive"
            assert decisions.eviction == ("lookahead-lru" if adaptive else eviction)
            assert len(decisions.hit_rates) == (3 if adaptive else 0)
            assert all(0 <= rate <= 1 for rate in decisions.hit_rates.values())
