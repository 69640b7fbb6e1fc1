"""Several requests at a time: who runs beside whom changes no answer."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from copy import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from pcr_core import (
    CancelledError,
    DeadlineExceededError,
    Document,
    EngineClosedError,
    ModelError,
    QueueFullError,
    RequestError,
    SamplingParams,
)
from pcr_core.answers import one_each
from pcr_core.errors import DeviceMemoryError
from pcr_core.loop import Batching
from pcr_core.model import generation
from pcr_core.model.key_blocks import KEY_BLOCK
from pcr_core.request import Request
from tests.engine.kit import on_engine_thread
from tests.engine.loop_bench import CHUNK, Bench, opened_bench

SAMPLED = {"temperature": 1.5, "logprobs": True, "max_tokens": 12}
Opened = Callable[..., AbstractContextManager[Bench]]


@pytest.fixture
def opened(
    tmp_path: Path, probes: Path, make_tiny_model: Any, tiny_tokenizer: Any
) -> Opened:
    (tmp_path / "probes").symlink_to(probes, target_is_directory=True)

    def open_one(*, kind: str = "llama", **settings: Any) -> Any:
        options = {"resident_rows": 0, **settings}
        model = make_tiny_model(kind)
        return opened_bench(tmp_path, model, tiny_tokenizer, **options)

    return open_one


@pytest.fixture
def bench(opened: Opened) -> Iterator[Bench]:
    with opened() as one:
        yield one


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    dice = random.Random(seed)
    shared = dice.choices(range(250), k=3 * CHUNK)
    lengths = [dice.randint(1, 60) for _ in range(count)]
    return [
        [*shared[: dice.choice([0, CHUNK, 3 * CHUNK])], *dice.choices(range(250), k=n)]
        for n in lengths
    ]


def answer(request: Request) -> Any:
    result = request.completion.result(0)
    return result.token_ids, result.logprobs, result.text


def run(bench: Bench) -> None:
    while bench.loop.busy:
        bench.loop.step()


def one_by_one(bench: Bench, wanted: list[list[int]]) -> list[Any]:
    found = []
    for seed, prompt in enumerate(wanted):
        request = bench.request(prompt, seed=seed, **SAMPLED)
        bench.finish(request)
        found.append(answer(request))
    return found


# --- together ---


@pytest.mark.parametrize("kind", ["llama", "mistral_sliding"])
def test_answers_are_those_of_each_alone(opened: Opened, kind: str) -> None:
    wanted = prompts(12)
    with opened(kind=kind, slots=4, batching=Batching(rows=1)) as bench:
        expected = one_by_one(bench, wanted)
    small = Batching(rows=5, prefill_tokens=32)
    with opened(kind=kind, slots=40, batching=small) as bench:
        assert bench.runner.decoding == "invariant"
        requests = [
            bench.request(prompt, seed=seed, **SAMPLED)
            for seed, prompt in enumerate(wanted)
        ]
        most = 0
        while bench.loop.busy:
            bench.loop.step()
            most = max(most, bench.loop.running)
        assert most == 5
        assert [answer(request) for request in requests] == expected
        assert bench.nothing_held()


def test_rows_join_and_leave_between_steps(bench: Bench) -> None:
    long = bench.request(max_tokens=30)
    bench.loop.step()
    short = bench.request(max_tokens=3)
    steps = 0
    while not short.completion.done:
        before = len(bench.loop._running[0].token_ids)
        bench.loop.step()
        assert len(bench.loop._running[0].token_ids) == before + 1, "it kept its pace"
        steps += 1
    assert steps == 3
    assert not long.completion.done
    assert len(bench.finish(long).token_ids) == 30


def test_a_long_prompt_does_not_hold_up_those_that_run(opened: Opened) -> None:
    dice = random.Random(1)
    prompt = dice.choices(range(250), k=330)
    with opened(slots=40) as bench:
        expected = one_by_one(bench, [prompt])
    with opened(slots=40, batching=Batching(prefill_tokens=70)) as bench:
        running = bench.request(max_tokens=60)
        bench.loop.step()
        late = bench.request(prompt, seed=0, **SAMPLED)
        tokens = []
        while not late.completion._pieces and not late.completion.done:
            bench.loop.step()
            tokens.append(len(bench.loop._running[0].token_ids))
        # 330 tokens, at most 64 of them (whole tiles) a step.
        assert tokens[:6] == [2, 3, 4, 5, 6, 7]
        run(bench)
        assert answer(late) == expected[0]
        assert len(running.completion.result(0).token_ids) == 60
        computed = late.completion.result(0).intervals
        assert max(i.tokens for i in computed if i.lane == "compute") <= 64


def test_the_prefix_of_many_is_computed_once(opened: Opened) -> None:
    shared = list(range(5 * CHUNK))
    with opened(slots=40) as bench:
        requests = [bench.request([*shared, 100 + n]) for n in range(6)]
        run(bench)
        usages = [r.completion.result(0).usage for r in requests]
        assert [u.cached_tokens for u in usages] == [0] + [5 * CHUNK] * 5
        assert bench.tiers.stats.miss_tokens == 5 * CHUNK + 6


def test_groups_are_computed_once_each(opened: Opened) -> None:
    """A hundred requests in ten groups, with room for the chunks of one group."""
    groups = [[group] * (4 * CHUNK) for group in range(10)]
    wanted = [[*groups[n % 10], 100 + n // 10] for n in range(100)]
    aware = Batching(rows=8, order="cache_aware", max_overtakes=100)
    with opened(slots=5, batching=aware) as bench:
        for prompt in wanted:
            bench.request(prompt, max_tokens=2)
        run(bench)
        assert bench.loop.finished == 100
        assert bench.tiers.stats.miss_tokens == 10 * 4 * CHUNK + 100


# --- who is next ---


def test_priority_and_deadline(opened: Opened) -> None:
    with opened(batching=Batching(rows=1)) as bench:
        first = bench.request([1], max_tokens=2)
        bench.loop.step()
        low = bench.request([2], max_tokens=2)
        high = bench.request([3], max_tokens=2, priority=1)
        order: list[str] = []
        for name, one in (("low", low), ("high", high)):
            one.completion.subscribe(lambda name=name: order.append(name))
        run(bench)
        assert first.completion.done
        assert order.index("high") < order.index("low")


def test_a_request_that_is_late_fails_waiting_or_running(opened: Opened) -> None:
    with opened(batching=Batching(rows=1)) as bench:
        running = bench.request([1], max_tokens=50, deadline=10.0)
        waiting = bench.request([2], max_tokens=50, deadline=5.0)
        patient = bench.request([3], max_tokens=2)
        assert bench.loop.step() == 1
        bench.now = 5.0
        bench.loop.step()
        bench.now = 10.0
        run(bench)
        for one in (running, waiting):
            with pytest.raises(DeadlineExceededError, match="deadline"):
                one.completion.result(0)
        assert len(patient.completion.result(0).token_ids) == 2
        assert bench.loop.failed == 2
        assert bench.nothing_held()


@pytest.mark.parametrize(
    "options",
    [
        {"priority": 1.5},
        {"priority": True},
        *[
            {"deadline": bad}
            for bad in (0, -1, True, "soon", math.nan, math.inf, 10**400)
        ],
    ],
)
def test_bad_places_in_the_queue_are_refused(engine: Any, options: Any) -> None:
    with pytest.raises(RequestError, match=next(iter(options))):
        engine.submit("hello", **options)


def test_a_group_overtakes_nobody_beyond_the_bound(opened: Opened) -> None:
    with opened(slots=60, batching=Batching(rows=6, max_overtakes=2)) as bench:
        filler = bench.request([5] * 20, max_tokens=3, priority=9)
        bench.loop.step()
        waits = bench.request([6] * 20, max_tokens=1)
        parts = one_each(bench.made([7] * 20, n=5, max_tokens=6), copy)
        for part in parts:
            part.priority = 5
            bench.loop.add(part)
        while bench.loop.busy:
            bench.loop.step()
            queue = bench.loop._scheduler.waiting()
            if waits in queue:
                assert sum(part in queue for part in parts) >= 3, "overtaken twice"
        for one in (filler, waits, *parts):
            assert one.completion.result(0).token_ids
        assert bench.nothing_held()


# --- memory ---


@pytest.fixture
def rows_begin_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "_FIRST_ROOM", 1)


@pytest.mark.usefixtures("rows_begin_small")
def test_the_youngest_gives_way_and_goes_on_as_if_nothing_was(opened: Opened) -> None:
    """Three rows that all outgrow their first key block; there is room for four."""
    wanted = [[n] * (KEY_BLOCK - 20) for n in (1, 2, 3)]
    long = {**SAMPLED, "max_tokens": 40}
    seeds = dict(enumerate(wanted))
    with opened(slots=100) as bench:
        expected = []
        for seed, prompt in seeds.items():
            request = bench.request(prompt, seed=seed, **long)
            bench.finish(request)
            expected.append(answer(request))
        block = bench.runner._rows._make().bytes_for(KEY_BLOCK)
    with opened(slots=100, row_bytes=4 * block) as bench:
        requests = [bench.request(p, seed=s, **long) for s, p in seeds.items()]
        streams: list[list[str]] = [[], [], []]
        while bench.loop.busy:
            bench.loop.step()
            assert bench.runner._rows.taken_bytes <= 4 * block
            for stream, request in zip(streams, requests, strict=True):
                stream += request.completion.take()
        assert bench.loop.preempted > 0
        assert [answer(request) for request in requests] == expected
        assert ["".join(s) for s in streams] == [text for *_, text in expected]
        assert bench.nothing_held()


def test_one_that_fits_nowhere_fails_and_the_next_runs(opened: Opened) -> None:
    with opened(slots=100) as bench:
        block = bench.runner._rows._make().bytes_for(KEY_BLOCK)
    with opened(slots=100, row_bytes=block) as bench:
        too_long = bench.request([1] * (KEY_BLOCK + 1))
        outgrows = bench.request([1] * (KEY_BLOCK - 2), max_tokens=2)
        fine = bench.request([2] * 9)
        run(bench)
        with pytest.raises(DeviceMemoryError, match="row_bytes"):
            too_long.completion.result(0)
        assert len(outgrows.completion.result(0).token_ids) == 2
        assert len(fine.completion.result(0).token_ids) == 4
        assert bench.nothing_held()


@pytest.mark.parametrize("order", ["fcfs", "cache_aware"])
def test_a_queue_that_cannot_move_is_not_sorted_at_every_step(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, order: Any
) -> None:
    with opened(slots=60, batching=Batching(rows=4, order=order)) as bench:
        bench.request([1] * 20, max_tokens=30)
        bench.loop.step()
        rows = bench.runner._rows
        monkeypatch.setattr(rows, "_most_taken", rows.taken_bytes)
        queue = [bench.request([n] * 50, max_tokens=2) for n in range(2, 9)]
        asked: list[Any] = []
        is_reading = bench.tiers.is_reading

        def counted(keys: Any) -> bool:
            asked.append(keys)
            return bool(is_reading(keys))

        monkeypatch.setattr(bench.tiers, "is_reading", counted)
        for _ in range(2):
            bench.loop.step()
        assert asked
        asked.clear()
        for _ in range(5):
            bench.loop.step()
        assert not asked
        queue[0].completion.cancel()
        bench.loop.step()
        assert asked, "the queue has changed"
        run(bench)
        for request in queue[1:]:
            assert len(request.completion.result(0).token_ids) == 2
        assert bench.loop._chosen is None, "nothing keeps an old request"
        assert bench.nothing_held()


@pytest.mark.usefixtures("rows_begin_small")
def test_a_request_put_back_can_be_cancelled(opened: Opened) -> None:
    with opened(slots=100) as bench:
        block = bench.runner._rows._make().bytes_for(KEY_BLOCK)
    with opened(slots=100, row_bytes=3 * block) as bench:
        first = bench.request([1] * (KEY_BLOCK - 10), max_tokens=60)
        second = bench.request([2] * (KEY_BLOCK - 10), max_tokens=60)
        while not bench.loop.preempted:
            assert bench.loop.busy
            bench.loop.step()
        second.completion.cancel()
        assert bench.loop.step() == 1
        with pytest.raises(CancelledError):
            second.completion.result(0)
        assert len(bench.finish(first).token_ids) == 60
        assert bench.nothing_held()


# --- one request's failure ---


def test_nan_of_one_row_is_its_own(bench: Bench) -> None:
    expected = one_by_one(bench, prompts(3))
    requests = [bench.request(p, seed=s, **SAMPLED) for s, p in enumerate(prompts(3))]
    for _ in range(4):
        bench.loop.step()
    decode = bench.runner.decode

    def poisoned(rows: Any, tokens: Any) -> torch.Tensor:
        logits = decode(rows, tokens).clone()
        logits[1] = float("nan")
        return logits

    bench.runner.decode = poisoned
    bench.loop.step()
    del bench.runner.decode
    run(bench)
    with pytest.raises(ModelError, match="NaN"):
        requests[1].completion.result(0)
    assert answer(requests[0]) == expected[0]
    assert answer(requests[2]) == expected[2]
    assert bench.nothing_held()


@pytest.mark.parametrize("error", [TypeError("model code"), torch.OutOfMemoryError()])
def test_a_forward_that_fails_for_one_row_fails_that_one(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    expected = one_by_one(bench, prompts(3))
    requests = [bench.request(p, seed=s, **SAMPLED) for s, p in enumerate(prompts(3))]
    for _ in range(4):
        bench.loop.step()
    guilty = bench.loop._running[2].next_input
    assert guilty not in [one.next_input for one in bench.loop._running[:2]]
    forward = bench.model.forward

    def broken(*args: Any, **kwargs: Any) -> Any:
        if guilty in kwargs["input_ids"].flatten():
            raise error
        return forward(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(bench.model, "forward", broken)
        bench.loop.step()
    run(bench)
    with pytest.raises(ModelError):
        requests[2].completion.result(0)
    assert [answer(one) for one in requests[:2]] == expected[:2]
    assert bench.nothing_held()


def test_cancelling_one_of_several_frees_its_row_in_a_step(bench: Bench) -> None:
    expected = one_by_one(bench, prompts(3))
    requests = [bench.request(p, seed=s, **SAMPLED) for s, p in enumerate(prompts(3))]
    for _ in range(4):
        bench.loop.step()
    requests[1].completion.cancel()
    bench.loop.step()
    assert bench.loop.running == 2
    run(bench)
    assert answer(requests[0]) == expected[0]
    assert answer(requests[2]) == expected[2]


def test_a_prompt_cancelled_between_two_parts_of_it(opened: Opened) -> None:
    with opened(slots=40, batching=Batching(prefill_tokens=32)) as bench:
        running = bench.request(max_tokens=20)
        bench.loop.step()
        long = bench.request([7] * 300)
        for _ in range(3):
            bench.loop.step()
        assert bench.loop.running == 2
        long.completion.cancel()
        bench.loop.step()
        assert bench.loop.running == 1
        assert not bench.tiers._leases
        assert bench.states([7] * 300).count("dram") == 6, "three parts of 32 tokens"
        bench.finish(running)
        assert bench.nothing_held()


def test_abandon_fails_all_that_there_is(opened: Opened) -> None:
    with opened(slots=40, batching=Batching(rows=3, prefill_tokens=32)) as bench:
        requests = [bench.request([n] * 200, max_tokens=30) for n in range(6)]
        for _ in range(12):
            bench.loop.step()
        assert bench.loop.running == 3
        bench.loop.abandon(EngineClosedError("over"))
        for request in requests:
            with pytest.raises(EngineClosedError, match="over"):
                request.completion.result(0)
        assert bench.nothing_held()
        assert not bench.loop.busy


# --- several answers ---


@pytest.mark.parametrize("rows", [8, 2])
def test_n_answers_share_one_prefill(opened: Opened, rows: int) -> None:
    with opened(slots=40, batching=Batching(rows=rows)) as bench:
        whole = bench.made(seed=3, n=4, **SAMPLED)
        parts = one_each(whole, copy)
        for part in parts:
            bench.loop.add(part)
        result = bench.finish(whole)
        assert len(result.answers) == 4
        assert len({one.text for one in result.answers}) > 1
        assert "".join(whole.completion.take()) == result.text
        assert result.text == result.answers[0].text
        for part, found in zip(parts, result.answers, strict=True):
            alone = bench.request(seed=part.params.seed, **SAMPLED)
            bench.finish(alone)
            assert answer(alone) == (found.token_ids, found.logprobs, found.text)
        if rows == 8:
            assert [a.usage.computed_tokens for a in result.answers][1:] == [0] * 3
        assert bench.nothing_held()


def test_n_answers_are_cancelled_together(bench: Bench) -> None:
    whole = bench.made(n=3, max_tokens=50)
    for part in one_each(whole, copy):
        bench.loop.add(part)
    for _ in range(3):
        bench.loop.step()
    assert bench.loop.running == 3
    whole.completion.cancel()
    bench.loop.step()
    assert not bench.loop.busy
    with pytest.raises(CancelledError):
        whole.completion.result(0)
    assert bench.nothing_held()


# --- answers become prefixes ---


@pytest.mark.parametrize("exact", [True, False])
def test_the_next_turn_reuses_the_answer(opened: Opened, exact: bool) -> None:
    prompt, more = [5] * 40, list(range(20))
    storing = Batching(store_answers=True)
    with opened(slots=40, batching=storing, exact=exact) as bench:
        first = bench.finish(bench.request(prompt, max_tokens=30))
        while bench.loop.idle():
            pass
        requests = bench.tiers.stats.requests
        assert requests == 1, "nobody asked for it"
        turn = [*prompt, *first.token_ids, *more]
        # 40 tokens of prompt and 30 of answer fill four chunks.
        assert bench.states(turn)[:4] == ["dram"] * 4
        second = bench.request(turn, seed=1, **SAMPLED)
        bench.finish(second)
        assert second.completion.result(0).usage.cached_tokens >= 4 * CHUNK
        assert bench.nothing_held()
    with opened(slots=40, exact=exact) as bench:
        cold = bench.request(turn, seed=1, **SAMPLED)
        bench.finish(cold)
        if exact:
            assert answer(cold) == answer(second)


def test_a_new_request_comes_before_answers_being_stored(opened: Opened) -> None:
    storing = Batching(store_answers=True, prefill_tokens=16)
    with opened(slots=40, batching=storing) as bench:
        bench.finish(bench.request([5] * 40, max_tokens=100))
        assert bench.loop.idle()
        assert bench.tiers._leases, "under way"
        bench.finish(bench.request([6] * 40))
        assert bench.nothing_held()


def test_an_answer_that_was_interrupted_is_stored_later(opened: Opened) -> None:
    storing = Batching(store_answers=True, prefill_tokens=16)
    with opened(slots=40, batching=storing) as bench:
        first = bench.finish(bench.request([5] * 40, max_tokens=100))
        for number in range(3):
            assert bench.loop.idle()
            bench.finish(bench.request([6 + number] * 10))
        while bench.loop.idle():
            pass
        assert set(bench.states([5] * 40 + first.token_ids)) == {"dram"}
        assert bench.nothing_held()


@pytest.mark.parametrize("exact", [True, False])
def test_storing_an_answer_leaves_its_row_at_rest(opened: Opened, exact: bool) -> None:
    resident = {}
    for store in (False, True):
        storing = Batching(store_answers=store)
        settings = {"exact": exact, "resident_rows": 2, "batching": storing}
        with opened(slots=40, **settings) as bench:
            first = bench.finish(bench.request([5] * 100, max_tokens=50))
            while bench.loop.idle():
                pass
            turn = [*[5] * 100, *first.token_ids, *range(20)]
            resident[store] = bench.runner.resident(turn)
            assert bench.nothing_held()
    assert resident[True] >= resident[False] >= 64


def test_nothing_of_an_answer_with_nan_is_stored(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(slots=40, batching=Batching(store_answers=True)) as bench:
        first = bench.finish(bench.request([5] * 40, max_tokens=30))
        forward = bench.runner.call

        def poisoned(*args: Any) -> torch.Tensor:
            return torch.full_like(forward(*args), math.nan)

        monkeypatch.setattr(bench.runner, "call", poisoned)
        while bench.loop.idle():
            pass
        monkeypatch.undo()
        turn = [*[5] * 40, *first.token_ids, *range(20)]
        assert bench.states(turn)[2:] == ["none"] * (len(turn) // CHUNK - 2)
        assert len(bench.finish(bench.request(turn)).token_ids) == 4
        assert bench.nothing_held()


def test_what_was_forgotten_is_not_stored_with_an_answer(make_engine: Any) -> None:
    engine = make_engine(store_answers=True, chunk_tokens=16)
    document = Document("a", "x" * 60)
    result = engine.submit(
        f"look: {document.text}", SamplingParams(max_tokens=40), documents=[document]
    ).result()
    engine.forget("a")
    tokens = [*engine.encode(f"look: {document.text}"), *result.token_ids]
    keys = engine._loop.tiers.keys_of(tokens)
    found = on_engine_thread(engine, lambda: engine._loop.tiers.match(keys))
    assert "dram" not in found
    assert "ssd" not in found


def test_what_is_forgotten_while_it_runs_is_not_stored(make_engine: Any) -> None:
    engine = make_engine(store_answers=True, chunk_tokens=16)
    document = Document("a", "x" * 60)
    completion = engine.submit(
        f"look: {document.text}", SamplingParams(max_tokens=40), documents=[document]
    )
    completion.subscribe(lambda: engine.forget("a"))
    tokens = [
        *engine.encode(f"look: {document.text}"),
        *completion.result(60).token_ids,
    ]
    assert not on_engine_thread(engine, engine._loop._answers.waiting)
    keys = engine._loop.tiers.keys_of(tokens)
    found = on_engine_thread(engine, lambda: engine._loop.tiers.match(keys))
    assert set(found) == {"none"}


def test_a_full_queue_counts_those_that_wait(make_engine: Any, hold: Any) -> None:
    engine = make_engine(max_queue=4)
    with hold(engine):
        several = engine.submit([1, 2], SamplingParams(n=4, max_tokens=2))
        with pytest.raises(QueueFullError):
            engine.submit([1, 2])
    assert len(several.result(60).answers) == 4
    assert engine._door._waiting == 0
    with hold(engine):
        for _ in range(4):
            engine.submit([1, 2])


def test_a_request_that_cannot_begin_fails_alone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise ValueError("a processor")

    with monkeypatch.context() as patch:
        patch.setattr(generation, "Sampler", broken)
        failed = bench.request()
        bench.loop.step()
    with pytest.raises(ModelError, match="a processor"):
        failed.completion.result(0)
    assert len(bench.finish(bench.request()).token_ids) == 4


def test_generate_orders_a_batch_and_keeps_the_callers_order(make_engine: Any) -> None:
    engine = make_engine(dram_bytes="300KiB", ssd_bytes=0, max_queue=5)
    groups = [[group] * 64 for group in range(4)]
    batch = [[*groups[n % 4], 100 + n] for n in range(24)]
    once = SamplingParams(max_tokens=2, logprobs=True)
    results = engine.generate(batch, once)
    for prompt, result in zip(batch, results, strict=True):
        assert result.token_ids == engine.generate(prompt, once).token_ids
    cold = [r for r in results if r.usage.cached_tokens == 0]
    assert len(cold) == 4, "each group's prefix is computed once"
