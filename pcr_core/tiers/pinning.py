"""Page-locks the DRAM tier behind the engine's back, slab by slab.

A GPU copies from page-locked ("pinned") memory at full speed and beside its other work.
Pinning takes a second for a few GiB, so it is done on a thread of its own; until it is
done, or where the system refuses it, a slab is ordinary memory, from which copies are
correct but slower. Nothing has to know which it is.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import Protocol

from pcr_core.tiers.slabs import Slab

_log = logging.getLogger("pcr_core.tiers")

_stranded: list[Slab] = []
"""Slabs that could not be unregistered. They stay mapped for as long as the process
lives: a driver that believes that addresses are locked goes on copying from the pages
that were there then, whatever is mapped there later."""


class Registrar(Protocol):
    """Locks pages, and tells a device's driver. Called on one thread only."""

    def register(self, address: int, nbytes: int) -> None:
        """Lock whole pages, backing them with memory first. May raise anything."""

    def unregister(self, address: int) -> None:
        """Undo it; no copy reads or writes them afterwards. May raise anything."""


class Pinning(Protocol):
    """What the pool asks for. Engine thread only."""

    @property
    def nbytes(self) -> int:
        """Bytes that are pinned now."""

    @property
    def errors(self) -> int:
        """Slabs that could not be pinned."""

    def add(self, slab: Slab) -> None:
        """Pin a slab when there is time for it; returns at once."""

    def close(self, timeout: float) -> None:
        """Unpin everything, and let go of all slabs."""


class NoPinning:
    """For a model on the CPU."""

    nbytes = 0
    errors = 0

    def add(self, slab: Slab) -> None:
        """Do nothing."""

    def close(self, timeout: float) -> None:
        """Do nothing."""


class BackgroundPinning:
    """Pins slabs on a thread of its own, in the order they come.

    The thread owns what is pinned: it alone calls the registrar, it holds every slab
    that is registered, so that none is unmapped before it is unregistered, and
    unregistering all of them is the last thing it does. (CUDA keeps the last error of
    each thread, so one of these calls does not show up in a forward, either.)

    Args:
        registrar: Does it.
    """

    def __init__(self, registrar: Registrar) -> None:
        self._registrar = registrar
        self._changed = threading.Condition()
        self._waiting: deque[Slab] = deque()
        self._closing = False
        self._nbytes = 0
        self._errors = 0
        self._thread: threading.Thread | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that are pinned now. Any thread."""
        return self._nbytes

    @property
    def errors(self) -> int:
        """Slabs that could not be pinned. Any thread."""
        return self._errors

    def add(self, slab: Slab) -> None:
        """Pin a slab when those before it are done; returns at once."""
        with self._changed:
            if self._closing:
                return
            self._waiting.append(slab)
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="pcr-pin", daemon=True
            )
            self._thread.start()

    def close(self, timeout: float) -> None:
        """Have everything unpinned, and wait for that for so many seconds.

        If the driver takes longer, the thread is left behind with what it holds, and
        unpins it as soon as it can.
        """
        with self._changed:
            self._closing = True
            self._waiting.clear()
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                _log.error("%s hangs in the driver; left behind", self._thread.name)

    def _run(self) -> None:
        pinned: list[Slab] = []
        while (slab := self._next()) is not None:
            if self._register(slab):
                pinned.append(slab)
        while pinned:
            self._unregister(pinned.pop())

    def _next(self) -> Slab | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            return None if self._closing else self._waiting.popleft()

    def _register(self, slab: Slab) -> bool:
        try:
            self._registrar.register(slab.address, slab.nbytes)
        except Exception as error:
            if not self._errors:
                _log.warning(
                    "%d bytes of the DRAM tier cannot be page-locked: %s; copies from "
                    "there are slower (further ones are only counted)",
                    slab.nbytes,
                    error,
                )
            self._errors += 1
            return False
        self._nbytes += slab.nbytes
        return True

    def _unregister(self, slab: Slab) -> None:
        try:
            self._registrar.unregister(slab.address)
        except Exception as error:
            _log.warning(
                "%d bytes of the DRAM tier cannot be unlocked: %s; they stay with this "
                "process until it ends",
                slab.nbytes,
                error,
            )
            _stranded.append(slab)
        self._nbytes -= slab.nbytes
