"""The index of the SSD tier: an LMDB map from chunk key to record.

LMDB wants one environment per process and file, so engines of one process on one
folder share it: ``ChunkIndex.acquire`` counts references. The number of bytes on SSD
is kept in the same transactions as the records, so it survives any crash with them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import lmdb
import msgspec

from pcr_core.errors import StoreError
from pcr_core.index.chunk import ChunkKey
from pcr_core.tiers.folder import INDEX_FOLDER, FolderLock

_MAP_BYTES = 4 * 2**30
"""Address space, not disk; room for some ten million records. Never changed while
open: resizing under other processes is what corrupts LMDB maps."""
_MAX_READERS = 1024
_TOTAL = b"bytes"
_KEY_BYTES = 32


class IndexTroubleError(OSError):
    """LMDB refused: disk full, I/O error, map full."""


class Record(msgspec.Struct, array_like=True, frozen=True):
    """What the index knows of a chunk.

    Attributes:
        parent: Key of the chunk before it, or its namespace's digest.
        size: Bytes of its file, header included.
        stamp: Last committed use; larger is later.
        digest: xxh3-128 of the file's header.
    """

    parent: bytes
    size: int
    stamp: int
    digest: bytes


class IndexTransaction:
    """One write transaction. Keeps the byte total beside the records."""

    def __init__(self, txn: lmdb.Transaction) -> None:
        self._txn = txn
        self.used = _number(txn.get(_TOTAL))

    def get(self, key: ChunkKey) -> Record | None:
        """Return a record, or ``None``."""
        return _decode(self._txn.get(key))

    def put(self, key: ChunkKey, record: Record) -> None:
        """Add or replace a record."""
        old = self.get(key)
        self._set_used(self.used + record.size - (old.size if old else 0))
        self._txn.put(key, _ENCODER.encode(record))

    def remove(self, key: ChunkKey) -> None:
        """Remove a record; one that is not there is fine."""
        old = self.get(key)
        if old is not None:
            self._set_used(self.used - old.size)
            self._txn.delete(key)

    def touch(self, key: ChunkKey, stamp: int) -> None:
        """Move a record's stamp forward, if it is still there."""
        old = self.get(key)
        if old is not None and old.stamp < stamp:
            self.put(key, msgspec.structs.replace(old, stamp=stamp))

    def records(self) -> dict[ChunkKey, Record]:
        """Every record."""
        return _all_records(self._txn)

    def recount(self) -> None:
        """Set the byte total to the sum over the records."""
        self._set_used(sum(record.size for record in self.records().values()))

    def _set_used(self, used: int) -> None:
        self.used = used
        self._txn.put(_TOTAL, used.to_bytes(8, "little"))


class ChunkIndex:
    """The LMDB environment of one folder in this process. Any thread; not across fork.

    Made by ``acquire`` only. Reads are short transactions, so what another process
    has committed is seen at once.

    Attributes:
        lock: Tells whether another process has the folder open.
        users: Stores in this process that hold this index.
    """

    _open: ClassVar[dict[str, ChunkIndex]] = {}
    _guard: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._name = os.path.realpath(folder)
        self._pid = os.getpid()
        self.users = 0
        self.lock = FolderLock(folder)
        try:
            self._env = lmdb.open(
                str(folder / INDEX_FOLDER),
                map_size=_MAP_BYTES,
                max_readers=_MAX_READERS,
                max_dbs=0,
            )
            self._env.reader_check()
            self._identity = self._on_disk()
        except (lmdb.Error, OSError) as error:
            self.lock.close()
            raise StoreError(
                f"the index in {folder / INDEX_FOLDER} cannot be opened ({error}); "
                "free some disk space, or delete the cache folder to start afresh"
            ) from error

    @classmethod
    def acquire(cls, folder: Path) -> ChunkIndex:
        """Open the index of a prepared folder, or share the one that is open.

        Raises:
            StoreError: If it cannot be opened, if the folder was deleted while open,
                or in a child made by ``fork``.
        """
        with cls._guard:
            name = os.path.realpath(folder)
            index = cls._open.get(name)
            if index is None:
                index = cls._open[name] = cls(folder)
            index.check_process()
            if not index.is_present():
                raise StoreError(
                    f"cache_dir {folder} was deleted while an engine of this process "
                    "had it open; close that engine first"
                )
            index.users += 1
            return index

    def release(self) -> None:
        """Give back what ``acquire`` lent; the last one closes the environment."""
        with self._guard:
            self.users -= 1
            if self.users == 0 and self._pid == os.getpid():
                del self._open[self._name]
                self._env.close()
                self.lock.close()

    def check_process(self) -> None:
        """Refuse to work in a child made by ``fork``.

        Raises:
            StoreError: LMDB and the reader slots belong to the parent.
        """
        if self._pid != os.getpid():
            raise StoreError(
                f"cache_dir {self._folder} was opened before this process was forked; "
                "start workers with the 'spawn' method instead"
            )

    def is_present(self) -> bool:
        """False once the index file was deleted or replaced under us."""
        try:
            return self._on_disk() == self._identity
        except OSError:
            return False

    def lookup(self, keys: Iterable[ChunkKey]) -> dict[ChunkKey, Record]:
        """Return the records that exist for ``keys``."""
        self.check_process()
        with _translated(), self._env.begin() as txn:
            found = ((key, _decode(txn.get(key))) for key in keys)
            return {key: record for key, record in found if record is not None}

    def records(self) -> dict[ChunkKey, Record]:
        """Return every record."""
        self.check_process()
        with _translated(), self._env.begin() as txn:
            return _all_records(txn)

    def used_bytes(self) -> int:
        """Bytes of all chunk files with a record."""
        self.check_process()
        with _translated(), self._env.begin() as txn:
            return _number(txn.get(_TOTAL))

    def totals(self) -> tuple[int, int]:
        """Bytes as kept, and as summed over the records, at one moment."""
        self.check_process()
        with _translated(), self._env.begin() as txn:
            summed = sum(record.size for record in _all_records(txn).values())
            return _number(txn.get(_TOTAL)), summed

    @contextmanager
    def write(self) -> Iterator[IndexTransaction]:
        """One durable write transaction; an exception inside undoes all of it."""
        self.check_process()
        with _translated(), self._env.begin(write=True) as txn:
            yield IndexTransaction(txn)

    def _on_disk(self) -> tuple[int, int]:
        stat = os.stat(self._folder / INDEX_FOLDER / "data.mdb")
        return stat.st_dev, stat.st_ino


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Record)


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except lmdb.Error as error:
        raise IndexTroubleError(f"the cache index refused: {error}") from error


def _decode(value: bytes | memoryview | None) -> Record | None:
    """A record that cannot be read counts as none; its file is then an orphan."""
    if value is None:
        return None
    try:
        return _DECODER.decode(value)
    except msgspec.MsgspecError:
        return None


def _number(value: bytes | memoryview | None) -> int:
    return int.from_bytes(value or b"", "little")


def _all_records(txn: lmdb.Transaction) -> dict[ChunkKey, Record]:
    with txn.cursor() as cursor:
        found = (
            (ChunkKey(bytes(key)), _decode(bytes(value)))
            for key, value in cursor
            if len(key) == _KEY_BYTES
        )
        return {key: record for key, record in found if record is not None}
