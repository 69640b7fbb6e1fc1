"""The quality benchmark: its questions, its orders, and its ways to ask an engine."""

from __future__ import annotations

import argparse
from collections import Counter

import numpy as np
import pytest

from examples.benchmarks.answer_scores import Difference
from examples.benchmarks.quality import (
    DIFFERENCE,
    QUALITY,
    REFERENCES,
    REUSE,
    Tables,
)
from examples.benchmarks.quality_asking import (
    Bench,
    Setting,
    alone,
    by_cache,
    gold_of,
    together,
    turned_round,
)
from examples.benchmarks.quality_questions import (
    Asked,
    answerable,
    ask_all,
    beginnings,
    by_digest,
    messages,
    most_cached,
    with_gold,
)
from examples.benchmarks.stock_answers import Prompt, _answer
from examples.corpus import Plot, Question

PLOTS = [Plot(name, f"The {name} is in the {name} house.") for name in "abcd"]
A, B, C, D = PLOTS


def question(plot: Plot, answer: str) -> Question:
    return Question(f"Where is {plot.id}?", (answer,), plot.id)


# --- questions ---


def test_documents_are_cut_at_a_sentence():
    text = "One two three. Four five six. Seven."
    assert beginnings([Plot("p", text)], 5) == [Plot("p", "One two three.")]


def test_only_short_answers_that_stand_there():
    assert answerable(question(A, "The A house!"), A.text)
    assert not answerable(question(A, "The b house"), A.text)
    long = Question("?", ("a is in the " + "very " * 9 + "house",), "a")
    assert not answerable(long, long.answers[0])


def test_the_right_document_is_there():
    assert with_gold((A, B), A) == (A, B)
    assert with_gold((A, B), C) == (A, C)


def test_two_and_three_documents_by_turns():
    def search(text, k):
        return PLOTS[:k]

    questions = [question(A, "a house"), question(B, "no"), question(D, "d house")]
    found = ask_all(questions, PLOTS, search, 2)
    assert [asked.documents for asked in found] == [(A, B), (A, B, D)]
    with pytest.raises(SystemExit, match="only 2 questions"):
        ask_all(questions, PLOTS, search, 3)


# --- orders ---


def test_the_stable_order_forgets_how_they_came():
    assert by_digest([A, B, C]) == by_digest([C, A, B])
    assert Counter(by_digest(PLOTS)) == Counter(PLOTS)


def test_the_most_cached_order_and_the_first_of_several():
    def cached(orders):
        return [7 if order[0] == C else 3 for order in orders]

    assert most_cached([A, B, C], cached) == (C, A, B)
    assert most_cached([A, B], cached) == (A, B)


# --- asking ---


@pytest.fixture(scope="module")
def asked():
    """Prompts that begin alike for a while, and repeat."""
    documents = [(A, B), (A, C, B), (B, A), (A, B), (A, C)]
    return [
        Asked(f"Where is {n}?", (f"{n} house",), found)
        for n, found in zip("abcab", documents, strict=True)
    ]


@pytest.fixture(scope="module")
def bench(asked, tiny_llama_dir, tmp_path_factory):
    options = argparse.Namespace(
        model=str(tiny_llama_dir), threads=1, max_tokens=3, dram="1MiB", ssd="64MiB"
    )
    return Bench(asked, options, "float32", tmp_path_factory.mktemp("quality"))


@pytest.fixture(scope="module")
def reference(bench):
    return bench.run(REFERENCES[0]).replies


def test_exact_reuse_changes_no_bit(bench, asked, reference):
    assert [reply.reused for reply in reference] == [0] * len(asked)
    exact = [setting for setting in REUSE if setting.exact]
    assert {setting.way for setting in exact} == {alone, together}
    for setting in exact:
        found = bench.run(setting)
        difference = Difference.between(reference, found.replies)
        assert difference.same_bits == len(asked), setting
        assert sum(reply.reused for reply in found.replies) > 0
    for reply in reference:
        assert np.exp(reply.gold).sum(axis=1) == pytest.approx(1.0)


def test_another_order_is_another_prompt(bench, asked, reference):
    turned = Setting("reversed", True, 32, order=turned_round)
    difference = Difference.between(reference, bench.run(turned).replies)
    assert difference.same_bits == 0


def test_orders_of_the_engine(bench, asked):
    seen = []

    def order(engine, one):
        seen.append(by_cache(engine, one))
        return seen[-1]

    bench.run(Setting("cache", True, 32, order=order))
    assert seen[0] == asked[0].documents
    assert seen[2] == (A, B)  # was (B, A), of which only the instructions are cached
    assert [Counter(found) for found in seen] == [Counter(a.documents) for a in asked]


def test_stock_transformers_say_the_same_but_for_rounding(
    asked, reference, tiny_llama, tiny_tokenizer
):
    for own, one in zip(reference, asked, strict=True):
        ids = tiny_tokenizer.apply_chat_template(
            messages(one, one.documents), add_generation_prompt=True, return_dict=False
        )
        gold = gold_of(tiny_tokenizer, one)
        tokens, dists = _answer(tiny_llama, Prompt(tuple(ids), gold), limit=3)
        assert tokens == own.tokens
        assert dists == pytest.approx(own.gold, abs=1e-3)


# --- tables ---


def test_rows_say_how_good_and_how_far(asked, reference):
    tables = Tables("float32", asked)
    row = tables.row("name", reference, reference)
    head = ("dtype", "same prompts", *QUALITY, *DIFFERENCE)
    assert len(row) == len(head)
    assert row[:3] == ["float32", "name", "0%"]
    assert row[-5:] == ["5 of 5", "5 of 5", "0", "0", "0"]
    assert tables.figures["name"]["difference"]["questions"] == len(asked)
