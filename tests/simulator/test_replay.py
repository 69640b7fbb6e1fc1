"""Replays against results by hand and against simple models."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pcr_core.errors import ConfigError
from pcr_core.index.node import Node
from pcr_core.index.policies import Pgdsf
from pcr_core.simulator.contenders import NAMES, contenders
from pcr_core.simulator.optimum import infinite_reuse, usable_chunks
from pcr_core.simulator.replay import Contender, Outcome, replay, service_rate
from pcr_core.trace import Trace, TraceWriter, read_trace
from tests.simulator.words import CHUNK_TOKENS, trace_of, words


def hits(outcome: Outcome) -> int:
    """In chunks."""
    return outcome.hit_tokens // CHUNK_TOKENS


def contender(name: str, window: int | None = 6) -> Contender:
    (found,) = contenders([name], [window])
    return found


def run(name: str, trace: Trace, capacity: int, **options: int) -> Outcome:
    return replay(trace, contender(name, **options), capacity, rate=10.0)


# --- by hand ---


def test_lru_by_hand():
    outcome = run("lru", trace_of(["A", "B", "A", "C", "B", "C"]), 2)
    assert hits(outcome) == 2  # the second A; C, because B took the place of A
    assert outcome.evictions == 2
    assert outcome.prompt_tokens == 6 * 11
    assert outcome.hit_rate == 20 / 66


def test_leaves_go_before_their_parents():
    outcome = run("lru", trace_of(["ABC", "D", "AB"]), 3)
    assert (hits(outcome), outcome.evictions) == (2, 1)


def test_pgdsf_micro_trace():
    """RAGCache's policy, three slots, C three times as dear as the others."""
    victims, clocks = [], []

    class Priced(Pgdsf):
        def used(self, node: Node) -> None:
            node.cost_sum = node.misses * (3.0 if node.key == b"C" else 1.0)
            super().used(node)

        def evicted(self, node: Node) -> None:
            super().evicted(node)
            victims.append(node.key.decode())
            clocks.append(self.clock)

    policy = Contender("priced", lambda trace, capacity: Priced())
    trace = trace_of([*"AABCDEEBDEC"])
    outcome = replay(trace, policy, 3, rate=10.0)
    assert victims == [*"BADCB"]
    assert clocks == [1, 2, 2, 3, 3]
    assert hits(outcome) == 3


def test_memory_makes_pgdsf_keep_what_comes_back():
    """A comes back with two uses behind it, and outlives E and F."""
    trace = trace_of([*"AABCDAEFA"])
    assert hits(run("pgdsf", trace, 2)) == 1
    assert hits(run("pgdsf+memory", trace, 2)) == 2


def test_frequency_alone_keeps_what_came_often():
    trace = trace_of([*"AABCA"])
    assert hits(run("lru", trace, 2)) == 1
    assert hits(run("lfu", trace, 2)) == 2


def test_lfu_with_memory_counts_what_was_evicted():
    """Behind the second A, both have two uses, or it has one and goes first."""
    trace = trace_of([*"BBACADA"])
    assert hits(run("lfu", trace, 2)) == 1
    assert hits(run("lfu+memory", trace, 2)) == 2


def test_prices_set_pgdsf_apart_from_gdsf():
    """B is computed behind A, where a token costs eleven times as much."""

    def price(cached: int, computed: int) -> float:
        seen.append((cached, computed))
        return 1.0 + cached

    seen: list[tuple[int, int]] = []
    trace = trace_of(["A", "AB", "C", "D", "AB"])
    prefix_aware, plain = contenders(["pgdsf", "gdsf"], price=price)
    assert hits(replay(trace, prefix_aware, 3, rate=10.0)) == 1 + 2
    assert seen == [(0, 11), (10, 11), (0, 11), (0, 11), (20, 1)]
    assert hits(replay(trace, plain, 3, rate=10.0)) == 1 + 1
    assert hits(run("pgdsf", trace, 3)) == 1 + 1  # all tokens cost the same


def test_the_window_protects_what_waiting_requests_need():
    trace = trace_of([*"ABCDA"])  # all of them wait
    assert hits(run("lru", trace, 2)) == 0
    assert hits(run("lookahead-lru", trace, 2, window=2)) == 1
    assert hits(run("lookahead-lru", trace, 2, window=1)) == 0


def test_who_has_not_come_yet_is_not_in_the_window():
    trace = trace_of([*"ABCDA"], arrivals=[0.0, 100.0, 200.0, 300.0, 400.0])
    assert hits(run("lookahead-lru", trace, 2, window=6)) == 0


def test_a_window_of_auto_fits_into_the_tier():
    outcome = run("lookahead-lru", trace_of(["AB", "CD", "EF"]), 5, window=None)
    assert outcome.window == 2


def test_a_path_longer_than_the_tier_keeps_its_head():
    outcome = run("lru", trace_of(["ABCDE", "ABCDE"]), 3)
    assert (hits(outcome), outcome.bypassed, outcome.evictions) == (3, 4, 0)


def test_the_last_token_is_always_computed():
    trace = trace_of(["AB", "AB"], tail=0)
    assert [usable_chunks(r, CHUNK_TOKENS) for r in trace.requests] == [1, 1]
    assert hits(run("lru", trace, 9)) == 1
    assert infinite_reuse(trace) == 10 / 40


# --- the queue ---


def test_waiting_by_hand():
    """21 tokens each at 10.5 a second: 2 seconds, or 1.05 with the first chunk hit."""
    trace = trace_of(["AB", "CD", "AC"], arrivals=[5.0, 6.0, 7.0])
    outcome = replay(trace, contender("lru"), 9, rate=10.5)
    assert outcome.wait == pytest.approx((0 + 1 + 2) / 3)
    assert outcome.queue == pytest.approx(3 / (2 + 2 + 11 / 10.5))
    assert outcome.requests == 3


def test_the_rate_follows_from_the_load():
    trace = trace_of(["A", "AB", "ABC"], arrivals=[1.0, 2.0, 5.0])
    assert service_rate(trace, 0.5) == pytest.approx(21 / 2 / 0.5)
    assert service_rate(trace_of(["A", "AB", "ABC"]), 2.0) == pytest.approx(21 / 2)


@given(words("AB", 3, 20), st.floats(0.1, 3.0))
def test_a_server_without_hits_is_as_busy_as_asked(drawn, load):
    trace = trace_of(drawn, arrivals=[float(i) for i in range(len(drawn))])
    rate = service_rate(trace, load)
    busy = sum(request.prompt_tokens for request in trace.requests) / rate
    assert busy == pytest.approx(load * len(drawn))


# --- against simple models ---


def naive_lru(trace: Trace, capacity: int) -> tuple[int, int, int]:
    """Hit chunks, evictions and bypassed chunks of plain LRU over paths."""
    cache: OrderedDict[bytes, None] = OrderedDict()
    found = evicted = bypassed = 0
    for request in trace.requests:
        usable = usable_chunks(request, trace.chunk_tokens)
        found += sum(key in cache for key in request.chunks[:usable])
        for key in request.chunks:
            if key in cache:
                continue
            if len(cache) == capacity:
                victim = next((k for k in cache if k not in request.chunks), None)
                if victim is None:
                    bypassed += 1
                    continue
                del cache[victim]
                evicted += 1
            cache[key] = None
        for key in reversed(request.chunks):
            if key in cache:
                cache.move_to_end(key)
    return found, evicted, bypassed


@given(words("ABC", 5, 40), st.integers(1, 12), st.integers(0, 1))
def test_lru_is_plain_lru(drawn, capacity, tail):
    trace = trace_of(drawn, tail=tail)
    outcome = run("lru", trace, capacity)
    counted = (hits(outcome), outcome.evictions, outcome.bypassed)
    assert counted == naive_lru(trace, capacity)


@settings(max_examples=30)
@given(words("ABC", 4, 30), st.integers(1, 10))
def test_look_ahead_without_a_queue_is_lru(drawn, capacity):
    trace = trace_of(drawn, arrivals=[1000.0 * i for i in range(len(drawn))])
    plain, ahead = (run(n, trace, capacity) for n in ("lru", "lookahead-lru"))
    assert hits(plain) == hits(ahead)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25)
@given(drawn=words("ABC", 4, 30), capacity=st.integers(1, 10))
def test_nobody_beats_the_optimum_nor_loses_count(name, drawn, capacity):
    trace = trace_of(drawn)
    outcome = run(name, trace, capacity)
    assert hits(outcome) <= hits(run("optimum", trace, capacity))
    misses = sum(len(word) for word in drawn) - hits(outcome)
    kept = misses - outcome.bypassed - outcome.evictions
    assert 0 <= kept <= capacity


@pytest.mark.parametrize("name", NAMES)
def test_with_room_for_all_everybody_reaches_the_limit(name):
    trace = trace_of(["ABC", "AD", "ABC", "ADE", "F", "ABD"])
    outcome = run(name, trace, 20)
    assert outcome.hit_rate == infinite_reuse(trace)
    assert outcome.evictions == outcome.bypassed == 0


def test_a_recorded_trace_replays_like_the_traffic(tmp_path):
    drawn = ["ABC", "AD", "BC", "ABC", "ADE", "F", "ABD", "BCD"] * 4
    original = trace_of(drawn, arrivals=[0.25 * i for i in range(len(drawn))])
    path = tmp_path / "trace.jsonl"
    writer = TraceWriter(
        path, chunk_tokens=CHUNK_TOKENS, chunk_bytes=0, clock=lambda: 50.0
    )
    for r in reversed(original.requests):  # as they may finish
        writer.record(50.0 + r.arrival, r.prompt_tokens, r.output_tokens, r.chunks)
    writer.close()
    recorded = read_trace(path)
    for one in contenders(NAMES, [1, 4, None]):
        for capacity in (3, 5, 8):
            rate = service_rate(original, 1.1)
            assert replay(recorded, one, capacity, rate) == replay(
                original, one, capacity, rate
            )


# --- names ---


def test_each_window_is_a_contender():
    found = contenders(["lru", "lookahead-lru", "adaptive"], [4, None])
    assert [one.label for one in found] == [
        "lru",
        "lookahead-lru W=4",
        "lookahead-lru W=auto",
        "adaptive W=auto",
    ]


@pytest.mark.parametrize(
    ("names", "windows", "message"),
    [
        (["fifo"], [4], "no policy 'fifo'; there are: lru, lookahead-lru"),
        (["lru"], [], "at least 1 request, or 'auto'"),
        (["lru"], [0], "at least 1 request, or 'auto'"),
    ],
)
def test_wrong_names_say_what_there_is(names, windows, message):
    with pytest.raises(ConfigError, match=message):
        contenders(names, windows)
