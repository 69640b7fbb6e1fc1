"""What waits is fetched meanwhile: the queue after a restart, and hints."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from pcr_core import (
    CancelledError,
    Engine,
    EngineClosedError,
    RequestError,
    SamplingParams,
)
from tests.ctrl_c import press_ctrl_c
from tests.engine.kit import (
    GREEDY,
    Reads,
    answer,
    ask,
    busy,
    cache,
    fresh,
    gated_reads,
    is_reading,
    slots_for,
    states,
    uncached,
    until,
)

LONG = SamplingParams(max_tokens=1900, min_tokens=1900)
CHUNKS = 5
"""Full chunks per prompt; four prompts fit into half of DRAM, which bounds reads."""

reads = pytest.fixture(gated_reads)


@pytest.fixture
def prompts() -> list[list[int]]:
    """Two pairs that share two chunks each."""
    heads = [fresh(64), fresh(64)]
    return [[*heads[number % 2], *fresh(100)] for number in range(4)]


@pytest.fixture
def expected(make_engine: Any, prompts: list[list[int]]) -> list[Any]:
    """Answers without a cache; the chunks are on SSD afterwards."""
    with uncached(make_engine()) as engine:
        return [answer(ask(engine, prompt)) for prompt in prompts]


def serve(engine: Engine, prompts: list[list[int]]) -> list[Any]:
    """Let a queue wait until all that is read ahead has come; return the results."""
    with busy(engine, prompts) as waiting:
        until(lambda: not is_reading(engine), "reading ahead")
    return [completion.result(60) for completion in waiting]


# --- the queue ---


@pytest.mark.parametrize("eviction", ["lookahead-lru", "lru", "pgdsf", "adaptive"])
def test_what_waits_is_read_meanwhile(
    make_engine: Any, prompts: Any, expected: Any, eviction: str
) -> None:
    engine = make_engine(eviction=eviction)
    results = serve(engine, prompts)
    assert [answer(result) for result in results] == expected
    for number, result in enumerate(results):
        tiers = result.usage.cached_by_tier
        assert sum(tiers.values()) == CHUNKS * 32
        # A shared chunk was on SSD for the first that used it.
        assert tiers.get("dram", 0) == (64 if number >= 2 else 0)
    stats = engine.stats().cache
    assert stats.prefetch_issued == stats.prefetch_used == 4 * 3 + 2 * 2
    assert stats.read == stats.prefetch_issued, "nothing was left to be read on demand"
    assert stats.prefetch_late == stats.prefetch_wasted == stats.prefetch_cancelled == 0
    assert engine.check().ok


def test_reads_that_come_late_are_joined(
    make_engine: Any, reads: Reads, prompts: Any, expected: Any
) -> None:
    engine = make_engine(prefetch="wait_complete")
    reads.close()
    with busy(engine, prompts[:1]) as waiting:
        until(lambda: reads.begun > 0, "a read")
    until(lambda: cache(engine).prefetch_late > 0, "its turn")
    assert not waiting[0].done
    reads.open()
    result = waiting[0].result(60)
    assert answer(result) == expected[0]
    assert result.usage.cached_by_tier == {"ssd": CHUNKS * 32}
    assert result.timing.load_wait > 0
    stats = engine.stats().cache
    assert stats.prefetch_late == CHUNKS
    assert stats.read == stats.prefetch_issued == CHUNKS, "nothing was read twice"
    assert engine.check().ok


@pytest.mark.parametrize(
    "settings", [{"prefetch": "off"}, {"lookahead_window": 0}], ids=["off", "window 0"]
)
def test_nothing_is_read_ahead(
    make_engine: Any, reads: Reads, prompts: Any, expected: Any, settings: Any
) -> None:
    engine = make_engine(**settings)
    with busy(engine, prompts) as waiting:
        pass
    results = [completion.result(60) for completion in waiting]
    assert [answer(result) for result in results] == expected
    stats = engine.stats().cache
    assert stats.prefetch_issued == 0
    assert stats.ssd_hit_tokens > 0, "it is still read when its turn comes"


def test_without_reading_ahead_what_waits_is_still_protected(make_engine: Any) -> None:
    wanted, old, other = fresh(70), fresh(70), fresh(4 * 32)
    budgets = {"dram_bytes": slots_for(make_engine(), 6), "ssd_bytes": 0}
    for window, found in ((8, {"dram": 64}), (0, {})):
        engine = make_engine(prefetch="off", lookahead_window=window, **budgets)
        ask(engine, wanted)
        ask(engine, old)  # used later than the other
        with busy(engine, [other, wanted]) as waiting:
            pass
        assert waiting[1].result(60).usage.cached_by_tier == found


@pytest.mark.parametrize(("window", "looked_at"), [(1, 1), (2, 2), (1024, 4)])
def test_only_the_window_is_looked_at(
    make_engine: Any,
    reads: Reads,
    expected: Any,
    prompts: Any,
    window: int,
    looked_at: int,
) -> None:
    engine = make_engine(lookahead_window=window)
    with busy(engine, prompts):
        until(lambda: not is_reading(engine), "reading ahead")
        chunks = {tuple(p[: n * 32]) for p in prompts[:looked_at] for n in range(1, 6)}
        assert reads.begun == len(chunks)
    assert engine.stats().decisions.lookahead_window == window


def test_the_window_follows_the_budget(make_engine: Any) -> None:
    engine = make_engine()
    capacity = engine._loop.tiers._pool.capacity
    before = engine.stats().decisions.lookahead_window
    assert before == 64, "nothing is known about requests yet"
    for _ in range(30):
        ask(engine, fresh(32 * 10 + 1))
    assert engine.stats().decisions.lookahead_window == capacity // 10


def test_a_request_that_goes_takes_its_reads_along(
    make_engine: Any, reads: Reads, prompts: Any, expected: Any
) -> None:
    engine = make_engine()
    reads.close()
    with busy(engine, prompts) as waiting:
        until(lambda: reads.begun == 2, "two readers")
        for completion in waiting:
            completion.cancel()
    for completion in waiting:
        with pytest.raises(CancelledError):
            completion.result(60)
    engine.stats()
    stats = cache(engine)
    assert stats.prefetch_cancelled == stats.prefetch_issued - 2
    reads.open()
    until(lambda: engine.stats().cache.read == 2, "what had begun")
    assert engine.check().ok
    assert [answer(ask(engine, prompt)) for prompt in prompts] == expected


# --- when its turn comes first ---


def test_wait_complete_computes_nothing_that_can_be_read(
    make_engine: Any, reads: Reads, prompts: Any, expected: Any
) -> None:
    engine = make_engine(prefetch="wait_complete")
    for _ in range(3):
        ask(engine, fresh(200))  # computing is fast, as far as is known
    reads.close()
    with busy(engine, prompts) as waiting:
        until(lambda: reads.begun == 2, "two readers")
    until(lambda: cache(engine).prefetch_late > 0, "its turn")
    reads.open()
    results = [completion.result(60) for completion in waiting]
    assert [answer(result) for result in results] == expected
    assert all(result.usage.cached_tokens == CHUNKS * 32 for result in results)
    assert engine.stats().cache.recomputed == 0


def test_timeout_computes_what_has_not_come(
    make_engine: Any, reads: Reads, prompts: Any, expected: Any
) -> None:
    engine = make_engine(prefetch="timeout", prefetch_timeout=0.05)
    reads.close()
    with busy(engine, prompts) as waiting:
        until(lambda: reads.begun == 2, "two readers")
    results = [completion.result(60) for completion in waiting]
    assert [answer(result) for result in results] == expected
    assert results[0].usage.cached_tokens == 0
    assert results[0].timing.load_wait >= 0.05
    stats = engine.stats().cache
    assert stats.read_timeouts > 0
    reads.open()
    until(lambda: engine.stats().cache.read == 2, "what had begun")
    assert engine.flush(60)
    assert engine.check().ok
    assert [answer(ask(engine, prompt)) for prompt in prompts] == expected


# --- hints ---


def test_a_hint_brings_chunks_to_dram(
    make_engine: Any, reads: Reads, prompts: Any, expected: Any
) -> None:
    engine = make_engine()
    assert set(states(engine, prompts[0])) == {"ssd"}
    engine.prefetch(prompts[0])
    until(lambda: engine.stats().cache.dram_chunks == CHUNKS, "prefetching")
    assert set(states(engine, prompts[0])) == {"dram"}
    begun = reads.begun
    result = ask(engine, prompts[0])
    assert answer(result) == expected[0]
    assert result.usage.cached_by_tier == {"ssd": CHUNKS * 32}, "it came from there"
    assert reads.begun == begun
    stats = engine.stats().cache
    assert (stats.prefetch_issued, stats.prefetch_used) == (CHUNKS, CHUNKS)


def test_a_hint_that_only_begins_like_what_is_stored(
    make_engine: Any, prompts: Any, expected: Any
) -> None:
    engine = make_engine()
    engine.prefetch([*prompts[1][:70], *fresh(200)])
    until(lambda: engine.stats().cache.dram_chunks == 2, "prefetching")
    assert ask(engine, prompts[3]).usage.cached_tokens == CHUNKS * 32
    engine.prefetch(fresh(200))  # nothing of it is known
    engine.prefetch("short")
    engine.prefetch([{"role": "user", "content": "hello"}])
    assert engine.stats().failed == 0


def test_a_hint_for_what_another_engine_stores(make_engine: Any) -> None:
    engine, other = make_engine(), make_engine()
    prompt = fresh(170)
    expected = answer(ask(other, prompt))
    assert other.flush(60)
    engine.prefetch(prompt)
    until(lambda: engine.stats().cache.dram_chunks == CHUNKS, "prefetching")
    assert answer(ask(engine, prompt)) == expected


def test_hints_protect_what_they_brought(
    make_engine: Any, prompts: Any, expected: Any
) -> None:
    engine = make_engine()
    engine = make_engine(dram_bytes=slots_for(engine, 12), ssd_bytes="40MiB")
    engine.prefetch(prompts[0])
    until(lambda: engine.stats().cache.dram_chunks == CHUNKS, "prefetching")
    for _ in range(5):
        ask(engine, fresh(7 * 32))
        assert engine.flush(60)  # what is being written cannot make room
    assert engine.stats().cache.dram_evictions > 0
    result = ask(engine, prompts[0])
    assert answer(result) == expected[0]
    stats = engine.stats().cache
    assert stats.prefetch_used == stats.prefetch_issued == CHUNKS
    for _ in range(5):
        ask(engine, fresh(7 * 32))
    assert "dram" not in states(engine, prompts[0]), "only until it was used"


@pytest.mark.parametrize(
    "prompt", [None, 7, b"bytes", [], [1, -1], [1, 10**6], [{"content": "x"}]]
)
def test_garbage_is_refused(engine: Engine, prompt: Any) -> None:
    before = engine.stats().cache
    with pytest.raises(RequestError):
        engine.prefetch(prompt)
    assert engine.stats().cache == before


def test_a_hint_to_a_closed_engine(make_engine: Any) -> None:
    engine = make_engine()
    engine.close()
    with pytest.raises(EngineClosedError):
        engine.prefetch("hello")


# --- the end ---


# In the first forward, for the first layers of all chunks; or before it, for the first
# chunk, of which each reader has begun one.
WAITS = pytest.mark.parametrize(
    ("prefetch", "begun"),
    [("best_effort", CHUNKS), ("wait_complete", CHUNKS), ("timeout", 2)],
)


@WAITS
def test_cancel_while_waiting_for_reads(
    make_engine: Any,
    reads: Reads,
    prompts: Any,
    expected: Any,
    prefetch: str,
    begun: int,
) -> None:
    engine = make_engine(prefetch=prefetch, prefetch_timeout=60.0)
    reads.close()
    running = engine.submit(prompts[0], GREEDY)
    until(lambda: reads.begun == begun, "readers")
    running.cancel()
    with pytest.raises(CancelledError):
        running.result(20)
    other = fresh(100)
    assert ask(engine, other).token_ids, "the disk still hangs"
    stats = engine.stats()
    assert stats.cancelled == 1
    assert stats.cache.read_timeouts == 0
    reads.open()
    until(lambda: not is_reading(engine), "what had begun")
    assert engine.check().ok
    assert answer(ask(engine, prompts[0])) == expected[0]


@WAITS
def test_an_interrupt_while_waiting_for_reads(
    make_engine: Any,
    reads: Reads,
    prompts: Any,
    expected: Any,
    prefetch: str,
    begun: int,
) -> None:
    engine = make_engine(prefetch=prefetch, prefetch_timeout=60.0)
    reads.close()
    noticed = threading.Event()
    press = threading.Thread(
        target=lambda: (
            until(lambda: reads.begun == begun, "readers"),
            press_ctrl_c(noticed.is_set),
        )
    )
    press.start()
    with pytest.raises(KeyboardInterrupt):
        engine.generate(prompts[0], GREEDY)
    noticed.set()
    press.join(60)
    assert ask(engine, fresh(100)).token_ids
    assert engine.stats().cancelled == 1


@WAITS
def test_close_while_a_request_waits_for_reads(
    make_engine: Any,
    reads: Reads,
    prompts: Any,
    expected: Any,
    prefetch: str,
    begun: int,
) -> None:
    engine = make_engine(prefetch=prefetch, prefetch_timeout=60.0)
    reads.close()
    running = engine.submit(prompts[0], GREEDY)
    until(lambda: reads.begun == begun, "readers")
    closer = threading.Thread(target=engine.close)
    closer.start()
    with pytest.raises(EngineClosedError, match="closed"):
        running.result(20)
    reads.open()
    closer.join(60)
    assert not closer.is_alive()


def test_close_while_reading_ahead(
    make_engine: Any,
    reads: Reads,
    prompts: Any,
    expected: Any,
    check_thread_leaks: None,
) -> None:
    engine = make_engine()
    reads.close()
    engine.prefetch(prompts[0])
    until(lambda: reads.begun == 2, "two readers")
    closer = threading.Thread(target=engine.close)
    closer.start()
    until(lambda: engine.closed, "closing")
    reads.open()
    closer.join(60)
    assert not closer.is_alive()
    with make_engine() as again:
        assert [answer(ask(again, prompts[0]))] == expected[:1]


# --- rows that run while another request waits for the disk ---


@pytest.mark.parametrize("resident_rows", [0, 2])
def test_rows_go_on_while_a_prompt_waits_for_its_reads(
    make_engine: Any,
    prompts: Any,
    expected: Any,
    reads: Reads,
    resident_rows: int,
) -> None:
    engine = make_engine(prefetch="wait_complete", resident_rows=resident_rows)
    reads.close()
    running = engine.submit(fresh(20), LONG)
    stream = running.stream()
    next(stream)
    waiting = [engine.submit(prompt, GREEDY) for prompt in prompts]
    until(lambda: engine.stats().running == 2, "beginning with the next")
    until(lambda: reads.begun > 0, "a read")
    before = len(running._pieces)
    until(lambda: len(running._pieces) > before + 10, "going on")
    assert not any(completion.done for completion in waiting)
    waiting[0].cancel()
    with pytest.raises(CancelledError):
        waiting[0].result(60)
    assert not running.done
    reads.open()
    found = [answer(completion.result(60)) for completion in waiting[1:]]
    assert found == expected[1:]
    running.cancel()
    assert engine.check().ok


def test_a_prompt_beside_rows_waits_no_longer_than_it_would_alone(
    make_engine: Any, prompts: Any, expected: Any, reads: Reads
) -> None:
    engine = make_engine(prefetch="timeout", prefetch_timeout=0.05)
    reads.close()
    running = engine.submit(fresh(20), LONG)
    stream = running.stream()
    next(stream)
    late = engine.submit(prompts[0], GREEDY)
    assert answer(late.result(60)) == expected[0]
    assert not running.done
    assert cache(engine).read_timeouts >= 1
    running.cancel()
    reads.open()
