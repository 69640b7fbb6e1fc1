"""Scores of answers and distances between runs, by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.benchmarks.answer_scores import (
    Difference,
    Quality,
    Reply,
    best_of,
    contains,
    divergences,
    exact_match,
    f1,
    normalised,
)

HALVES = np.log([[0.5, 0.5], [0.5, 0.5]])
SKEWED = np.log([[0.25, 0.75], [0.5, 0.5]])


def reply(gold=HALVES, tokens=(1, 2), text="the red door", reused=3):
    return Reply(text, tokens, gold, (0, 1), prompt_tokens=10, reused=reused)


@pytest.mark.parametrize(
    ("text", "bare"),
    [
        ("The  Cat, a dog; AN owl!", "cat dog owl"),
        ("O'Neil's theatre", "oneils theatre"),
        ("a", ""),
        ("Banana and another", "banana and another"),
    ],
)
def test_normalised_as_squad_does(text, bare):
    assert normalised(text) == bare


@pytest.mark.parametrize(
    ("text", "answer", "em", "shared", "inside"),
    [
        ("The red door.", "red door", 1, 1.0, 1),
        ("It is the red door", "a red house", 0, 2 * 1 / (4 + 2), 0),
        ("red red", "red", 0, 2 * 1 / 3, 1),
        ("blue", "red", 0, 0.0, 0),
        ("infrared", "red", 0, 0.0, 0),
        ("the", "a", 1, 1.0, 1),  # nothing is left of either
        ("", "red", 0, 0.0, 0),
    ],
)
def test_scores_by_hand(text, answer, em, shared, inside):
    assert exact_match(text, answer) == em
    assert f1(text, answer) == pytest.approx(shared)
    assert contains(text, answer) == inside


def test_the_best_reference_counts():
    assert best_of(f1, "red door", ["blue", "red", "house"]) == pytest.approx(2 / 3)


def test_divergence_by_hand():
    expected = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert divergences(HALVES, SKEWED) == pytest.approx([expected, 0.0])
    assert not divergences(SKEWED, SKEWED).any()


@given(st.lists(st.floats(-20, 20), min_size=2, max_size=9), st.integers(0, 2**32))
def test_divergence_is_never_negative(logits, seed):
    noise = np.random.default_rng(seed).normal(size=len(logits))
    one, two = (x - np.log(np.exp(x).sum()) for x in (logits, logits + noise))
    assert divergences(one[None], two[None])[0] >= 0


def test_likelihood_of_the_reference_answer():
    """Token 0, then token 1."""
    assert reply(SKEWED).nll == pytest.approx((math.log(4) + math.log(2)) / 2)


def test_quality_by_hand():
    replies = [reply(), reply(SKEWED, text="It is a red house", reused=0)]
    found = Quality.of(replies, [["red door"], ["blue", "red house"]])
    assert found.exact_match == 0.5
    assert found.f1 == pytest.approx((1 + 2 * 2 / (4 + 2)) / 2)
    assert found.contains == 1.0
    assert found.reused == 3 / 20
    assert found.nll == pytest.approx(
        (math.log(2) + (math.log(4) + math.log(2)) / 2) / 2
    )


def test_a_run_does_not_differ_from_itself():
    runs = [reply(), reply(SKEWED)]
    found = Difference.between(runs, runs)
    assert (found.questions, found.same_answers, found.same_bits) == (2, 2, 2)
    assert found.kl_mean == found.kl_most == found.nll == found.nll_error == 0


def test_difference_by_hand():
    one, two = reply(), reply(SKEWED)
    other = replace(one, tokens=(1, 3))
    found = Difference.between([one, one, one], [one, two, other])
    assert (found.questions, found.same_answers, found.same_bits) == (3, 2, 1)
    apart = divergences(HALVES, SKEWED)
    assert found.kl_mean == pytest.approx(apart.sum() / 6)
    assert found.kl_most == pytest.approx(apart.max())
    more = (two.nll - one.nll) / 3
    assert found.nll == pytest.approx(more)
    # Sample of (0, 3m, 0) with mean m: deviation m times the root of 3, over root of 3.
    assert found.nll_error == pytest.approx(more)


def test_one_bit_is_a_difference():
    almost = HALVES.copy()
    almost[0, 0] = np.nextafter(almost[0, 0], 0)
    found = Difference.between([reply()], [reply(almost)])
    assert (found.same_answers, found.same_bits) == (1, 0)
