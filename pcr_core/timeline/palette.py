"""Colours of both drawings: a layer's depth on a sequential scale, from dark to light.

The scale is the lower nine tenths of viridis: it reads the same for the colour-blind
and in grey, and leaves out the yellow that vanishes on white.
"""

from __future__ import annotations

_STOPS = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (191, 223, 37))

_WHOLE = ("#8d99ae", "#a9b3c4")
"""What concerns all layers, or none; two in turn, so that neighbours differ."""

EXPOSED = "#d62828"
"""Moments in which KV moved and nothing was computed."""


def box_colour(layer: int | None, layers: int, index: int) -> str:
    """The colour of a box, as ``#rrggbb``; it is number ``index`` of its row."""
    if layer is None:
        return _WHOLE[index % 2]
    return shade(layer / max(1, layers - 1))


def shade(depth: float) -> str:
    """The colour at ``depth`` of the scale, from 0.0 to 1.0, as ``#rrggbb``."""
    place = min(max(depth, 0.0), 1.0) * (len(_STOPS) - 1)
    below = min(int(place), len(_STOPS) - 2)
    part = place - below
    mixed = (
        round(a + (b - a) * part)
        for a, b in zip(_STOPS[below], _STOPS[below + 1], strict=True)
    )
    return "#" + "".join(f"{channel:02x}" for channel in mixed)
