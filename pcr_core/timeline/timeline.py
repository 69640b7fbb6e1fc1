"""``Timeline``: where one request's time went, in figures, pictures and a trace.

Knows intervals and a few numbers of the request; who measured them it does not know.
"""

from __future__ import annotations

import io
import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pcr_core.table import as_html, as_text
from pcr_core.timeline import plot, svg
from pcr_core.timeline.chrome import trace_events
from pcr_core.timeline.interval import Interval, Lane
from pcr_core.timeline.lanes import BUSY, LANES, TITLES, TRANSFERS
from pcr_core.timeline.layout import (
    FIRST_TOKEN,
    Picture,
    axis_text,
    duration,
    place,
    window,
)
from pcr_core.timeline.spans import Span, length, union, within, without

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DPI = 150

_PARTS = {
    "queue": "waiting in the queue",
    "compute": "computing",
    "read": "only reading from SSD",
    "load": "only loading",
    "offload": "only offloading",
    "other": "anything else",
}
"""``ttft_parts`` in words."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """Where the time of one request went. Immutable; any thread.

    ``print(timeline)`` gives a table; a notebook shows a drawing above it. Times are
    seconds since the request was submitted.

    Attributes:
        intervals: What was done and when, in order of their starts.
        prompt_tokens, cached_tokens: Length of the prompt; how much of it was reused.
        first_token: When the first token was there; ``None`` if not known.

    Raises:
        ValueError: If an interval ends before it starts, or is not finite.
    """

    intervals: tuple[Interval, ...] = field(repr=False)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    first_token: float | None = None

    def __post_init__(self) -> None:
        for interval in self.intervals:
            if not -math.inf < interval.start <= interval.stop < math.inf:
                raise ValueError(f"{interval} ends before it starts, or never")
        ordered = sorted(self.intervals, key=lambda i: (i.start, i.stop))
        object.__setattr__(self, "intervals", tuple(ordered))

    # --- figures ---

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """The lanes in which something happened, in the order of the drawing."""
        used = {interval.lane for interval in self.intervals}
        return tuple(lane for lane in LANES if lane in used)

    @property
    def layers(self) -> int:
        """How many layers the intervals tell of; 0 if of none."""
        return 1 + max(
            (i.layer for i in self.intervals if i.layer is not None), default=-1
        )

    @property
    def span(self) -> Span:
        """From submit, or what began before it, to the end."""
        start = min((i.start for i in self.intervals), default=0.0)
        stop = max((i.stop for i in self.intervals), default=0.0)
        return min(start, 0.0), max(stop, self.first_token or 0.0)

    def busy(self, lane: Lane) -> float:
        """Seconds in which something was going on in ``lane``."""
        return length(self._when(lane))

    @property
    def exposed_spans(self) -> tuple[Span, ...]:
        """When KV moved although nothing was computed.

        What moves while the request waits for its turn costs nothing and is left out.
        """
        return tuple(without(self._when(*TRANSFERS), self._when(*BUSY)))

    @property
    def exposed(self) -> float:
        """Seconds of ``exposed_spans``: what overlapping copies could still save."""
        return length(self.exposed_spans)

    @property
    def ttft_parts(self) -> dict[str, float]:
        """Where the time to the first token went, in seconds; adds up to it.

        ``"queue"``: waiting for the engine. ``"compute"``: the model. ``"read"``,
        ``"load"``, ``"offload"``: only that, in this order where several ran at once.
        ``"other"``: none of these. Empty if the first token's time is not known.
        """
        if self.first_token is None:
            return {}
        parts, seen = dict[str, float](), list[Span]()
        for lane in ("queue", "compute", *TRANSFERS):
            upto = within(self._when(lane), 0.0, self.first_token)
            parts[lane] = length(without(upto, seen))
            seen = union([*seen, *upto])
        parts["other"] = max(0.0, self.first_token - length(seen))
        return parts

    def _when(self, *lanes: Lane) -> list[Span]:
        return union((i.start, i.stop) for i in self.intervals if i.lane in lanes)

    # --- for people ---

    def rows(self) -> list[tuple[str, str]]:
        """Name and value of each line of the table."""
        rows = [("prompt", self._prompt_text())]
        if not self.intervals:
            rows.append(("time", "nothing was recorded"))
        if self.first_token is not None:
            rows.append((FIRST_TOKEN, f"{duration(self.first_token)} after submit"))
        rows += [
            (f"  {_PARTS[part]}", f"{duration(s)} ({s / self.first_token:.0%})")
            for part, s in self.ttft_parts.items()
            if s and self.first_token
        ]
        rows += [(TITLES[lane], self._lane_text(lane)) for lane in self.lanes]
        if any(lane in TRANSFERS for lane in self.lanes):
            rows.append(("exposed", self._exposed_text()))
        return rows

    def __str__(self) -> str:
        return as_text(self.rows())

    def _repr_html_(self) -> str:
        return svg.draw(self._picture()) + as_html(self.rows())

    def _repr_png_(self) -> bytes | None:
        """For notebooks that show no HTML; ``None`` without matplotlib."""
        try:
            figure = self.figure()
        except ImportError:
            return None
        image = io.BytesIO()
        figure.savefig(image, format="png")
        return image.getvalue()

    # --- drawings and files ---

    def figure(self) -> Figure:
        """Return a new matplotlib figure: a row for each lane, a box for each interval.

        Colours go by layer, from dark to light. A dashed line is the first token; red
        is where KV moved and nothing was computed. Long waiting and long decoding are
        cut off; ``figure.axes[0].set_xlim`` shows more.

        Raises:
            ImportError: If matplotlib is missing: ``pip install "pcr-rag[plot]"``.
        """
        return plot.draw(self._picture())

    def save_png(self, path: str | os.PathLike[str]) -> None:
        """Write ``figure()`` to a PNG file.

        Raises:
            ImportError: If matplotlib is missing: ``pip install "pcr-rag[plot]"``.
            OSError: If the file cannot be written.
        """
        self.figure().savefig(path, format="png", dpi=_DPI)

    def to_chrome_trace(self) -> dict[str, Any]:
        """Return the intervals in the Trace Event Format, ready for ``json.dump``.

        Perfetto (ui.perfetto.dev) and ``chrome://tracing`` show it. Times are
        microseconds since submit.
        """
        return {
            "traceEvents": trace_events(self.intervals, self.first_token),
            "displayTimeUnit": "ms",
            "otherData": {
                "prompt_tokens": self.prompt_tokens,
                "cached_tokens": self.cached_tokens,
            },
        }

    def save_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Write ``to_chrome_trace()`` to a file, as JSON.

        Raises:
            OSError: If the file cannot be written.
        """
        text = json.dumps(self.to_chrome_trace(), separators=(",", ":"))
        Path(path).write_text(text + "\n", encoding="utf-8")

    # --- words ---

    def _picture(self) -> Picture:
        shown = window(self.intervals, self.first_token)
        title = f"prompt of {self._prompt_text()}"
        if self.first_token is not None:
            title += f"; {FIRST_TOKEN} after {duration(self.first_token)}"
        return Picture(
            boxes=place(self.intervals, self.layers),
            labels=tuple((TITLES[x], duration(self.busy(x))) for x in LANES),
            layers=self.layers,
            window=shown,
            first_token=self.first_token,
            exposed=self.exposed_spans,
            exposed_text=f"exposed: {self._exposed_text()}",
            title=title,
            axis=axis_text(shown, self.span),
        )

    def _prompt_text(self) -> str:
        computed = self.prompt_tokens - self.cached_tokens
        return (
            f"{self.prompt_tokens} tokens: {self.cached_tokens} reused, "
            f"{computed} computed"
        )

    def _lane_text(self, lane: Lane) -> str:
        those = [i for i in self.intervals if i.lane == lane]
        layers = len({i.layer for i in those} - {None})
        count = "1 interval" if len(those) == 1 else f"{len(those)} intervals"
        over = f" of {layers} layers" if layers > 1 else ""
        return f"{duration(self.busy(lane))} ({count}{over})"

    def _exposed_text(self) -> str:
        moved = length(self._when(*TRANSFERS))
        return f"{duration(self.exposed)} of {duration(moved)} of transfers"
