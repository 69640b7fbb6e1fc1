"""Recent prompts: the nearest is found as by comparing all, and memory is bounded."""

from __future__ import annotations

from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import given

from pcr_core.documents import DocumentSpan
from pcr_core.explain.history import (
    PastPrompt,
    PromptHistory,
    Sighting,
    document_order,
    sighting_in,
)
from pcr_core.prefix import shared_prefix

# Ids with equal low bytes, so that a packed prefix may end within a token.
TOKENS = st.lists(st.sampled_from([0, 1, 256, 257, 65536, 2**32 - 1]), max_size=6)


def common(one: Sequence[int], other: Sequence[int]) -> int:
    count = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            break
        count += 1
    return count


# --- common prefixes ---


def sighting(history: PromptHistory, wanted: DocumentSpan) -> Sighting | None:
    holder = history.holder(wanted)
    return None if holder is None else sighting_in(holder, wanted)


@given(st.text(alphabet="ab", max_size=12), st.text(alphabet="ab", max_size=12))
def test_shared_prefix_of_texts_and_bytes(one: str, other: str) -> None:
    assert shared_prefix(one, other) == common(one.encode(), other.encode())
    assert shared_prefix(one.encode(), other.encode()) == shared_prefix(one, other)


@given(TOKENS, TOKENS)
def test_prompts_share_whole_tokens(one: list[int], other: list[int]) -> None:
    mine, theirs = PastPrompt.of(one), PastPrompt.of(other)
    assert mine.tokens == one
    assert len(mine) == len(one)
    assert mine.shared_with(theirs) == common(one, other)


# --- the nearest ---


@given(st.lists(TOKENS, max_size=20), TOKENS)
def test_the_nearest_is_that_of_comparing_all(prompts, wanted) -> None:
    history = PromptHistory()
    for prompt in prompts:
        history.add(prompt)
    found = history.nearest(wanted)
    longest = max((common(prompt, wanted) for prompt in prompts), default=0)
    if longest == 0:
        assert found is None
        return
    newest = [prompt for prompt in prompts if common(prompt, wanted) == longest][-1]
    assert found is not None
    assert found.tokens == newest


def test_nothing_is_near_where_nothing_is_shared() -> None:
    history = PromptHistory()
    assert history.nearest([1]) is None
    history.add([1, 2])
    assert history.nearest([2, 2]) is None
    assert history.nearest([]) is None


# --- bounds ---


@given(
    st.lists(TOKENS, max_size=30),
    st.integers(0, 20),
    st.integers(0, 5),
)
def test_the_oldest_go_first(prompts, max_tokens, max_prompts) -> None:
    """Against a plain list, oldest first."""
    history = PromptHistory(max_tokens, max_prompts)
    kept: list[list[int]] = []
    for prompt in prompts:
        history.add(prompt)
        if prompt in kept:
            kept.remove(prompt)
        if 0 < len(prompt) <= max_tokens:
            kept.append(prompt)
        while sum(map(len, kept)) > max_tokens or len(kept) > max_prompts:
            kept.pop(0)
        assert len(history) == len(kept)
        assert history.tokens == sum(map(len, kept))
        for one in kept:
            found = history.nearest(one)
            assert found is not None
            assert common(found.tokens, one) == len(one)


# --- documents ---


def span(document: str, first: int = 0, digest: bytes = b"") -> DocumentSpan:
    return DocumentSpan(document, first, first + 1, digest)


def test_order_is_that_of_the_prompt() -> None:
    spans = [span("b", 5), span("a", 2), span("a", 9), span("c", 7)]
    assert document_order(spans) == ("a", "b", "c")
    assert document_order([]) == ()


def test_a_sighting_prefers_the_same_text() -> None:
    prompt = PastPrompt.of([1], [span("a", 0, b"one"), span("a", 3, b"two")])
    seen = sighting_in(prompt, span("a", 0, b"two"))
    assert seen == Sighting(("a",), b"two")
    assert sighting_in(prompt, span("a", 0, b"three")) == Sighting(("a",), b"one")
    assert sighting_in(prompt, span("b")) is None


def test_the_newest_sighting_of_the_same_text_wins() -> None:
    history = PromptHistory()
    history.add([1], [span("a", 0, b"old"), span("x", 1)])
    history.add([2], [span("x"), span("a", 1, b"old")])
    history.add([3], [span("a", 0, b"new")])
    assert sighting(history, span("a", 0, b"old")) == Sighting(("x", "a"), b"old")
    assert sighting(history, span("a", 0, b"new")) == Sighting(("a",), b"new")
    assert sighting(history, span("a", 0, b"third")) == Sighting(("a",), b"new")
    assert sighting(history, span("b")) is None


def test_a_prompt_run_again_keeps_its_documents() -> None:
    history = PromptHistory()
    history.add([1], [span("a")])
    history.add([1])
    found = history.nearest([1])
    assert found is not None
    assert found.spans == (span("a"),)
    history.add([1], [span("b")])
    assert sighting(history, span("a")) is None
    assert len(history) == 1


def test_a_forgotten_document_takes_its_prompts_with_it() -> None:
    history = PromptHistory()
    history.add([1, 2], [span("a"), span("b", 1)])
    history.add([1, 3], [span("b")])
    history.add([1, 4])

    def holds_a(prompt: PastPrompt) -> bool:
        return any(span.document == "a" for span in prompt.spans)

    assert history.forget_where(holds_a) == 1
    assert history.forget_where(holds_a) == 0
    assert sighting(history, span("a")) is None
    assert sighting(history, span("b")) == Sighting(("b",), b"")
    assert (len(history), history.tokens) == (2, 4)
    assert history.nearest([1, 2]) is not None


def test_ids_that_are_no_tokens_are_refused() -> None:
    history = PromptHistory()
    with pytest.raises(OverflowError):
        history.add([-1])
    assert len(history) == 0
