"""``Result.documents`` and ``engine.stats().documents``: exact for every tier."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest

from pcr_core import Document, DocumentTotals, Engine, Result, SamplingParams
from pcr_core.model.prefill import Prefilled
from tests.engine.kit import GREEDY, ask, busy, slots_for, until

Make = Callable[..., Engine]
LETTERS = "abcdefghijklmnopqrstuvwxyz "


def text_of(name: str, length: int = 90) -> str:
    dice = random.Random(f"document {name}")
    return "".join(dice.choices(LETTERS, k=length)).strip() + f"<{name}>"


A, B, C = (Document(name, text_of(name)) for name in "abc")


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """The tokens that went through the model, of each prefill."""
    seen: list[set[int]] = []
    result = Prefilled.cached

    def noted(self: Prefilled, tiers: Any) -> dict[str, int]:
        ran = (range(one.start, one.stop) for one in self.forwards)
        seen.append({token for tokens in ran for token in tokens})
        return result(self, tiers)

    monkeypatch.setattr(Prefilled, "cached", noted)
    return seen


def check(engine: Engine, prompt: str, result: Result, ran: set[int]) -> None:
    """Compare with the tokens that ran; one token is one byte here, after a BOS."""
    at = len(engine.encode(prompt)) - len(prompt)
    assert result.usage.computed_tokens == len(ran)
    for use in result.documents:
        (text,) = (one.text for one in (A, B, C) if one.id == use.id)
        start = prompt.index(text)
        own = set(range(at + start, at + start + len(text)))
        assert (use.tokens, use.cached_tokens) == (len(own), len(own - ran))
        assert use.computed_tokens == len(own & ran)


@pytest.mark.parametrize(
    ("settings", "tier"),
    [
        ({}, "dram"),
        ({"resident_rows": 2}, "device"),
        ({"exact": False}, "dram"),
        ({"exact": False, "resident_rows": 2}, "device"),
        ({"ssd_bytes": 0}, "dram"),
        ({"dram_bytes": "8 slots"}, "ssd"),
    ],
    ids=str,
)
def test_it_is_exact_for_every_tier(
    make_engine: Make, computed: list[set[int]], settings: dict[str, Any], tier: str
) -> None:
    if "dram_bytes" in settings:  # so few that chunks have to come from SSD
        first = make_engine()
        settings = {"dram_bytes": slots_for(first, 8)}
        first.close()
    engine, tiers = make_engine(**settings), set[str]()
    orders = [(A, B), (A, C), (A, B, C), (C, A), (A, B), (C, A, B), (A, B, C)]
    for number, order in enumerate(orders):
        body = "\n".join(one.text for one in order)
        prompt = f"answer from these:\n{body}\nquestion {number}?"
        result = ask(engine, prompt, documents=order)
        assert [use.id for use in result.documents] == [one.id for one in order]
        check(engine, prompt, result, computed[-1])
        tiers |= set(result.usage.cached_by_tier)
        engine.flush()  # what is being written cannot be evicted
    assert tier in tiers
    assert any(use.cached_tokens for use in result.documents)


def test_the_whole_prompt_as_a_document_is_the_usage(make_engine: Make) -> None:
    engine = make_engine()
    for _ in range(2):
        result = ask(engine, A.text, documents=[A])
        (use,) = result.documents
        bos = result.usage.prompt_tokens - use.tokens
        assert use.cached_tokens == max(0, result.usage.cached_tokens - bos)


def test_texts_of_one_id_count_together_and_each_token_once(make_engine: Make) -> None:
    engine = make_engine()
    half = Document("a", A.text[:40])
    more = Document("a", B.text)
    prompt = f"{A.text} and {A.text} and {B.text}?"
    result = ask(engine, prompt, documents=[A, half, more])
    (use,) = result.documents
    assert (use.id, use.tokens) == ("a", 2 * len(A.text) + len(B.text))


def test_every_answer_of_several_has_them(make_engine: Make) -> None:
    engine = make_engine()
    params = SamplingParams(max_tokens=2, n=3)
    whole = engine.submit(f"{A.text}?", params, documents=[A]).result(60)
    first, *others = whole.answers
    assert [use.cached_tokens for use in first.documents] == [0]
    for one in others:  # they go on from the row of the first
        assert one.usage.computed_tokens == 0
        assert [use.computed_tokens for use in one.documents] == [0]
    (totals,) = engine.stats().documents
    assert totals.requests == 3


def test_without_documents_there_are_none(make_engine: Make) -> None:
    engine = make_engine()
    assert ask(engine, "no document").documents == ()
    assert engine.stats().documents == ()
    assert "documents" not in str(engine.stats())


# --- all requests together ---


def totals(engine: Engine) -> dict[str, DocumentTotals]:
    return {one.id: one for one in engine.stats().documents}


def test_the_engine_adds_up(make_engine: Make) -> None:
    engine = make_engine()
    results = [
        ask(engine, f"{A.text}\n{last.text}?", documents=[A, last])
        for last in (B, C, B)
    ]
    found = totals(engine)
    assert list(found)[-1] == "c"  # the one used longest ago
    assert {id: one.requests for id, one in found.items()} == {"a": 3, "b": 2, "c": 1}
    for id, one in found.items():
        uses = [use for result in results for use in result.documents if use.id == id]
        assert one.tokens == sum(use.tokens for use in uses)
        assert one.cached_tokens == sum(use.cached_tokens for use in uses)
    assert "3 named" in str(engine.stats())


def test_what_is_forgotten_vanishes(make_engine: Make) -> None:
    engine = make_engine()
    ask(engine, f"{A.text}\n{B.text}?", documents=[A, B])
    engine.forget("a")
    assert set(totals(engine)) == {"b"}
    assert "'a'" not in repr(engine.stats())
    ask(engine, f"{A.text}?", documents=[A])  # named anew, it is counted anew
    assert totals(engine)["a"].requests == 1


def test_what_is_forgotten_while_it_waits_does_not_come_back(make_engine: Make) -> None:
    engine = make_engine()
    with busy(engine):
        completion = engine.submit(f"{B.text}\n{A.text}?", GREEDY, documents=[A, B])
        caller = threading.Thread(target=engine.forget, args=["a"])
        caller.start()
        until(lambda: bool(engine._door._calls), "the call")
    caller.join(60)
    result = completion.result(60)
    assert {use.id for use in result.documents} == {"a", "b"}
    assert "a" not in totals(engine)


def test_another_process_forgets(make_engine: Make) -> None:
    one, other = make_engine(), make_engine()
    ask(one, f"{A.text}\n{B.text}?", documents=[A, B])
    other.forget("a")
    until(lambda: "a" not in totals(one), "catching up")
    assert set(totals(one)) == {"b"}
