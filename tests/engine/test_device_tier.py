"""Finished requests keep their KV on the device: who goes on from it, and who must not.

Engines with ``resident_rows``; the others in this folder have none.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

from pcr_core import (
    CancelledError,
    Completion,
    Document,
    Engine,
    ModelError,
    SamplingParams,
)
from pcr_core.model import onednn, setup
from pcr_core.model.linear import LayerPlan
from pcr_core.model.row_tiles import RowTiles
from pcr_core.model.runner import Runner
from tests.engine.kit import (
    GREEDY,
    answer,
    ask,
    fresh,
    on_engine_thread,
    paused,
    slots_for,
    states,
    until,
)

Make = Callable[..., Engine]


@pytest.fixture
def make(make_engine: Make) -> Make:
    return partial(make_engine, resident_rows=2)


def held(engine: Engine) -> list[list[int]]:
    """Tokens of the rows at rest that hold any."""

    def look() -> list[list[int]]:
        rows = engine._parts.prepared.runner._rows._resting
        return [row.tokens.tolist() for row in rows if len(row.tokens)]

    found: list[list[int]] = on_engine_thread(engine, look)
    return found


def is_clean(engine: Engine) -> bool:
    """Whether all rows at rest are zero, to the last position."""

    def look() -> bool:
        buffers = [row.buffer for row in engine._parts.prepared.runner._rows._resting]
        sides = [side for one in buffers for side in (*one.keys, *one.values)]
        return not any(bool(side.any()) for side in sides)

    return bool(on_engine_thread(engine, look))


# --- who goes on from a row ---


def test_a_conversation(make: Make, make_engine: Make) -> None:
    plain = make_engine(ssd_bytes=0)
    engine = make(chunk_tokens=64)
    messages = [{"role": "user", "content": "tell me all about the tides " * 4}]
    before = 0
    for turn in range(4):
        size = len(engine.encode(messages))
        found = ask(engine, messages)
        assert answer(found) == answer(ask(plain, messages))
        if turn:
            # All of the turn before, but for what shares a tile with what is new.
            assert found.usage.cached_by_tier["device"] >= before // 64 * 64
            assert found.usage.computed_tokens <= size - before + 64
        before = size
        messages += [
            {"role": "assistant", "content": found.text},
            {"role": "user", "content": f"and what happens at {turn} o'clock?"},
        ]
    assert engine.stats().cache.device_hit_tokens > 0
    assert engine.check().ok


def test_the_same_documents_and_another_question(make: Make) -> None:
    engine, documents = make(), fresh(200)
    ask(engine, [*documents, *fresh(20)])
    engine.flush()  # what is being written cannot be evicted
    on_engine_thread(engine, lambda: _empty_dram(engine))
    found = ask(engine, [*documents, *fresh(40)])
    assert found.usage.cached_by_tier == {"device": 192}
    assert found.usage.computed_tokens == 48


def test_without_resident_rows_there_is_no_such_tier(make_engine: Make) -> None:
    engine, prompt = make_engine(), fresh(100)
    for _ in range(2):
        found = ask(engine, prompt)
        assert "device" not in found.usage.cached_by_tier
    assert held(engine) == []
    assert engine.stats().cache.device_hit_tokens == 0


def test_it_need_not_be_in_any_other_tier(make: Make) -> None:
    """DRAM holds two chunks, and there is no SSD: the row is all there is."""
    engine = make(ssd_bytes=0)
    engine.close()
    engine = make(ssd_bytes=0, dram_bytes=slots_for(engine, 2))
    prompt = fresh(300)
    first = ask(engine, prompt)
    found = ask(engine, prompt)
    assert answer(found) == answer(first)
    assert found.usage.cached_by_tier == {"device": 288}
    assert engine.check().ok


def test_in_free_mode_what_was_generated_counts_too(make: Make) -> None:
    engine, prompt = make(exact=False), fresh(50)
    first = ask(engine, prompt)
    more = [*prompt, *first.token_ids, *fresh(10)]
    engine.flush()  # what is being written cannot be evicted
    on_engine_thread(engine, lambda: _empty_dram(engine))
    found = ask(engine, more)
    # The last token generated has no KV: nobody asked what follows it.
    assert found.usage.cached_by_tier == {"device": 50 + len(first.token_ids) - 1}


def test_exact_mode_does_not_trust_what_was_generated(make: Make) -> None:
    engine, prompt = make(), fresh(48)
    more = [*prompt, *ask(engine, prompt).token_ids, *fresh(30)]
    assert ask(engine, more).usage.cached_by_tier["device"] <= 48


# --- numbers ---


@pytest.mark.parametrize(("exact", "seed"), [(None, 0), (False, 1), (False, 2)])
def test_explain_and_counters_agree_with_what_happens(
    make: Make, exact: bool | None, seed: int
) -> None:
    dice = random.Random(seed)
    engine = make(
        exact=exact,
        dram_bytes="300KiB",
        ssd_bytes="700KiB",
        prefetch="wait_complete",
    )
    prompts: list[list[int]] = []
    for _ in range(6):
        start = dice.choice(prompts)[: dice.randrange(200)] if prompts else []
        prompts.append([*start, *fresh(dice.choice([1, 31, 32, 33, 64, 96, 128, 150]))])
    total: Counter[str] = Counter()
    for _ in range(30):
        prompt = dice.choice(prompts)
        prompt = prompt[: dice.choice([len(prompt), 32, 64, 65, 96]) or 1]
        assert engine.flush(60)
        explained = engine.explain(prompt).prompt
        assert engine.explain(prompt).prompt == explained, "asking changes nothing"
        usage = ask(engine, prompt).usage
        assert usage.cached_by_tier == {
            tier: tokens
            for tier, tokens in (
                ("device", explained.device_tokens),
                ("dram", explained.dram_tokens),
                ("ssd", explained.ssd_tokens),
            )
            if tokens
        }
        total.update(usage.cached_by_tier)
        total["computed"] += usage.computed_tokens
        total["prompt"] += len(prompt)
    stats = engine.stats().cache
    assert (stats.device_hit_tokens, stats.dram_hit_tokens, stats.ssd_hit_tokens) == (
        total["device"],
        total["dram"],
        total["ssd"],
    )
    assert stats.miss_tokens == total["computed"]
    assert stats.hit_tokens + stats.miss_tokens == total["prompt"]
    assert min(total.values()) > 0
    assert engine.check().ok


# --- what must not stay ---

Q = Document("q", "Q" * 50)


def rag(question: str, *documents: str) -> str:
    return "\n".join(["answer in one sentence", *documents, question])


@pytest.fixture(params=["by this engine", "by another engine"])
def forget(request: pytest.FixtureRequest, make: Make) -> Callable[[Engine], None]:
    """Has document Q forgotten, in some way."""

    def call(engine: Engine) -> None:
        if request.param == "by another engine":
            other = make()
            engine.flush(60)
            other.forget(Q.id)
            until(lambda: held(engine) == [], "hearing of it")
        else:
            engine.forget(Q.id)

    return call


def test_what_is_forgotten_leaves_the_rows(
    make: Make, forget: Callable[[Engine], None]
) -> None:
    engine, prompt = make(), rag("who?", "a", Q.text)
    first = ask(engine, prompt, documents=[Q])
    assert len(held(engine)) == 1
    forget(engine)
    assert held(engine) == []
    assert is_clean(engine), "not a number of it is left"
    found = ask(engine, prompt, documents=[Q])
    assert "device" not in found.usage.cached_by_tier
    assert answer(found) == answer(first)


def test_a_document_that_no_chunk_holds(make: Make) -> None:
    """It is in a last partial chunk: in no other tier, but in the row."""
    engine, tail = make(), Document("tail", "QQ")
    ask(engine, "x" * 63 + tail.text, documents=[tail])
    assert len(held(engine)) == 1
    engine.forget("tail")
    assert held(engine) == []
    assert is_clean(engine)


def test_forgotten_while_the_request_that_holds_it_runs(make: Make) -> None:
    engine, prompt = make(), rag("who?", Q.text)
    long = GREEDY.model_copy(update={"max_tokens": 300, "min_tokens": 300})

    def submit() -> Completion:
        return engine.submit(prompt, long, documents=[Q])

    with ThreadPoolExecutor(1) as pool, paused(engine, submit) as running:
        forgetting = pool.submit(engine.forget, Q.id)
        until(lambda: bool(engine._door._calls), "the call")
    assert forgetting.result(60)
    assert len(running.result(60).token_ids) == 300
    assert held(engine) == []
    assert is_clean(engine)
    assert "device" not in ask(engine, prompt).usage.cached_by_tier
    assert len(held(engine)) == 1, "what is asked for later may be kept"


def test_requests_that_waited_leave_no_row(make: Make, hold: Any) -> None:
    engine, prompt = make(), rag("who?", Q.text)
    other = make()
    ask(other, prompt, documents=[Q])
    assert other.flush(60)
    with hold(engine):
        waiting = engine.submit(prompt, GREEDY, documents=[Q])
        after = engine.submit(rag("and who else?", Q.text), GREEDY, documents=[Q])
        other.forget(Q.id)
    assert waiting.result(60).token_ids
    found = after.result(60)
    assert "device" not in found.usage.cached_by_tier
    assert held(engine) == []
    assert is_clean(engine)


def test_a_cancelled_request_leaves_nothing(make: Make) -> None:
    engine = make(ssd_bytes=0)
    long = SamplingParams(max_tokens=400, min_tokens=400)
    with paused(engine, lambda: engine.submit(fresh(80), long)) as running:
        running.cancel()
    with pytest.raises(CancelledError):
        running.result(60)
    assert held(engine) == []
    assert is_clean(engine)


def test_a_failed_request_leaves_nothing(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, prompt = make(ssd_bytes=0), fresh(80)
    first = ask(engine, prompt)
    forward = Runner._forward

    def broken(self: Runner, *arguments: Any) -> torch.Tensor:
        return forward(self, *arguments) * float("nan")

    monkeypatch.setattr(Runner, "_forward", broken)
    with pytest.raises(ModelError):
        ask(engine, [*prompt, *fresh(10)])
    monkeypatch.undo()
    assert held(engine) == [], "it had taken over the row of the first"
    found = ask(engine, prompt)
    assert found.usage.cached_by_tier == {"dram": 64}
    assert answer(found) == answer(first)


# --- memory ---


def test_weights_that_are_there_twice_are_counted(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A budget is worth what it counts: the packed head stands beside the model's."""
    packs = onednn.supports(torch.float32)
    plan = LayerPlan(packs, RowTiles({1: 1.0}))
    installed = setup.head_installed
    monkeypatch.setattr(
        setup, "head_installed", lambda model, _: installed(model, plan)
    )
    with make_engine() as engine:
        head = engine.model.get_output_embeddings()
        assert engine.stats().weight_bytes == (head.weight.nbytes if packs else 0)


def test_rows_at_rest_give_way_to_a_forward(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, prompt = make(ssd_bytes=0), fresh(80)
    ask(engine, prompt)
    ask(engine, fresh(80))
    before = engine.stats().working_bytes
    model, failures = engine.model, iter([True, False, False, False, False])
    forward = model.forward

    def scarce(*arguments: Any, **options: Any) -> Any:
        if next(failures, False):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(*arguments, **options)

    monkeypatch.setattr(model, "forward", scarce)
    found = ask(engine, fresh(50))
    monkeypatch.undo()
    assert len(found.token_ids) == 4
    assert engine.stats().working_bytes < before
    assert len(held(engine)) == 1


def test_without_rows_at_rest_memory_has_run_out(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(ssd_bytes=0)

    def scarce(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(engine.model, "forward", scarce)
    with pytest.raises(ModelError, match="ran out of memory: CUDA out of memory; use"):
        ask(engine, fresh(50))
    monkeypatch.undo()
    assert ask(engine, fresh(50)).token_ids


def test_no_memory_for_a_row(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(ssd_bytes=0)
    before = ask(engine, fresh(80))
    zeros = torch.zeros

    def scarce(shape: Any, *arguments: Any, **options: Any) -> torch.Tensor:
        if isinstance(shape, tuple) and len(shape) == 4 and shape[2] > 2000:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return zeros(shape, *arguments, **options)

    on_engine_thread(engine, engine._parts.prepared.runner._rows.give_up)
    monkeypatch.setattr(torch, "zeros", scarce)
    with pytest.raises(ModelError, match="no memory for the KV of 2048 tokens"):
        ask(engine, fresh(2000))
    assert ask(engine, fresh(80)).token_ids, "shorter ones are served"
    assert before.token_ids


def _empty_dram(engine: Engine) -> None:
    """As if DRAM had been needed for other chunks."""
    dram, tree = engine._loop.tiers._dram, engine._loop.tiers._tree
    while (victim := tree.host_victim()) is not None:
        dram.evict(victim)
    assert not dram.slots


def test_states_are_told_apart(make: Make) -> None:
    engine, prompt = make(ssd_bytes=0), fresh(100)
    ask(engine, prompt)
    assert states(engine, prompt) == ["dram"] * 3
    explained = engine.explain(prompt)
    assert "device" in str(explained)
    assert explained.prompt.device_tokens == 96
    on_engine_thread(engine, engine._parts.prepared.runner.forget)
    explained = engine.explain(prompt)
    assert (explained.prompt.device_tokens, explained.prompt.dram_tokens) == (0, 96)
