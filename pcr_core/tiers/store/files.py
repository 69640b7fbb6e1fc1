"""The few system calls the SSD tier makes, behind one object.

Tests subclass ``Files`` to make a call fail the way disks fail; nothing else in the
package opens, reads, writes, renames or removes a chunk file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

Buffer = bytes | bytearray | memoryview


class Files:
    """POSIX files. Stateless; any thread. Every method may raise ``OSError``."""

    def open_read(self, path: Path) -> int:
        """Open an existing file for reading; return its descriptor."""
        return os.open(path, os.O_RDONLY)

    def open_new(self, path: Path) -> int:
        """Create a file that must not exist; return its descriptor."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)

    def preadv(
        self, fd: int, buffers: Sequence[bytearray | memoryview], at: int
    ) -> int:
        """Read at offset ``at`` into ``buffers``; return the bytes read."""
        return os.preadv(fd, buffers, at)

    def reads_apart(self, fd: int) -> None:
        """Say that this file will be read piece by piece: nothing beyond is to be read.

        Advice, as is ``reads_soon``: it never raises.
        """
        _advise(fd, 0, 0, "POSIX_FADV_RANDOM")

    def reads_soon(self, fd: int, at: int, size: int) -> None:
        """Say that these bytes will be read soon: the system may begin with it."""
        _advise(fd, at, size, "POSIX_FADV_WILLNEED")

    def writev(self, fd: int, buffers: Sequence[Buffer]) -> int:
        """Append ``buffers``; return the bytes written."""
        return os.writev(fd, buffers)

    def fsync(self, fd: int) -> None:
        """Wait until the file's bytes are on the device."""
        os.fsync(fd)

    def replace(self, source: Path, target: Path) -> None:
        """Rename within one folder, replacing what was there, atomically."""
        os.replace(source, target)

    def unlink(self, path: Path) -> None:
        """Remove a file; a file that is gone already is fine."""
        try:
            os.unlink(path)
        except FileNotFoundError:
            return

    def fsync_folder(self, path: Path) -> None:
        """Wait until the folder's names are on the device."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _advise(fd: int, at: int, size: int, what: str) -> None:
    """Give advice where the system takes any."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):
            os.posix_fadvise(fd, at, size, getattr(os, what))
