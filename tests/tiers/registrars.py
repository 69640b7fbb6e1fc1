"""Drivers that lock pages: at once, slowly, a few only, or never to let go."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

_PATIENCE = 60.0


class FakeRegistrar:
    """Remembers what is locked; fails if that is not mapped all the time.

    Args:
        limit: Bytes that can be locked; further ones are refused.
        stuck: Nothing can be unlocked.

    Attributes:
        gate: While it is not set, locking does not end.
        entered: Released each time a call to lock begins.
        locked: Bytes that are locked now, by address.
        calls: What was called, in order.
        threads: By whom.
    """

    def __init__(self, limit: int = 2**60, *, stuck: bool = False) -> None:
        self.limit = limit
        self.stuck = stuck
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)
        self.locked: dict[int, int] = {}
        self.calls: list[tuple[str, int]] = []
        self.threads: set[str] = set()
        self.mistakes: list[str] = []

    def register(self, address: int, nbytes: int) -> None:
        self.entered.release()
        self.gate.wait(_PATIENCE)
        self._note("register", address)
        if address in self.locked:
            self.mistakes.append(f"{address:#x} is locked twice")
        if sum(self.locked.values()) + nbytes > self.limit:
            raise MemoryError("no more pages may be locked")
        self.locked[address] = nbytes

    def unregister(self, address: int) -> None:
        self._note("unregister", address)
        if self.stuck:
            raise RuntimeError("the device is gone")
        if self.locked.pop(address, None) is None:
            self.mistakes.append(f"{address:#x} is not locked")

    def count(self, what: str) -> int:
        return sum(name == what for name, _ in self.calls)

    def _note(self, what: str, address: int) -> None:
        self.calls.append((what, address))
        self.threads.add(threading.current_thread().name)
        if not is_mapped(address):
            self.mistakes.append(f"{what} of {address:#x}, which is not mapped")


def is_mapped(address: int) -> bool:
    """Whether there is memory at an address, whoever's it is."""
    for line in Path("/proc/self/maps").read_text(encoding="ascii").splitlines():
        start, stop = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= address < stop:
            return True
    return False


def until(condition: Callable[[], bool]) -> None:
    """Poll for something that another thread will do; fail after a minute."""
    deadline = time.monotonic() + _PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it has not happened"
        time.sleep(0.001)
