"""Hints to engines, given on a thread that lives as long as there are any.

A hint has to be tokenised. A retriever must not wait for that, and a hint that comes
late is worth little: of those that wait, the newest 16 count, as in the engine.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from typing import TYPE_CHECKING

from pcr_core import PcrError

if TYPE_CHECKING:
    from pcr_core import Engine
    from pcr_integrations.documents._layouts import Prompt, Tools

_MOST_WAITING = 16


class Hints:
    """Calls ``engine.prefetch`` in the background. Any thread."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Engine, Prompt, Tools | None]] = deque(
            maxlen=_MOST_WAITING
        )
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def send(self, engine: Engine, prompt: Prompt, tools: Tools | None) -> None:
        """Give a hint soon; returns at once."""
        with self._changed:
            self._waiting.append((engine, prompt, tools))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="pcr-hint", daemon=True
                )
                self._thread.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all are given; returns whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: self._thread is None, timeout)

    def restart(self) -> None:
        """In a forked child: the parent's thread is not here."""
        self._waiting.clear()
        self._changed = threading.Condition()
        self._thread = None

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._thread = None
                    self._changed.notify_all()
                    return
                engine, prompt, tools = self._waiting.popleft()
            # A hint is dropped where the request itself would be refused: too long a
            # prompt, a closed engine.
            with contextlib.suppress(PcrError):
                engine.prefetch(prompt, tools=tools)
            del engine, prompt, tools


HINTS = Hints()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=HINTS.restart)
