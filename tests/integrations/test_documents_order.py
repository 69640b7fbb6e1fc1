"""Orders of documents: permutations within a tolerance of the scores."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from pcr_integrations.documents._order import arrange, by_text, candidates

SCORES = st.lists(st.floats(-2, 2), max_size=7)


@given(scores=SCORES, tolerance=st.floats(0, 3), data=st.data())
def test_no_document_passes_one_that_is_better_by_more_than_the_tolerance(
    scores: list[float], tolerance: float, data: st.DataObject
) -> None:
    wishes = data.draw(st.permutations(range(len(scores))))
    order = arrange(wishes.__getitem__, scores, tolerance)
    assert sorted(order) == list(range(len(scores)))
    for place, index in enumerate(order):
        for later in order[place + 1 :]:
            assert scores[later] - scores[index] <= tolerance


@given(scores=SCORES, data=st.data())
def test_without_a_tolerance_it_is_a_sort(
    scores: list[float], data: st.DataObject
) -> None:
    wishes = data.draw(st.permutations(range(len(scores))))
    order = arrange(wishes.__getitem__, scores, None)
    assert [wishes[index] for index in order] == list(range(len(scores)))
    assert order == arrange(wishes.__getitem__, scores, 5.0)


def test_a_missing_score_leaves_the_order_alone() -> None:
    assert arrange(lambda index: -index, [0.5, None], 9.0) == (0, 1)


@given(texts=st.lists(st.text(), unique=True, max_size=6), data=st.data())
def test_the_stable_order_depends_on_the_texts_alone(
    texts: list[str], data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(texts))
    scores = [None] * len(texts)
    one = [texts[i] for i in arrange(by_text(texts), scores, None)]
    assert [shuffled[i] for i in arrange(by_text(shuffled), scores, None)] == one


def test_candidates_are_the_given_order_and_the_longest_known_beginnings() -> None:
    texts = ["a", "b", "c"]
    earlier = [("x", "a"), ("c", "x"), ("c", "a", "b"), ("b",), ("c", "b")]
    scores = [None] * 3
    assert candidates(texts, earlier, scores, None) == [
        (0, 1, 2),
        (2, 0, 1),
        (2, 1, 0),
        (1, 0, 2),
    ]
    assert candidates(texts, [("x",)], scores, None) == [
        (0, 1, 2),
        (1, 0, 2),
        (2, 0, 1),
    ]
    assert candidates(texts, earlier, [3.0, 2.0, 1.0], 1.0) == [
        (0, 1, 2),
        (0, 2, 1),
        (1, 0, 2),
    ]
    assert candidates(["a", "a"], [("a", "a")], [None, None], None) == [(0, 1)]
