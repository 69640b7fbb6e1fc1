"""The timeline as a matplotlib figure. The only module here that needs matplotlib.

Object-oriented only: no global state, no backend is chosen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pcr_core.timeline.lanes import LANES
from pcr_core.timeline.layout import FIRST_TOKEN, Box, Picture
from pcr_core.timeline.palette import EXPOSED, shade

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

_INCHES = (12.0, 4.6)

_NARROWEST = 1e-3
"""Seconds; an axis must have a width."""


def require_matplotlib() -> None:
    """Check that drawing is possible.

    Raises:
        ImportError: If matplotlib cannot be imported; says how to install it.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"drawing a timeline needs matplotlib ({error}); install it with: "
            'pip install "pcr-rag[plot]"'
        ) from error


def draw(picture: Picture) -> Figure:
    """A new figure; each interval is a ``Rectangle`` whose ``gid`` is its name.

    Raises:
        ImportError: If matplotlib cannot be imported.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=_INCHES, layout="constrained")
    axes = figure.add_subplot()
    _set_axes(axes, picture)
    if picture.exposed:
        _shade_exposed(axes, picture)
    for box in picture.boxes:
        axes.add_patch(_rectangle(box))
    if picture.first_token is not None:
        _mark_first_token(axes, picture.first_token)
    if picture.layers > 1:
        _add_scale(figure, axes, picture.layers)
    return figure


def _set_axes(axes: Axes, picture: Picture) -> None:
    start, stop = picture.window
    axes.set_xlim(1e3 * start, 1e3 * max(stop, start + _NARROWEST))
    axes.set_ylim(len(LANES), 0)
    axes.set_yticks(
        [row + 0.5 for row in range(len(LANES))],
        [f"{name}\n{busy}" for name, busy in picture.labels],
    )
    axes.tick_params(axis="y", length=0)
    for row in range(1, len(LANES)):
        axes.axhline(row, color="0.85", linewidth=0.8, zorder=0)
    axes.set_xlabel(picture.axis)
    # Two lines: the second is for the key of what is exposed.
    axes.set_title(picture.title, loc="left", pad=24 if picture.exposed else 6)


def _shade_exposed(axes: Axes, picture: Picture) -> None:
    from matplotlib.patches import Patch

    for start, stop in picture.exposed:
        axes.axvspan(1e3 * start, 1e3 * stop, color=EXPOSED, alpha=0.2, linewidth=0.5)
    key = Patch(color=EXPOSED, alpha=0.2, label=picture.exposed_text)
    axes.legend(
        handles=[key],
        loc="lower left",
        bbox_to_anchor=(0, 1),
        borderpad=0.1,
        borderaxespad=0.2,
        frameon=False,
    )


def _rectangle(box: Box) -> Rectangle:
    from matplotlib.patches import Rectangle

    interval = box.interval
    # A hairline in its own colour keeps what is narrower than a pixel visible.
    return Rectangle(
        (1e3 * interval.start, box.top),
        1e3 * interval.seconds,
        box.height,
        facecolor=box.colour,
        edgecolor=box.colour,
        linewidth=0.3,
        gid=interval.name,
    )


def _mark_first_token(axes: Axes, seconds: float) -> None:
    axes.axvline(1e3 * seconds, color="black", linestyle="--", linewidth=1.2)
    left, right = axes.get_xlim()
    late = 1e3 * seconds > (left + right) / 2
    axes.annotate(
        FIRST_TOKEN,
        (1e3 * seconds, 0.5),
        xytext=(-4 if late else 4, 0),
        textcoords="offset points",
        ha="right" if late else "left",
        va="center",
    )


def _add_scale(figure: Figure, axes: Axes, layers: int) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize
    from matplotlib.ticker import MaxNLocator

    colours = [shade(step / 255) for step in range(256)]
    scale = ScalarMappable(Normalize(0, layers - 1), ListedColormap(colours))
    bar = figure.colorbar(scale, ax=axes, label="layer", pad=0.01, fraction=0.03)
    bar.locator = MaxNLocator(integer=True)
