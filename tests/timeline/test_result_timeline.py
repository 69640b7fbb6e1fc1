"""``Result.timeline()``: what was recorded, completed by what the timing tells."""

from __future__ import annotations

import pytest

from pcr_core import Result, Timing, Usage
from pcr_core.timeline import Interval

TIMING = Timing(queue=1.0, load_wait=0.5, prefill=2.5, ttft=4.0, decode=3.0, total=7.0)
SSD = Usage(1000, 9, {"dram": 256, "ssd": 512})
DRAM = Usage(1000, 9, {"dram": 768})


def result(usage=SSD, timing=TIMING, intervals=()):
    return Result("text", [1, 2], None, "stop", usage, timing, tuple(intervals))


def test_without_intervals_it_shows_what_the_timing_tells():
    made = result().timeline()
    assert made.intervals == (
        Interval("queue", None, 0.0, 1.0),
        Interval("read", None, 1.0, 1.5, 512),
        Interval("compute", None, 1.5, 4.0),
        Interval("decode", None, 4.0, 7.0),
    )
    assert (made.prompt_tokens, made.cached_tokens) == (1000, 768)
    assert made.first_token == 4.0
    assert made.ttft_parts["compute"] == 2.5
    assert made.layers == 0


def test_a_wait_without_anything_from_ssd_was_no_read():
    made = result(DRAM).timeline()
    assert made.lanes == ("queue", "compute", "decode")
    assert made.ttft_parts["other"] == 0.5


def test_recorded_layers_take_the_place_of_the_guess():
    recorded = [
        Interval("load", 0, 1.0, 1.5, 768),
        Interval("compute", 0, 1.5, 3.5, 232),
    ]
    made = result(DRAM, intervals=recorded).timeline()
    assert [i for i in made.intervals if i.layer == 0] == recorded
    assert made.lanes == ("queue", "load", "compute", "decode")
    assert made.busy("compute") == 2.0


@pytest.mark.parametrize(("begun", "read"), [(1.25, 0.25), (2.0, 0.5), (0.5, 0.0)])
def test_a_read_that_was_not_recorded_ends_where_recorded_work_begins(begun, read):
    recorded = [Interval("load", 0, begun, 2.5, 768)]
    made = result(intervals=recorded).timeline()
    assert made.busy("read") == read
    own = [Interval("read", None, 0.25, 0.75), *recorded]
    assert result(intervals=own).timeline().busy("read") == 0.5


@pytest.mark.parametrize("lane", ["queue", "decode"])
def test_a_recorded_lane_is_not_filled_in_again(lane):
    made = result(intervals=[Interval(lane, None, 0.25, 0.75)]).timeline()
    assert made.busy(lane) == 0.5


def test_without_any_timing_it_is_empty():
    made = result(timing=Timing()).timeline()
    assert (made.intervals, made.first_token) == ((), None)
    assert "nothing was recorded" in str(made)


def test_the_intervals_do_not_flood_the_repr():
    recorded = [Interval("load", 0, 1.0, 1.5)]
    assert repr(result(intervals=recorded)) == repr(result())
