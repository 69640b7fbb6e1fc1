"""Every token is loaded or computed exactly once, in order, the last one computed."""

from __future__ import annotations

from collections.abc import Collection
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
    front_chunk,
    grid,
    must_compute,
    next_segment,
    shape_independent,
    usable_chunks,
)


def plan_prefill(
    tokens: int, chunk_tokens: int, stored: Collection[int], cuts: Cuts
) -> list[Segment]:
    """All segments of a prefill during which nothing changes."""
    segments: list[Segment] = []
    position = 0
    while position < tokens:
        args = (position, tokens, chunk_tokens, stored, (), cuts)
        segments.append(next_segment(*args))
        position = segments[-1].stop
    return segments


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
@example((64, 32, frozenset({0, 1}), shape_independent()))
@example((1024, 512, frozenset({1}), Cuts("steps", 16, 16, step=64)))
def test_one_at_a_time_is_the_plan_made_at_once(plan: Any) -> None:
    assert plan_prefill(*plan) == planned_at_once(*plan)


@given(plans(), st.data())
def test_reads_that_end_while_it_runs(plan: Any, data: st.DataObject) -> None:
    """Whatever happens in between, all is there in the end and nothing came twice."""
    tokens, chunk, known, cuts = plan
    pending = set(data.draw(st.sets(st.sampled_from(sorted(known)))) if known else ())
    sources = set(known - pending)
    have: set[int] = set()
    position = 0
    while position < tokens:
        for index in data.draw(st.sets(st.sampled_from(sorted(pending or {-1})))):
            pending.discard(index)
            if index >= 0 and data.draw(st.booleans()):
                sources.add(index)
        while (front := front_chunk(position, chunk, sources)) in pending:
            pending.remove(front)
            if data.draw(st.booleans()):
                sources.add(front)
        segment = next_segment(position, tokens, chunk, sources, pending, cuts)
        for index in segment.loads:
            assert index in sources
            assert not have & set(range(index * chunk, (index + 1) * chunk))
            have |= set(range(index * chunk, (index + 1) * chunk))
        assert have >= set(range(segment.start))
        again = have & set(range(segment.start, segment.stop))
        assert not again or segment.stop == tokens
        have |= set(range(segment.start, segment.stop))
        assert segment.start % cuts.align == 0
        if cuts.step is not None:
            assert segment.stop - segment.start <= cuts.step
        else:
            end = segment.stop // chunk
            assert segment.stop == tokens or end in sources or end in pending
        position = segment.stop
    assert have == set(range(tokens))


def test_nothing_past_a_read_is_computed() -> None:
    args = (100, 16, {0, 4}, {2, 5}, shape_independent())
    assert next_segment(0, *args) == Segment((0,), 16, 32, (1,))
    assert front_chunk(32, 16, {0, 4}) == 2  # settle that one first
    args = (100, 16, {0, 2, 4}, {5}, shape_independent())
    assert next_segment(32, *args) == Segment((2,), 48, 64, (3,))
    assert front_chunk(64, 16, {0, 2, 4}) == 5


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


@pytest.mark.parametrize("cuts", [shape_independent(), grid(32), free()])
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 32, 33, 48, 64, 95, 96, 97, 100])
def test_what_runs_in_any_case(tokens: int, cuts: Cuts) -> None:
    stored = set(range(usable_chunks(tokens, 32, cuts)))
    (only,) = plan_prefill(tokens, 32, stored, cuts)
    assert must_compute(tokens, 32, cuts) == only.stop - only.start


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


def planned_at_once(
    tokens: int, chunk_tokens: int, stored: Collection[int], cuts: Cuts
) -> list[Segment]:
    """The reference: the whole plan at once, from a fixed set of stored chunks."""
    last = (tokens - 1) // cuts.align * cuts.align
    segments: list[Segment] = []
    loads: list[int] = []
    for start, stop in _ranges(tokens, chunk_tokens, stored, last):
        first = start // chunk_tokens
        loads += [i for i in _between(segments, first, chunk_tokens) if i in stored]
        if start % chunk_tokens and first in stored:
            loads.append(first)
        for a, b in _steps(start, stop, cuts.step):
            ends = range(a // chunk_tokens, b // chunk_tokens)
            stores = [i for i in ends if i not in stored]
            segments.append(Segment(tuple(loads), a, b, tuple(stores)))
            loads = []
    return segments


def _ranges(
    tokens: int, chunk_tokens: int, stored: Collection[int], last: int
) -> list[tuple[int, int]]:
    """Maximal token ranges that must be computed."""
    ranges: list[tuple[int, int]] = []
    for start in range(0, tokens, chunk_tokens):
        stop = min(start + chunk_tokens, tokens)
        if start // chunk_tokens in stored:
            start = max(start, last)
        if start >= stop or (start // chunk_tokens in stored and stop < tokens):
            continue
        if ranges and ranges[-1][1] == start:
            ranges[-1] = (ranges[-1][0], stop)
        else:
            ranges.append((start, stop))
    return ranges


def _between(segments: list[Segment], first: int, chunk_tokens: int) -> range:
    """Chunks after the last computed range and before chunk ``first``."""
    done = -(-segments[-1].stop // chunk_tokens) if segments else 0
    return range(done, first)


def _steps(start: int, stop: int, step: int | None) -> list[tuple[int, int]]:
    """Cut a range where the grid says."""
    if step is None:
        return [(start, stop)]
    edges = [start, *range((start // step + 1) * step, stop, step), stop]
    return list(pairwise(edges))
