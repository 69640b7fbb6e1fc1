"""Gaps of a prompt, against counting them."""

from __future__ import annotations

from itertools import takewhile

from hypothesis import given
from hypothesis import strategies as st

from pcr_core.tiers.outline import Outline

CHUNK = 16


@given(
    there=st.lists(st.sets(st.integers(0, 11)), min_size=1, max_size=3),
    chunks=st.integers(0, 12),
    rest=st.integers(0, CHUNK - 1),
    index=st.integers(0, 12),
)
def test_gaps_are_counted(there, chunks, rest, index):
    there = [{one for one in some if one < chunks} for some in there]
    index = min(index, chunks)
    outline = Outline(there, chunks, chunks * CHUNK + rest, CHUNK)
    has = [any(at in some for some in there) for at in range(chunks)]
    behind = list(takewhile(lambda at: not has[at], range(index, chunks)))
    before = list(takewhile(lambda at: not has[at], reversed(range(index))))
    gap = next((at for at in range(index, chunks) if not has[at]), chunks)
    assert outline.gap(index) == gap
    assert outline.computed_before(index) == len(before) * CHUNK
    tail = rest if index + len(behind) == chunks else 0
    assert outline.computed_from(index) == len(behind) * CHUNK + tail
