"""The timeline as an inline SVG, for notebooks: nothing needs to be installed.

Each box tells its name and its times when pointed at.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator

from pcr_core.timeline.lanes import LANES
from pcr_core.timeline.layout import FIRST_TOKEN, Box, Picture, duration, ticks
from pcr_core.timeline.palette import EXPOSED, shade

_WIDTH, _LEFT, _RIGHT = 960, 96, 944
_TOP, _LANE = 40, 30
_BOTTOM = _TOP + _LANE * len(LANES)
_HEIGHT = _BOTTOM + 38
_HAIRLINE = 0.5
"""Pixels; a box is at least this wide, and two that share them are drawn as one."""

_SEAM = 0.3
"""Pixels by which a box reaches under the next one, or white would shine through."""

_KEY_WIDTH, _KEY_STEPS = 100, 20


def draw(picture: Picture) -> str:
    """An ``<svg>`` element, 960 units wide, with a white ground."""
    scale = _Scale(*picture.window)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'style="width:100%;max-width:{_WIDTH}px" font-family="sans-serif" '
        'font-size="11" fill="#222">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
        _text(8, 18, picture.title, 'font-size="13"'),
        *_exposed(picture, scale),
        *_key(picture.layers),
        *_lanes(picture),
        *_boxes(picture, scale),
        *_axis(picture, scale),
        *_first_token(picture, scale),
        "</svg>",
    ]
    return "".join(parts)


class _Scale:
    """Seconds to pixels."""

    def __init__(self, start: float, stop: float) -> None:
        self._start = start
        self._factor = (_RIGHT - _LEFT) / (stop - start) if stop > start else 0.0

    def __call__(self, seconds: float) -> float:
        """A place in the picture; what is outside the window lies on its border."""
        x = _LEFT + (seconds - self._start) * self._factor
        return min(max(x, _LEFT), _RIGHT)


def _text(x: float, y: float, text: str, attributes: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {attributes}>{html.escape(text)}</text>'


def _rect(left: float, top: float, width: float, height: float, paint: str) -> str:
    return (
        f'<rect x="{left:.2f}" y="{top:.1f}" width="{width:.2f}" '
        f'height="{height:.1f}" {paint}'
    )


def _exposed(picture: Picture, scale: _Scale) -> Iterator[str]:
    if not picture.exposed:
        return
    paint = f'fill="{EXPOSED}" fill-opacity="0.2"/>'
    for start, stop in picture.exposed:
        left = scale(start)
        yield _rect(left, _TOP, scale(stop) - left, _BOTTOM - _TOP, paint)
    yield _rect(8, 25, 10, 9, paint)
    yield _text(23, 33, picture.exposed_text)


def _key(layers: int) -> Iterator[str]:
    """The colours of the layers, at the right above the lanes."""
    if layers < 2:
        return
    left, step = _RIGHT - 20 - _KEY_WIDTH, _KEY_WIDTH / _KEY_STEPS
    for number in range(_KEY_STEPS):
        paint = f'fill="{shade(number / (_KEY_STEPS - 1))}"/>'
        yield _rect(left + number * step, 25, step + _SEAM, 9, paint)
    yield _text(left - 5, 33, "layer 0", 'text-anchor="end"')
    yield _text(_RIGHT, 33, f"{layers - 1}", 'text-anchor="end"')


def _lanes(picture: Picture) -> Iterator[str]:
    for row, (name, busy) in enumerate(picture.labels):
        y = _TOP + row * _LANE
        yield f'<path d="M0 {y}H{_RIGHT}" stroke="#ddd"/>'
        yield _text(8, y + 13, name)
        yield _text(8, y + 25, busy, 'fill="#777"')


def _boxes(picture: Picture, scale: _Scale) -> Iterator[str]:
    start, stop = picture.window
    shown = [
        box
        for box in picture.boxes
        if box.interval.stop >= start and box.interval.start <= stop
    ]
    for box in _visible(shown, scale):
        interval = box.interval
        left = scale(interval.start)
        width = max(_HAIRLINE, scale(interval.stop) - left) + _SEAM
        tokens = f", {interval.tokens} tokens" if interval.tokens else ""
        words = (
            f"{interval.name}: {duration(interval.seconds)} from "
            f"{duration(interval.start)}{tokens}"
        )
        top, height = _TOP + _LANE * box.top, _LANE * box.height
        yield (
            _rect(left, top, width, height, f'fill="{box.colour}">')
            + f"<title>{html.escape(words)}</title></rect>"
        )


def _visible(boxes: Iterable[Box], scale: _Scale) -> Iterator[Box]:
    """Leave out what lies wholly under the box before: pixels are few."""
    track, taken = -1.0, 0.0
    for box in boxes:
        left, right = scale(box.interval.start), scale(box.interval.stop)
        if box.top != track:
            track, taken = box.top, -1.0
        if right <= taken:
            continue
        taken = max(right, left + _HAIRLINE)
        yield box


def _axis(picture: Picture, scale: _Scale) -> Iterator[str]:
    yield f'<path d="M{_LEFT} {_BOTTOM}H{_RIGHT}" stroke="#222"/>'
    for moment in ticks(picture.window):
        x = scale(moment)
        yield f'<path d="M{x:.1f} {_BOTTOM}v4" stroke="#222"/>'
        yield _text(x, _BOTTOM + 15, f"{1e3 * moment:g}", 'text-anchor="middle"')
    yield _text((_LEFT + _RIGHT) / 2, _HEIGHT - 8, picture.axis, 'text-anchor="middle"')


def _first_token(picture: Picture, scale: _Scale) -> Iterator[str]:
    if picture.first_token is None:
        return
    x = scale(picture.first_token)
    late = x > (_LEFT + _RIGHT) / 2
    yield f'<path d="M{x:.1f} {_TOP}V{_BOTTOM}" stroke="#000" stroke-dasharray="4 3"/>'
    anchor = f'text-anchor="{"end" if late else "start"}"'
    yield _text(x + (-4 if late else 4), _TOP + 19, FIRST_TOKEN, anchor)
