"""Predictions against results by hand, and against what must hold for all of them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pcr_core.errors import ConfigError
from pcr_core.simulator.capacity import Forecast, Plan, Prediction, predict
from pcr_core.simulator.contenders import contenders
from pcr_core.simulator.kv_size import KvSize
from pcr_core.simulator.lru_tiers import UNLIMITED, find_all
from pcr_core.simulator.optimum import infinite_reuse
from pcr_core.simulator.queueing import Job, Load
from pcr_core.simulator.rates import Rates
from pcr_core.simulator.replay import replay
from pcr_core.simulator.workloads import Recipe
from tests.simulator.words import CHUNK_TOKENS, trace_of, words

KV = KvSize(layers=2, kv_heads=1, head_dim=16, dtype="float32")
"""256 bytes a token, 4 KiB a chunk of 16."""
RECIPE = Recipe(requests=60, documents=20, document_tokens=60.0, chunk_tokens=16)
RATES = Rates(
    prefill=((0, 1000), (1000, 500)),
    overhead=0.01,
    ssd_read=4e6,
    ssd_latency=0.001,
    decode_step=0.02,
    decode_row=0.002,
)
CHUNK = KV.chunk_bytes(16)


def plan(**changes: Any) -> Plan:
    given = {"recipe": RECIPE, "rate": 1.0, "kv": KV, "rates": RATES}
    return Plan(**{**given, **changes})


def tiers(prediction: Prediction) -> list[str]:
    return [forecast.cache for forecast in prediction.forecasts]


# --- hits ---


def test_tiers_by_hand():
    """Two chunks of DRAM, three of SSD."""
    trace = trace_of(["A", "B", "AC", "B", "D", "A"])
    found = [tuple(one) for one in find_all(trace, 2, 3)]
    assert found == [(0, 0), (0, 0), (1, 0), (0, 1), (0, 0), (0, 1)]


def test_a_path_longer_than_dram_keeps_its_head_there():
    assert find_all(trace_of(["ABCDE", "ABCDE"]), 2, 4)[1] == (2, 2)


def test_what_is_unique_to_a_request_takes_room():
    """25 tokens of query fill two chunks beside A: three between two uses of it."""
    trace = trace_of(["A", "A"], tail=25)
    assert [find_all(trace, size, 0)[1].dram for size in (0, 1, 3)] == [0, 1, 1]
    between = trace_of(["A", "B", "A"], tail=25)
    assert [find_all(between, size, 0)[2].dram for size in (3, 4)] == [0, 1]


@given(words("ABC", 5, 40), st.integers(1, 12), st.integers(0, 1))
def test_dram_is_the_simulators_lru(drawn, capacity, tail):
    trace = trace_of(drawn, tail=tail)
    (lru,) = contenders(["lru"])
    found = sum(one.dram for one in find_all(trace, capacity, 0))
    assert CHUNK_TOKENS * found == replay(trace, lru, capacity, 10.0).hit_tokens


@given(words("ABC", 5, 40), st.integers(0, 12), st.integers(0, 12), st.integers(0, 30))
def test_more_memory_never_finds_less(drawn, small, more, ssd):
    trace = trace_of(drawn, tail=12)
    before, after = find_all(trace, small, ssd), find_all(trace, small + more, ssd)
    for one, other in zip(before, after, strict=True):
        assert one.dram <= other.dram
        assert sum(one) <= sum(other)


@given(words("ABC", 5, 40), st.integers(0, 12))
def test_memory_without_a_limit_finds_all_there_is(drawn, dram):
    trace = trace_of(drawn, tail=12)
    tokens = sum(request.prompt_tokens for request in trace.requests)
    for found in (find_all(trace, UNLIMITED, 0), find_all(trace, dram, UNLIMITED)):
        reused = CHUNK_TOKENS * sum(map(sum, found))
        assert reused / tokens == pytest.approx(infinite_reuse(trace))


# --- waiting ---


def load_of(jobs: list[Job], rates: Rates = RATES, rows: int = 8) -> Load:
    return Load(jobs, rates, rows)


def test_waiting_by_hand():
    """Without decode: 2 seconds each, the third reads for 5 from its arrival on."""
    jobs = [Job(0, 2, 1, 1), Job(0, 2, 1, 1), Job(5, 2, 1, 1)]
    replies = load_of(jobs).serve([0.0, 1.0, 2.0], 1.0)
    assert [reply.queue for reply in replies] == [0, 1, 5]
    assert [reply.ttft for reply in replies] == [2, 3, 7]


def test_reads_wait_for_each_other():
    jobs = [Job(3, 1, 1, 1), Job(3, 1, 1, 1)]
    assert [r.ttft for r in load_of(jobs).serve([0.0, 0.0], 1.0)] == [4, 7]


def test_the_breaking_point_without_decode():
    load = load_of([Job(0, 2, 1, 1), Job(0, 4, 1, 1)])
    assert load.most() == pytest.approx(1 / 3)
    assert load.busy(0.1) == pytest.approx(0.3)


def test_a_slow_disk_breaks_first():
    assert load_of([Job(4, 2, 1, 1)]).most() == pytest.approx(1 / 4)


def test_long_answers_are_limited_by_rows():
    """500 steps in 8 rows: 62.5 steps of each request's own, 34 ms each."""
    most = load_of([Job(0, 0.001, 1, 501)]).most()
    assert most == pytest.approx(1 / (0.001 + 62.5 * 0.034), rel=0.01)


jobs = st.lists(
    st.builds(
        Job,
        st.floats(0, 2),
        st.floats(0.001, 2),
        st.integers(1, 6),
        st.integers(1, 200),
    ),
    min_size=1,
    max_size=20,
)


@given(jobs, st.floats(0.01, 10), st.floats(1, 5), st.integers(1, 8), st.data())
def test_a_higher_rate_never_answers_sooner(drawn, rate, factor, rows, data):
    gaps = [data.draw(st.floats(0, 3)) for _ in drawn]
    arrivals = [sum(gaps[: index + 1]) for index in range(len(gaps))]
    load = load_of(drawn, rows=rows)
    slow, fast = load.serve(arrivals, rate), load.serve(arrivals, rate * factor)
    for one, other in zip(slow, fast, strict=True):
        assert other.ttft >= one.ttft - 1e-6
    assert load.busy(rate * factor) >= load.busy(rate)


@given(jobs, st.integers(1, 8))
def test_beyond_the_breaking_point_there_is_too_much_work(drawn, rows):
    load = load_of(drawn, rows=rows)
    most = load.most()
    assert load.busy(0.99 * most) < 1 <= load.busy(1.01 * most)


# --- all together ---


def test_a_prediction_by_hand():
    """One document, always found again: 48 of 60 tokens of documents."""
    recipe = replace(
        RECIPE, requests=2, spread=0.0, zipf=9.0, per_prompt=1, documents=3
    )
    rates = Rates(prefill=((0, 1000), (1000, 1000)), overhead=0.01)
    found = predict(plan(recipe=recipe, rate=1e-6, rates=rates, dram_bytes=10 * CHUNK))
    assert tiers(found) == ["none", "dram", "no limit"]
    assert found["none"].ttft.mean == pytest.approx(0.09)
    assert found["dram"].dram_hits == pytest.approx(48 / 160)
    assert found.planned.ttft.mean == pytest.approx((0.09 + 0.09 - 0.048) / 2)
    assert found.planned.most == pytest.approx(1 / found.planned.ttft.mean)
    assert (found.mean_tokens, found.dram_chunks, found.distinct_chunks) == (80, 10, 3)


def test_reading_is_left_where_computing_is_faster():
    slow = replace(RATES, ssd_read=1000.0)
    found = predict(plan(rates=slow, ssd_bytes=2**30)).planned
    assert found.recomputed == pytest.approx(found.ssd_hits)
    assert found.ttft == predict(plan(rates=slow)).planned.ttft


@settings(max_examples=12)
@given(st.integers(0, 200), st.integers(0, 200), st.integers(0, 300), st.floats(0.1, 9))
def test_more_memory_never_predicts_fewer_hits(small, more, ssd, rate):
    disk = ssd * KV.file_bytes(16)
    before, after = (
        predict(plan(dram_bytes=n * CHUNK, ssd_bytes=disk, rate=rate)).planned
        for n in (small, small + more)
    )
    assert after.dram_hits >= before.dram_hits - 1e-12
    assert after.hits >= before.hits - 1e-12


@settings(max_examples=12)
@given(st.integers(0, 100), st.floats(0.1, 9), st.floats(1, 4), st.integers(0, 40))
def test_a_higher_rate_never_predicts_a_lower_ttft(dram, rate, factor, warm_up):
    slow, fast = (
        predict(plan(dram_bytes=dram * CHUNK, rate=r, warm_up=warm_up))
        for r in (rate, rate * factor)
    )
    for one, other in zip(slow.forecasts, fast.forecasts, strict=True):
        for name in ("mean", "p50", "p95"):
            assert getattr(other.ttft, name) >= getattr(one.ttft, name) - 1e-6
        assert other.hits == one.hits


@settings(max_examples=12)
@given(st.integers(0, 300), st.integers(1, 4), st.floats(0.0, 2.0), st.integers(0, 9))
def test_without_a_limit_the_reuse_is_that_of_the_stream(dram, documents, zipf, seed):
    recipe = replace(RECIPE, per_prompt=documents, zipf=zipf)
    asked = plan(recipe=recipe, dram_bytes=dram * CHUNK, ssd_bytes=2**30, seed=seed)
    found, limit = predict(asked), infinite_reuse(asked.trace())
    assert found["no limit"].hits == pytest.approx(limit)
    assert found["dram + ssd"].hits == pytest.approx(limit)
    assert found["no limit"].ttft.mean <= found["none"].ttft.mean


def test_a_warm_cache_hits_more():
    cold, warm = (
        predict(plan(dram_bytes=2**20, warm_up=n))["no limit"] for n in (0, 500)
    )
    assert warm.hits > cold.hits + 0.1


def test_plain_values_for_json():
    found = predict(plan(dram_bytes=2**16, ssd_bytes=2**20))
    figures = found.as_dict()
    assert [one["hits"] for one in figures["forecasts"]] == [
        one.hits for one in found.forecasts
    ]
    assert figures["plan"]["kv"]["layers"] == 2
    with pytest.raises(KeyError):
        found["gpu"]
    assert isinstance(found.planned, Forecast)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rate": 0.0}, "rate is 0.0; it must be requests per second"),
        ({"rate": math.nan}, "rate is nan"),
        ({"rate": math.inf}, "rate is inf"),
        ({"dram_bytes": -1}, "dram_bytes is -1; it must be at least 0"),
        ({"dram_bytes": 100}, "dram_bytes is 100, but one chunk takes 4096 bytes"),
        ({"ssd_bytes": 100}, "ssd_bytes is 100, but one chunk takes"),
        ({"warm_up": -1}, "warm_up is -1"),
        ({"max_batch_size": 0}, "max_batch_size is 0; it must be at least 1"),
        ({"rates": Rates(((0, 9),)), "ssd_bytes": 2**20}, "read rate is not known"),
        ({"recipe": replace(RECIPE, requests=0)}, "requests is 0"),
        ({"recipe": replace(RECIPE, documents=2)}, "at least 3 documents"),
        ({"recipe": replace(RECIPE, per_prompt=21)}, "cannot have 21 of 20 documents"),
        ({"recipe": replace(RECIPE, per_prompt=0)}, "cannot have 0 of 20 documents"),
        ({"recipe": replace(RECIPE, zipf=-1.0)}, "zipf is -1.0"),
        ({"recipe": replace(RECIPE, zipf=math.nan)}, "zipf is nan"),
        ({"recipe": replace(RECIPE, document_tokens=0.0)}, "document_tokens is 0.0"),
        ({"recipe": replace(RECIPE, query_tokens=0)}, "query_tokens is 0"),
        ({"recipe": replace(RECIPE, chunk_tokens=0)}, "chunk_tokens is 0"),
    ],
)
def test_what_cannot_be_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        predict(plan(**changes))
