"""Counting what was cached of each document: ranges in, counts out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pcr_core import DocumentTotals, DocumentUse
from pcr_core.document_use import DocumentTally, TokenRange, document_uses

SIZE = 40
ranges = st.lists(
    st.tuples(st.integers(0, SIZE - 1), st.integers(1, 12)).map(
        lambda pair: (pair[0], min(SIZE, sum(pair)))
    ),
    max_size=6,
)


def members(found: list[TokenRange]) -> set[int]:
    return {token for start, stop in found for token in range(start, stop)}


@given(st.dictionaries(st.sampled_from("abc"), ranges), ranges)
def test_counts_are_those_of_the_sets(
    places: dict[str, list[TokenRange]], computed: list[TokenRange]
) -> None:
    ran = members(computed)
    assert document_uses(places, computed) == tuple(
        DocumentUse(id, len(members(own)), len(members(own) - ran))
        for id, own in places.items()
    )


def test_totals_add_up_and_the_latest_comes_first() -> None:
    tally = DocumentTally()
    tally.add(b"a", DocumentUse("a", 10, 4))
    tally.add(b"b", DocumentUse("b", 7, 0))
    tally.add(b"a", DocumentUse("a", 12, 12))
    assert tally.totals() == (
        DocumentTotals("a", 2, 22, 16),
        DocumentTotals("b", 1, 7, 0),
    )


def test_the_one_used_least_recently_leaves() -> None:
    tally = DocumentTally(capacity=2)
    for name in "abac":
        tally.add(name.encode(), DocumentUse(name, 1, 0))
    assert [(one.id, one.requests) for one in tally.totals()] == [("c", 1), ("a", 2)]


def test_the_forgotten_are_gone() -> None:
    tally = DocumentTally()
    for name in "abc":
        tally.add(name.encode(), DocumentUse(name, 1, 0))
    tally.forget_where(lambda digest: digest in {b"a", b"c"})
    assert [one.id for one in tally.totals()] == ["b"]
