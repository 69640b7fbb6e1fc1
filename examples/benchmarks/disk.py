"""The disk that chunks are read from: the real one, or the real one held back.

Files that were just written are still in the page cache, so the kernel is asked to
forget each of them when it is opened. A slow disk is an emulation: every read of a
chunk takes as long as its bytes would at the stated bandwidth. Writes are not held
back.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pcr_core.tiers.store.files import Files

REAL = "real"


class Disk:
    """Delays reads to a bandwidth, over all threads together, as one device would.

    Attributes:
        bandwidth: Bytes per second; infinite for the real disk as it is.
    """

    def __init__(self, bandwidth: float = math.inf) -> None:
        self.bandwidth = bandwidth
        self._free = 0.0
        self._lock = threading.Lock()

    @classmethod
    def named(cls, name: str) -> Disk:
        """From ``REAL`` or a number of MB/s."""
        return cls() if name == REAL else cls(float(name) * 1e6)

    def __str__(self) -> str:
        if math.isinf(self.bandwidth):
            return "real disk"
        return f"disk slowed to {self.bandwidth / 1e6:.0f} MB/s"

    def wait(self, size: int) -> None:
        """Return when so many bytes would have come."""
        with self._lock:
            start = max(time.perf_counter(), self._free)
            self._free = start + size / self.bandwidth
        time.sleep(max(0.0, self._free - time.perf_counter()))


def disk_name(text: str) -> str:
    """An argument: ``REAL`` or MB/s, positive.

    Raises:
        ValueError: If it is neither.
    """
    if text != REAL and not 0 < float(text) < math.inf:
        raise ValueError(f"{text!r} is neither {REAL!r} nor a number of MB/s")
    return text


@contextmanager
def on_disk(disk: Disk) -> Iterator[None]:
    """All chunk files are on that disk, and none of them in the page cache."""
    preadv, open_read = Files.preadv, Files.open_read

    def slow(self: Files, fd: int, buffers: Sequence[Any], at: int) -> int:
        size = preadv(self, fd, buffers, at)
        disk.wait(size)
        return size

    def cold(self: Files, path: Path) -> int:
        handle = open_read(self, path)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        return handle

    Files.preadv = slow  # type: ignore[method-assign]
    Files.open_read = cold  # type: ignore[method-assign]
    try:
        yield
    finally:
        Files.preadv = preadv  # type: ignore[method-assign]
        Files.open_read = open_read  # type: ignore[method-assign]
