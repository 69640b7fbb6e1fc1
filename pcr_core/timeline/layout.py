"""What both drawings show: boxes in lanes, the window of time, and the words.

It decides; ``figure`` and ``svg`` only paint.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pcr_core.timeline.interval import Interval
from pcr_core.timeline.lanes import LANES, in_tracks
from pcr_core.timeline.palette import box_colour
from pcr_core.timeline.spans import Span

_MARGIN = 0.25
"""Share of the prefill that is shown of a longer queue before it and of the decoding
behind it."""

FIRST_TOKEN = "first token"


@dataclass(frozen=True, slots=True)
class Box:
    """An interval's place: lane ``n`` reaches from ``n`` to ``n + 1``, 0 at the top.

    Attributes:
        interval: What it shows.
        top, height: Where, in lanes; intervals that overlap stand below each other.
        colour: As ``#rrggbb``.
    """

    interval: Interval
    top: float
    height: float
    colour: str


@dataclass(frozen=True, slots=True)
class Picture:
    """All that a drawing needs.

    Attributes:
        boxes: In order of lanes and tracks, then of time.
        labels: Name and busy time of each lane, top to bottom.
        layers: How many layers the colours tell apart.
        window: The time shown, in seconds since submit; some boxes may be outside.
        first_token: When it came, or ``None``.
        exposed: When KV moved and nothing was computed.
        exposed_text: The same in words.
        title, axis: The words above and below.
    """

    boxes: tuple[Box, ...]
    labels: tuple[tuple[str, str], ...]
    layers: int
    window: Span
    first_token: float | None
    exposed: tuple[Span, ...]
    exposed_text: str
    title: str
    axis: str


def duration(seconds: float) -> str:
    """A duration for people."""
    return f"{seconds:.1f} s" if seconds >= 10 else f"{1e3 * seconds:.1f} ms"


def place(intervals: Sequence[Interval], layers: int) -> tuple[Box, ...]:
    """Give each interval, in order of their starts, a box with margins in its lane."""
    boxes: list[Box] = []
    for row, lane in enumerate(LANES):
        tracks = in_tracks(i for i in intervals if i.lane == lane)
        height = 0.8 / max(1, len(tracks))
        for number, track in enumerate(tracks):
            top = row + 0.1 + number * height
            for index, interval in enumerate(track):
                colour = box_colour(interval.layer, layers, index)
                boxes.append(Box(interval, top, height, colour))
    return tuple(boxes)


def window(intervals: Sequence[Interval], first_token: float | None) -> Span:
    """The time to show: the prefill whole, long waiting and decoding cut short.

    Otherwise a request that waited for a minute, or wrote a page, would show its
    prefill as a hairline.
    """
    start = min((i.start for i in intervals), default=0.0)
    stop = max((i.stop for i in intervals), default=0.0)
    start, stop = min(start, 0.0), max(stop, first_token or 0.0)
    served = max([0.0, *(i.stop for i in intervals if i.lane == "queue")])
    ends = [i.stop for i in intervals if i.lane not in ("queue", "decode")]
    done = max([first_token or 0.0, *ends])
    width = done - served
    if width <= 0:
        return start, stop
    margin = _MARGIN * width
    left = served - margin if served > width else -margin
    return max(start, left), min(stop, done + margin)


def axis_text(shown: Span, whole: Span) -> str:
    """What the time axis says, with what lies outside the window."""
    parts = [
        f"{duration(seconds)} {where}"
        for seconds, where in (
            (shown[0] - whole[0], "before"),
            (whole[1] - shown[1], "after"),
        )
        if seconds > 0
    ]
    hidden = f" (not shown: {', '.join(parts)})" if parts else ""
    return f"ms since submit{hidden}"


def ticks(shown: Span, most: int = 10) -> list[float]:
    """Round moments in ``shown``, at most ``most`` or so, in seconds."""
    width = shown[1] - shown[0]
    if width <= 0:
        return [shown[0]]
    power = 10.0 ** math.floor(math.log10(width / most))
    step = next(
        s for s in (power, 2 * power, 5 * power, 10 * power) if s * most >= width
    )
    first, last = math.ceil(shown[0] / step), math.floor(shown[1] / step)
    return [number * step for number in range(first, last + 1)]
