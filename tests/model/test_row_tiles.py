"""Tiles cover any number of rows, at the least cost there is."""

from __future__ import annotations

import itertools
import math

import hypothesis.strategies as st
import pytest
from hypothesis import given

from pcr_core.model.row_tiles import (
    SIZES,
    TIMED_SIZES,
    RowTiles,
    best_class,
    interpolate,
)

costs = st.dictionaries(
    st.sampled_from((16, 32, 48, 64, 128, 256)),
    st.floats(0.01, 10.0),
    min_size=1,
    max_size=4,
)


@given(costs, st.integers(1, 1500))
def test_a_plan_covers_the_rows_without_a_tile_too_many(costs, rows) -> None:
    plan = RowTiles(costs).plan(rows)
    assert set(plan) <= set(costs)
    assert list(plan) == sorted(plan, reverse=True)
    assert sum(plan) >= rows
    assert sum(plan) - min(plan) < rows, "the last tile has no row"


@given(costs, st.integers(1, 160))
def test_a_plan_costs_the_least(costs, rows) -> None:
    """Against all combinations, where few tiles are enough."""
    tiles = RowTiles(costs)
    most = math.ceil(rows / min(costs))
    cheapest = min(
        sum(costs[size] for size in combination)
        for count in range(1, min(most, 10) + 1)
        for combination in itertools.combinations_with_replacement(costs, count)
        if sum(combination) >= rows
    )
    bulk = max(0, rows // max(costs) - 1)
    if bulk == 0:
        assert tiles.seconds(rows) == pytest.approx(cheapest)
    else:  # what exceeds two largest tiles goes to the largest without a search
        assert tiles.seconds(rows) >= cheapest * (1 - 1e-9)


def test_rows_that_fit_a_tile_take_it() -> None:
    tiles = RowTiles({16: 1.0, 64: 1.5})
    assert tiles.plan(64) == (64,)
    assert tiles.plan(65) == (64, 16)
    assert tiles.plan(16) == (16,)
    assert tiles.plan(33) == (64,)
    assert tiles.seconds(65) == 2.5


def test_the_class_that_is_best_overall() -> None:
    small = {16: 1.0}
    large = {64: 1.0, 256: 2.0, 1024: 4.0}
    assert best_class([small, large]).costs == large
    assert best_class([small]).costs == small
    assert best_class([large, {16: 0.01, 1024: 4.0}]).costs == {16: 0.01, 1024: 4.0}


def test_interpolation() -> None:
    timed = {16: 1.0, 32: 2.0, 64: 6.0}
    assert interpolate(timed, 24) == 1.5
    assert interpolate(timed, 48) == 4.0
    assert interpolate(timed, 32) == 2.0
    assert interpolate(timed, 96) == 10.0  # beyond the last: the last slope


def test_sizes() -> None:
    assert set(TIMED_SIZES) <= set(SIZES)
    assert all(size % 16 == 0 for size in SIZES)
    assert list(SIZES) == sorted(set(SIZES))
