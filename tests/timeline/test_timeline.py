"""What a timeline adds up: against hand-made cases, and against counting moments."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcr_core.timeline import Interval, Timeline
from pcr_core.timeline.lanes import BUSY, LANES, TRANSFERS, in_tracks
from pcr_core.timeline.layout import ticks, window

FIRST, LAST = -6, 36  # seconds between which everything happens


def at(lane, start, stop, layer=None):
    return Interval(lane, layer, float(start), float(stop))


@st.composite
def intervals(draw):
    start = draw(st.integers(FIRST, 24))
    stop = start + draw(st.integers(0, 12))
    layer = draw(st.none() | st.integers(0, 5))
    return at(draw(st.sampled_from(LANES)), start, stop, layer)


def cells_of(timeline, *lanes):
    """The whole seconds in which one of the lanes is busy, found by looking."""
    return {
        second
        for second in range(FIRST, LAST + 1)
        for i in timeline.intervals
        if i.lane in lanes and i.start <= second + 0.5 < i.stop
    }


# --- made by hand ---


def test_a_load_under_compute_is_hidden_and_the_rest_is_exposed():
    made = Timeline((at("load", 0, 4, 0), at("compute", 3, 6, 0), at("load", 5, 8, 1)))
    assert made.exposed_spans == ((0.0, 3.0), (6.0, 8.0))
    assert made.exposed == 5.0
    assert made.busy("load") == 7.0
    assert made.busy("offload") == 0.0


def test_transfers_at_once_are_exposed_once():
    made = Timeline((at("read", 0, 4), at("read", 1, 5), at("load", 2, 6)))
    assert made.exposed == 6.0
    assert made.busy("read") == 5.0


def test_what_moves_while_the_request_waits_its_turn_costs_nothing():
    made = Timeline((at("queue", 0, 10), at("read", 2, 12)))
    assert made.exposed_spans == ((10.0, 12.0),)


def test_the_parts_of_ttft_name_what_was_waited_for():
    made = Timeline(
        (
            at("queue", 0, 2),
            at("read", 1, 5),
            at("load", 4, 7, 0),
            at("compute", 6, 9, 0),
            at("offload", 8, 10, 0),
            at("decode", 11, 14),
        ),
        first_token=11.0,
    )
    assert made.ttft_parts == {
        "queue": 2.0,
        "compute": 3.0,
        "read": 3.0,
        "load": 1.0,
        "offload": 1.0,
        "other": 1.0,
    }
    assert Timeline(made.intervals).ttft_parts == {}


def test_a_pipeline_exposes_its_first_load_and_its_last_offload(pipeline):
    made = pipeline(30)
    assert made.exposed == pytest.approx(0.5e-3 + 0.25e-3)
    assert made.busy("compute") == pytest.approx(30e-3)
    assert made.layers == 30
    assert made.lanes == ("queue", "load", "compute", "offload", "decode")
    assert made.ttft_parts["other"] == pytest.approx(0.0, abs=1e-12)


def test_nothing_at_all():
    made = Timeline(())
    assert (made.lanes, made.layers, made.span) == ((), 0, (0.0, 0.0))
    assert (made.exposed, made.ttft_parts) == (0.0, {})
    assert "nothing was recorded" in str(made)
    assert "nothing was recorded" in made._repr_html_()


def test_one_that_took_no_time():
    made = Timeline((at("load", 3, 3, 0),), first_token=3.0)
    assert (made.exposed, made.layers, made.span) == (0.0, 1, (0.0, 3.0))
    assert made.ttft_parts["other"] == 3.0


@pytest.mark.parametrize(
    ("start", "stop"), [(2.0, 1.0), (0.0, math.inf), (math.nan, 1.0), (0.0, math.nan)]
)
def test_what_is_no_interval_is_refused(start, stop):
    with pytest.raises(ValueError, match="ends before it starts, or never"):
        Timeline((Interval("load", 0, start, stop),))


def test_it_is_in_order_and_cannot_be_changed():
    late, early = at("load", 5, 6), at("compute", 1, 9)
    made = Timeline([late, early])
    assert made.intervals == (early, late)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.intervals = ()
    with pytest.raises(dataclasses.FrozenInstanceError):
        late.start = 0.0
    assert "Interval" not in repr(made)


def test_the_table_says_where_ttft_went(pipeline):
    lines = dict(pipeline(30, 3).rows())
    assert lines["prompt"] == "144 tokens: 128 reused, 16 computed"
    assert lines["first token"] == "95.8 ms after submit"
    assert lines["  computing"] == "90.0 ms (94%)"
    assert lines["load"] == "45.0 ms (90 intervals of 30 layers)"
    assert lines["queue"] == "4.0 ms (1 interval)"
    assert lines["exposed"] == "1.8 ms of 56.5 ms of transfers"
    assert "  only reading from SSD" not in lines


# --- against counting ---


@given(st.lists(intervals(), max_size=12))
def test_exposed_time_is_what_counting_moments_gives(some):
    made = Timeline(some)
    exposed = cells_of(made, *TRANSFERS) - cells_of(made, *BUSY)
    assert made.exposed == len(exposed)
    for lane in LANES:
        assert made.busy(lane) == len(cells_of(made, lane))
    joined = [moment for span in made.exposed_spans for moment in span]
    assert joined == sorted(set(joined)), "sorted, disjoint, none of no length"


@given(st.lists(intervals(), max_size=12), st.integers(0, 30))
def test_the_parts_of_ttft_are_what_counting_gives_and_add_up(some, first_token):
    made = Timeline(some, first_token=float(first_token))
    left = set(range(first_token))
    expected = {}
    for lane in ("queue", "compute", *TRANSFERS):
        expected[lane] = len(left & cells_of(made, lane))
        left -= cells_of(made, lane)
    assert made.ttft_parts == {**expected, "other": len(left)}
    assert sum(made.ttft_parts.values()) == first_token


@given(st.lists(intervals(), max_size=12))
def test_tracks_keep_all_apart_and_are_no_more_than_needed(some):
    ordered = Timeline(some).intervals
    tracks = in_tracks(ordered)
    assert sorted(i.start for track in tracks for i in track) == [
        i.start for i in ordered
    ]
    for track in tracks:
        for before, after in itertools.pairwise(track):
            assert before.stop <= after.start
    at_once = max(
        (sum(a.start <= b.start < a.stop for a in some) for b in some), default=0
    )
    empty = any(i.start == i.stop for i in some)
    assert len(tracks) == at_once or (empty and len(tracks) <= at_once + 1)


@given(st.lists(intervals(), max_size=8), st.none() | st.integers(0, 30))
def test_the_window_shows_the_prefill_whole(some, first_token):
    made = Timeline(some, first_token=first_token)
    start, stop = window(made.intervals, made.first_token)
    assert made.span[0] <= start <= stop <= made.span[1]
    served = max([0.0, *(i.stop for i in some if i.lane == "queue")])
    ends = [i.stop for i in some if i.lane not in ("queue", "decode")]
    done = max([first_token or 0.0, *ends])
    if served < done:
        assert start <= served
        assert stop >= done
        assert stop - start <= 2.5 * (done - served)
    assert all(start - 1e-9 <= moment <= stop + 1e-9 for moment in ticks((start, stop)))
    assert len(ticks((start, stop))) <= 11


def test_a_long_wait_and_a_long_answer_are_cut_short(pipeline):
    short = pipeline(4)
    assert window(short.intervals, short.first_token)[0] == 0.0
    start, stop = window(
        (at("queue", 0, 60), at("compute", 60, 61), at("decode", 61, 90)), 61.0
    )
    assert (start, stop) == (59.75, 61.25)
