"""The two locks of a cache folder: who has it open, and whose turn it is to write."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK_FILE = "lock"
WRITE_LOCK_FILE = "write.lock"
WAIT_SECONDS = 10.0
"""How long anybody waits for a lock. A process that was stopped, or that hangs in its
disk, would otherwise hang every other user of the folder with it."""
_POLL_SECONDS = 0.002
_NEXT, _HELD = 0, 1
_MARK_BYTES = 16


class FolderLock:
    """Tells whether this process is alone on the folder. One per process and folder.

    Every user holds the lock shared while it is open; whoever can get it exclusively
    is alone. The kernel lets go of it when a process dies, however it dies.

    Raises:
        OSError: If the lock file cannot be opened, or a process hangs while it opens
            the folder.
    """

    def __init__(self, folder: Path) -> None:
        self._fd = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
        if not _wait(lambda: self._try(fcntl.LOCK_SH), _deadline()):
            os.close(self._fd)
            raise _timeout("a process that is opening it does not finish")

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """Yield True, and keep others from opening, if no other process is there."""
        if not self._try(fcntl.LOCK_EX):
            # A failed upgrade may have dropped the shared lock.
            fcntl.flock(self._fd, fcntl.LOCK_SH)
            yield False
            return
        try:
            yield True
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_SH)

    def close(self) -> None:
        """Let go."""
        os.close(self._fd)

    def _try(self, how: int) -> bool:
        try:
            fcntl.flock(self._fd, how | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


class Turn:
    """One turn at writing.

    Attributes:
        unclean: Files that no record names may lie in the folder: the last writer died
            in its turn, or could not remove one. The holder sets it for its successor.
    """

    __slots__ = ("unclean",)

    def __init__(self, *, unclean: bool) -> None:
        self.unclean = unclean


class WriteLock:
    """One writer at a time, over all threads and processes. One per process and folder.

    POSIX record locks on two bytes of one file. Byte 1 is held by the writer; byte 0 by
    whoever is next: without it a busy writer, locking again at once, would starve those
    who poll. Not ``flock``: a child made by ``fork`` shares it and keeps it after its
    parent's death. These locks end with the process, however it ends.

    The file's bytes name the writer while it is at work. Found by the next one, they
    say that it died there.

    Raises:
        OSError: If the lock file cannot be opened.
    """

    def __init__(self, folder: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT
        self._fd = os.open(folder / WRITE_LOCK_FILE, flags, 0o600)
        self._thread = threading.Lock()

    @contextmanager
    def turn(self) -> Iterator[Turn]:
        """Wait for this thread's turn, for at most ``WAIT_SECONDS``.

        Raises:
            TimeoutError: If the writer before us does not come to an end.
        """
        with self._held():
            turn = Turn(unclean=self._writer() != 0)
            self._mark(os.getpid())
            try:
                yield turn
            finally:
                self._mark(os.getpid() if turn.unclean else 0)

    def close(self) -> None:
        """Let go."""
        os.close(self._fd)

    @contextmanager
    def _held(self) -> Iterator[None]:
        deadline = _deadline()
        if not self._thread.acquire(timeout=WAIT_SECONDS):
            raise _timeout("another engine of this process does not finish writing")
        try:
            self._take(deadline)
            try:
                yield
            finally:
                self._unlock(_HELD)
        finally:
            self._thread.release()

    def _take(self, deadline: float) -> None:
        if not _wait(lambda: self._lock(_NEXT), deadline):
            raise _timeout(self._holder())
        try:
            if not _wait(lambda: self._lock(_HELD), deadline):
                raise _timeout(self._holder())
        finally:
            self._unlock(_NEXT)

    def _lock(self, byte: int) -> bool:
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True

    def _unlock(self, byte: int) -> None:
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, byte)

    def _holder(self) -> str:
        return f"process {self._writer()} does not finish writing"

    def _writer(self) -> int:
        text = os.pread(self._fd, _MARK_BYTES, 0).strip()
        return int(text) if text.isdigit() else 0

    def _mark(self, pid: int) -> None:
        try:
            os.pwrite(self._fd, b"%*d" % (_MARK_BYTES, pid), 0)
        except OSError:
            # A full or read-only disk must not keep us from removing files. What a
            # crash in this turn leaves is then found at the next opening only.
            return


def _deadline() -> float:
    return time.monotonic() + WAIT_SECONDS


def _wait(attempt: Callable[[], bool], deadline: float) -> bool:
    """Poll: neither kind of lock can be waited for with a time limit."""
    while not attempt():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _timeout(who: str) -> TimeoutError:
    text = f"the cache folder is busy: {who}; waited {WAIT_SECONDS:g} s"
    return TimeoutError(errno.ETIMEDOUT, text)
