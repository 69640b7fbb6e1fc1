"""The trace is what the Trace Event Format asks for, and loses nothing."""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcr_core.timeline import Interval, Timeline
from pcr_core.timeline.lanes import LANES

seconds = st.floats(-10, 1000, allow_nan=False)


@st.composite
def intervals(draw):
    start, stop = sorted((draw(seconds), draw(seconds)))
    layer = draw(st.none() | st.integers(0, 79))
    return Interval(draw(st.sampled_from(LANES)), layer, start, stop, 128)


def by_phase(timeline):
    found = defaultdict(list)
    for event in timeline.to_chrome_trace()["traceEvents"]:
        found[event["ph"]].append(event)
    return found


@given(st.lists(intervals(), max_size=20), st.none() | seconds)
def test_events_are_valid_and_those_of_a_thread_never_overlap(some, first_token):
    made = Timeline(some, first_token=first_token)
    events = by_phase(made)
    assert set(events) <= {"X", "M", "i"}
    threads = defaultdict(list)
    for event in events["X"]:
        assert event["dur"] >= 0
        threads[event["pid"], event["tid"]].append(event)
    for track in threads.values():
        assert len({event["cat"] for event in track}) == 1
        edges = [
            (round(e["ts"] * 1000), round((e["ts"] + e["dur"]) * 1000)) for e in track
        ]
        for (_, stop), (start, _) in itertools.pairwise(edges):
            assert stop <= start
    named = {(e["pid"], e["tid"]) for e in events["M"] if e["name"] == "thread_name"}
    assert named == set(threads)
    assert len(events["i"]) == (first_token is not None)
    text = json.dumps(made.to_chrome_trace(), allow_nan=False)
    assert json.loads(text) == made.to_chrome_trace()


@given(st.lists(intervals(), max_size=20))
def test_every_interval_is_an_event_in_microseconds(some):
    def edges(lane, layer, start, stop):
        return lane, -1 if layer is None else layer, start, stop

    events = by_phase(Timeline(some))["X"]
    found = sorted(
        edges(
            e["cat"],
            e["args"]["layer"],
            round(e["ts"] * 1000),
            round((e["ts"] + e["dur"]) * 1000),
        )
        for e in events
    )
    expected = sorted(
        edges(i.lane, i.layer, round(i.start * 1e9), round(i.stop * 1e9)) for i in some
    )
    assert found == expected


def test_a_millisecond_is_a_thousand(pipeline):
    events = by_phase(pipeline(2))
    computed = [e for e in events["X"] if e["cat"] == "compute"]
    assert [e["name"] for e in computed] == ["compute, layer 0", "compute, layer 1"]
    assert [e["ts"] for e in computed] == [4500.0, 5500.0]
    assert [e["dur"] for e in computed] == [1000.0, 1000.0]
    (first,) = events["i"]
    assert (first["name"], first["ts"], first["s"]) == ("first token", 6750.0, "p")


def test_threads_are_lanes_in_order_and_split_where_reads_overlap():
    some = [
        Interval("load", 0, 3.0, 4.0),
        Interval("read", 0, 0.0, 2.0),
        Interval("read", 1, 1.0, 3.0),
        Interval("read", 2, 2.0, 4.0),
    ]
    events = by_phase(Timeline(some))
    names = {
        e["tid"]: e["args"]["name"] for e in events["M"] if e["name"] == "thread_name"
    }
    order = {
        e["args"]["sort_index"]: e["tid"]
        for e in events["M"]
        if e["name"] == "thread_sort_index"
    }
    assert [names[order[index]] for index in sorted(order)] == [
        "SSD reads",
        "SSD reads 2",
        "load",
    ]
    threads = {e["name"]: e["tid"] for e in events["X"]}
    assert threads["read, layer 0"] == threads["read, layer 2"]
    assert threads["read, layer 1"] != threads["read, layer 0"]


def test_the_file_is_the_trace(pipeline, tmp_path):
    made = pipeline(3)
    made.save_chrome_trace(tmp_path / "trace.json")
    made.save_chrome_trace(str(tmp_path / "again.json"))
    read = json.loads((tmp_path / "trace.json").read_text())
    assert read == made.to_chrome_trace()
    assert read["displayTimeUnit"] == "ms"
    assert read["otherData"] == {"prompt_tokens": 144, "cached_tokens": 128}
    assert math.isclose(sum(e.get("dur", 0) for e in read["traceEvents"]), 17250.0)
    with pytest.raises(FileNotFoundError):
        made.save_chrome_trace(tmp_path / "no" / "trace.json")
