"""One piece of a request's time: what was done, for which layer, from when to when.

It does not know who measures it or how it is drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Lane = Literal["queue", "read", "load", "compute", "offload", "decode"]
"""What was done; see ``Interval``."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A stretch of one request's time, in one lane. Immutable; any thread.

    Attributes:
        lane: ``"queue"``: waiting for the engine. ``"read"``: a file read from SSD.
            ``"load"``: stored KV copied to where the model computes. ``"compute"``:
            the model's work on prompt tokens; where one thread both computes and
            copies, it is cut around the copies. ``"offload"``: new KV copied out, to
            be kept. ``"decode"``: the model's work on generated tokens.
        layer: The layer's index, from 0; ``None`` where it concerns all of them.
        start, stop: Seconds since the request was submitted; ``start <= stop``. A read
            that another request began may have started before 0.
        tokens: How many tokens' KV it moved or computed; 0 where that means nothing.
    """

    lane: Lane
    layer: int | None
    start: float
    stop: float
    tokens: int = 0

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.stop - self.start

    @property
    def name(self) -> str:
        """Lane and layer, such as ``"load, layer 3"``."""
        return self.lane if self.layer is None else f"{self.lane}, layer {self.layer}"
