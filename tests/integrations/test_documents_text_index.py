"""Known texts in a string: exactly those that no longer one overlaps."""

from __future__ import annotations

import json

import hypothesis.strategies as st
import pytest
from hypothesis import given

from pcr_integrations.documents._escapes import unescaped
from pcr_integrations.documents._text_index import SHORTEST, Match, TextIndex

# Few letters, so that texts begin alike, contain and overlap each other.
LETTERS = st.text(alphabet="ab", min_size=SHORTEST, max_size=SHORTEST + 8)
REPEATED = st.builds(
    lambda unit, n: (unit * 40)[:n],
    st.text("ab", min_size=1, max_size=3),
    st.integers(SHORTEST, 40),
)
KNOWN = st.sets(LETTERS | REPEATED, max_size=12)


def naive(known: set[str], string: str) -> list[Match]:
    """All occurrences but those that one of a longer text overlaps."""
    every = [
        Match(at, text)
        for text in known
        for at in range(len(string))
        if string.startswith(text, at)
    ]
    return sorted(
        one
        for one in every
        if not any(
            len(other.text) > len(one.text)
            and other.start < one.stop
            and one.start < other.stop
            for other in every
        )
    )


def filled(texts: set[str]) -> TextIndex:
    index = TextIndex()
    for text in texts:
        index.add(text)
    return index


@given(known=KNOWN, data=st.data())
def test_finds_what_a_plain_search_finds(known: set[str], data: st.DataObject) -> None:
    pieces = st.sampled_from(sorted(known)) if known else st.just("")
    parts = st.lists(pieces | st.text(alphabet="abc", max_size=20), max_size=6)
    string = "".join(data.draw(parts))
    assert filled(known).find(string) == naive(known, string)


@given(known=KNOWN, gone=KNOWN, string=st.text(alphabet="ab", max_size=80))
def test_what_was_removed_is_as_if_never_added(
    known: set[str], gone: set[str], string: str
) -> None:
    index = filled(known | gone)
    for text in gone:
        index.remove(text)
    assert index.find(string) == naive(known - gone, string)
    for text in known - gone:
        index.remove(text)
    assert not index._heads
    assert not index._grams


def test_a_text_is_found_at_every_offset() -> None:
    text = "exactly sixteen!"
    assert len(text) == SHORTEST
    index = filled({text})
    for offset in range(SHORTEST):
        assert index.find("." * offset + text + "x") == [Match(offset, text)]
    assert index.find(text[:-1]) == []
    assert index.find("") == []


def test_the_longest_of_nested_texts() -> None:
    nested = {"x" * n for n in range(SHORTEST, 60, 7)}
    assert filled(nested).find("x" * 40) == [
        Match(0, "x" * 37),
        Match(1, "x" * 37),
        Match(2, "x" * 37),
        Match(3, "x" * 37),
    ]


def test_short_texts_are_refused() -> None:
    with pytest.raises(ValueError, match="16 characters, not 15"):
        TextIndex().add("y" * 15)


@given(st.text())
def test_escapes_are_resolved(text: str) -> None:
    for ascii_only in (True, False):
        assert unescaped(json.dumps(text, ensure_ascii=ascii_only)[1:-1]) == text
    shown = repr(text)[1:-1]
    assert unescaped(shown) == text
    unescaped(text)  # whatever it is


@pytest.mark.parametrize("odd", ["\\", "\\u12", "\\ud83dx", "\\U00110000", "\\q"])
def test_what_is_no_escape_is_no_error(odd: str) -> None:
    assert isinstance(unescaped(odd), str)
