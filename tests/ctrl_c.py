"""Pressing Ctrl-C in a test."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable

PATIENCE = 2.0  # seconds until it is pressed again


def press_ctrl_c(noticed: Callable[[], bool]) -> None:
    """Interrupt the main thread until it has noticed; from another thread.

    CPython looks for signals before it blocks and when it is woken, so one that comes
    in between is seen by nobody until the next: a user presses again.
    """
    main = threading.main_thread().ident
    assert main is not None
    while True:
        signal.pthread_kill(main, signal.SIGINT)
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            if noticed():
                return
            time.sleep(0.001)
