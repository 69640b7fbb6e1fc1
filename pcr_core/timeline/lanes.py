"""The lanes of a timeline: their order, their names, and how overlaps are spread."""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args

from pcr_core.timeline.interval import Interval, Lane

LANES: tuple[Lane, ...] = get_args(Lane)
"""All lanes, from top to bottom: the order in which a prompt passes through them."""

TITLES: dict[Lane, str] = {
    "queue": "queue",
    "read": "SSD reads",
    "load": "load",
    "compute": "compute",
    "offload": "offload",
    "decode": "decode",
}

TRANSFERS: tuple[Lane, ...] = ("read", "load", "offload")
"""Lanes in which KV moves."""

BUSY: tuple[Lane, ...] = ("queue", "compute", "decode")
"""Lanes behind which a transfer costs nothing: something else is waited for."""


def in_tracks(intervals: Iterable[Interval]) -> list[list[Interval]]:
    """Spread intervals over as few tracks as keep them from overlapping in one.

    Args:
        intervals: In order of their starts.
    """
    tracks: list[list[Interval]] = []
    for interval in intervals:
        for track in tracks:
            if track[-1].stop <= interval.start:
                track.append(interval)
                break
        else:
            tracks.append([interval])
    return tracks
