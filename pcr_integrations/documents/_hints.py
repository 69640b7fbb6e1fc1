"""Hints to engines, given in the background.

A hint has to be tokenised. A retriever must not wait for that, and a hint that comes
late is worth little: of those that wait, the newest 16 count, as in the engine.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING

from pcr_core import PcrError
from pcr_integrations._background import Worker, process_wide

if TYPE_CHECKING:
    from pcr_core import Engine
    from pcr_integrations.documents._layouts import Prompt, Tools

_MOST_WAITING = 16


class Hints:
    """Calls ``engine.prefetch`` in the background. Any thread.

    Args:
        worker: Where.
    """

    def __init__(self, worker: Worker | None = None) -> None:
        self._worker = worker or Worker("pcr-hint", _MOST_WAITING)

    def send(self, engine: Engine, prompt: Prompt, tools: Tools | None) -> None:
        """Give a hint soon; returns at once."""
        self._worker.post(partial(_give, engine, prompt, tools))

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all are given; returns whether they are."""
        return self._worker.wait(timeout)


def _give(engine: Engine, prompt: Prompt, tools: Tools | None) -> None:
    # A hint is dropped where the request itself would be refused: too long a prompt,
    # a closed engine.
    with contextlib.suppress(PcrError):
        engine.prefetch(prompt, tools=tools)


HINTS = Hints(process_wide("pcr-hint", _MOST_WAITING))
