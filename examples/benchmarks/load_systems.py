"""The systems that the PCR paper compares (arXiv 2603.23049): settings of one engine.

Each adds one thing to the one before it. Where this engine does more than the paper's
systems, that is switched off until the step to which it belongs: ``SCCache`` reads what
is stored and waits for it, as on-demand loading does; with ``+ overlap`` the forward
begins with the first layer that is there, copies run beside it where the start-up probe
found that this pays, and what is faster to compute than to read is computed. Only
``PCR`` looks at the queue: it reads ahead, and keeps what is needed next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PATIENT = 1e6  # seconds: longer than any run

BARE = {"lookahead_window": 0, "overlap": "none"}
"""Nobody looks at the queue, and nothing runs beside anything."""


@dataclass(frozen=True)
class System:
    """One way to set the engine.

    Attributes:
        name: As the paper calls it.
        settings: Fields of ``EngineConfig``.
        disk: Whether it has an SSD tier.
        cache: Whether it has any tier at all.
    """

    name: str
    settings: Mapping[str, Any]
    disk: bool = True
    cache: bool = True


NONE = System(
    "no cache",
    {**BARE, "ssd_bytes": 0, "resident_rows": 0},
    disk=False,
    cache=False,
)
DRAM = System("CCache", {**BARE, "ssd_bytes": 0}, disk=False)
SSD = System("SCCache", {**BARE, "prefetch": "timeout", "prefetch_timeout": PATIENT})
OVERLAP = System("+ overlap", {"lookahead_window": 0, "prefetch": "off"})
PREFETCH = System("PCR", {})

PAPER = (NONE, DRAM, SSD, OVERLAP, PREFETCH)
"""In the order of what is added."""
