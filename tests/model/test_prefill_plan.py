"""Every token is loaded or computed exactly once, in order, the last one computed."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from pcr_core.model.prefill_plan import (
    ROW_UNIT,
    Cuts,
    Segment,
    free,
    grid,
    plan_prefill,
    shape_independent,
    usable_chunks,
)


@st.composite
def plans(draw: st.DrawFn) -> tuple[int, int, frozenset[int], Cuts]:
    chunk = draw(st.sampled_from((16, 32, 48, 128)))
    cuts = draw(st.sampled_from((shape_independent(), grid(chunk), free())))
    near = draw(st.integers(1, 12)) * chunk + draw(st.integers(-1, 1))
    tokens = draw(st.one_of(st.just(near), st.integers(1, 12 * chunk)))
    most = usable_chunks(tokens, chunk, cuts)
    stored = draw(st.frozensets(st.integers(0, most - 1))) if most else frozenset()
    return tokens, chunk, stored, cuts


@given(plans())
@example((64, 32, frozenset({0, 1}), shape_independent()))
@example((1, 16, frozenset(), free()))
def test_plans(plan: tuple[int, int, frozenset[int], Cuts]) -> None:
    tokens, chunk, stored, cuts = plan
    segments = plan_prefill(tokens, chunk, stored, cuts)
    have: set[int] = set()  # tokens whose KV is in place
    again: list[int] = []
    loaded: list[int] = []
    for segment in segments:
        for index in segment.loads:
            have |= set(range(index * chunk, (index + 1) * chunk))
        loaded += segment.loads
        assert set(range(segment.start)) <= have, (
            "a token before the forward is missing"
        )
        computed = set(range(segment.start, segment.stop))
        assert computed
        again += sorted(computed & have)
        have |= computed
        assert segment.start % cuts.align == 0
        if cuts.step is not None:
            assert segment.stop - segment.start <= cuts.step
        assert segment.stores == tuple(
            i for i in range(tokens // chunk) if _inside(i, chunk, segment)
        )
    assert have == set(range(tokens))
    assert segments[-1].stop == tokens
    assert loaded == sorted(stored), "each stored chunk is loaded once, in order"
    starts = [(s.start, s.stop) for s in segments]
    assert starts == sorted(starts)
    assert all(a[1] <= b[0] for a, b in pairwise(starts))
    # Only the last tile runs again, and only where the last chunk was stored.
    last = (tokens - 1) // cuts.align * cuts.align
    whole_prompt_stored = tokens % chunk == 0 and tokens // chunk - 1 in stored
    assert again == (list(range(last, tokens)) if whole_prompt_stored else [])


def _inside(index: int, chunk: int, segment: Segment) -> bool:
    return segment.start <= index * chunk and (index + 1) * chunk <= segment.stop


@given(plans())
def test_the_grid_runs_the_same_forwards_cold_and_warm(plan: Any) -> None:
    tokens, chunk, stored, _ = plan
    cuts = grid(chunk)
    usable = {i for i in stored if i < usable_chunks(tokens, chunk, cuts)}
    cold = {(s.start, s.stop) for s in plan_prefill(tokens, chunk, (), cuts)}
    warm = {(s.start, s.stop) for s in plan_prefill(tokens, chunk, usable, cuts)}
    assert warm <= cold
    assert len(cold - warm) == len(usable)


@given(plans())
def test_without_a_step_a_cold_prefill_is_one_forward(plan: Any) -> None:
    tokens, chunk, _, _ = plan
    for cuts in (shape_independent(), free()):
        assert plan_prefill(tokens, chunk, (), cuts) == [
            Segment((), 0, tokens, tuple(range(tokens // chunk)))
        ]


@pytest.mark.parametrize(
    ("tokens", "fine", "coarse"),
    [(1, 0, 0), (31, 0, 0), (32, 1, 0), (33, 1, 1), (64, 2, 1), (65, 2, 2)],
)
def test_usable_chunks(tokens: int, fine: int, coarse: int) -> None:
    assert usable_chunks(tokens, 32, shape_independent()) == fine
    assert usable_chunks(tokens, 32, free()) == fine
    assert usable_chunks(tokens, 32, grid(32)) == coarse
    # A chunk that is one tile would run again whole: reading it gains nothing.
    assert usable_chunks(32, ROW_UNIT, shape_independent()) == 1


def test_a_hole_in_the_middle_is_one_forward() -> None:
    first, last = plan_prefill(100, 16, {0, 1, 3, 4, 5}, shape_independent())
    assert first == Segment((0, 1), 32, 48, (2,))
    assert last == Segment((3, 4, 5), 96, 100, ())


def test_cuts_say_what_they_promise() -> None:
    assert [c.exact for c in (shape_independent(), grid(16), free())] == [
        True,
        True,
        False,
    ]
    assert [c.name for c in (shape_independent(), grid(16), free())] == [
        "shape-independent",
        "grid",
        "free",
    ]
