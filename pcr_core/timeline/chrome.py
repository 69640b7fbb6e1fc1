"""A timeline in the Trace Event Format, which Perfetto and chrome://tracing read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pcr_core.timeline.interval import Interval
from pcr_core.timeline.lanes import LANES, TITLES, in_tracks

_PROCESS = 1


def trace_events(
    intervals: Sequence[Interval], first_token: float | None
) -> list[dict[str, Any]]:
    """The events: complete ones ("X"), names of threads ("M"), the first token ("i").

    A lane is a thread. Where its intervals overlap it is several, because events of
    one thread must not.

    Args:
        intervals: In order of their starts.
        first_token: Seconds since submit.
    """
    events = [_named("process_name", 0, name="request")]
    thread = 0
    for lane in LANES:
        tracks = in_tracks(i for i in intervals if i.lane == lane)
        for number, track in enumerate(tracks, 1):
            thread += 1
            title = TITLES[lane] if number == 1 else f"{TITLES[lane]} {number}"
            events.append(_named("thread_name", thread, name=title))
            events.append(_named("thread_sort_index", thread, sort_index=thread))
            events.extend(_complete(track, thread))
    if first_token is not None:
        events.append(
            {
                "name": "first token",
                "ph": "i",
                "s": "p",  # drawn across all threads of the process
                "ts": _nanoseconds(first_token) / 1000,
                "pid": _PROCESS,
                "tid": 0,
            }
        )
    return events


def _named(event: str, thread: int, **arguments: str | int) -> dict[str, Any]:
    return {
        "name": event,
        "ph": "M",
        "pid": _PROCESS,
        "tid": thread,
        "args": arguments,
    }


def _complete(track: Sequence[Interval], thread: int) -> Iterator[dict[str, Any]]:
    for interval in track:
        start, stop = _nanoseconds(interval.start), _nanoseconds(interval.stop)
        yield {
            "name": interval.name,
            "cat": interval.lane,
            "ph": "X",
            "ts": start / 1000,  # microseconds
            "dur": (stop - start) / 1000,
            "pid": _PROCESS,
            "tid": thread,
            "args": {"layer": interval.layer, "tokens": interval.tokens},
        }


def _nanoseconds(seconds: float) -> int:
    """Whole ones: two rounded numbers cannot make neighbours overlap."""
    return round(seconds * 1e9)
