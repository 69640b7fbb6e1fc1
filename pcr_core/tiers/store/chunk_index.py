"""The index of the SSD tier: LMDB tables in the cache folder.

LMDB wants one environment per process and file, so engines of one process on one
folder share it: ``ChunkIndex.acquire`` counts references. Byte totals are kept in the
same transactions as the records, so they survive any crash with them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import ClassVar

import lmdb

from pcr_core.errors import StoreError
from pcr_core.index.chunk import ChunkKey
from pcr_core.tiers.store.folder import INDEX_FOLDER
from pcr_core.tiers.store.forget_log import ForgetLog, Forgotten
from pcr_core.tiers.store.locks import FolderLock, Turn, WriteLock
from pcr_core.tiers.store.records import (
    TOTAL,
    Contents,
    IndexTransaction,
    Record,
    decode,
    read_contents,
    read_tenant,
)
from pcr_core.tiers.store.tables import Tables, number

__all__ = ["ChunkIndex", "IndexTroubleError", "Record"]

_MAP_BYTES = 4 * 2**30
"""Address space, not disk; room for some ten million records. Never changed while
open: resizing under other processes is what corrupts LMDB maps."""
_MAX_READERS = 1024
_DATA_FILE = "data.mdb"


class IndexTroubleError(OSError):
    """LMDB refused: disk full, I/O error, map full."""


class ChunkIndex:
    """The LMDB environment of one folder in this process. Any thread; not across fork.

    Made by ``acquire`` only. Reads are short transactions, so what another process
    has committed is seen at once; they neither block the writer nor wait for it.

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
        with ExitStack() as opened:
            try:
                self.lock = FolderLock(folder)
                opened.callback(self.lock.close)
                self._writer = WriteLock(folder)
                opened.callback(self._writer.close)
                with self._writer.turn() as turn:
                    self._env = _open_environment(folder / INDEX_FOLDER)
                    opened.callback(self._env.close)
                    self._data = os.open(self._file, os.O_RDWR)
                    opened.callback(os.close, self._data)
                    self._check_length(may_be_short=turn.unclean)
                    with self._env.begin(write=True) as txn:
                        self._tables = Tables.open(self._env, txn)
                    self._pad()
            except (lmdb.Error, OSError) as error:
                raise StoreError(
                    f"the index in {folder / INDEX_FOLDER} cannot be opened ({error}); "
                    "end a process that hangs, free some disk space, or delete the "
                    "cache folder to start afresh"
                ) from error
            self._resources = opened.pop_all()

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
                self._resources.close()

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
            return os.path.samestat(os.stat(self._file), os.fstat(self._data))
        except OSError:
            return False

    def lookup(self, keys: Iterable[ChunkKey]) -> dict[ChunkKey, Record]:
        """Return the records of those of ``keys`` that are stored."""
        with self._read() as txn:
            records = self._tables.records
            found = ((key, decode(txn.get(key, db=records))) for key in keys)
            return {key: one for key, one in found if one is not None and one.size}

    def contents(self) -> Contents:
        """Return every record."""
        with self._read() as txn:
            return read_contents(txn, self._tables)

    def used_bytes(self) -> int:
        """Bytes of all chunk files with a record."""
        with self._read() as txn:
            return number(txn.get(TOTAL, db=self._tables.numbers))

    def tenant_bytes(self, tenant: bytes) -> int:
        """Bytes of the chunk files of one tenant."""
        with self._read() as txn:
            return read_tenant(txn, self._tables, tenant)

    def epoch(self) -> int:
        """How many times something was forgotten in this folder."""
        with self._read() as txn:
            return ForgetLog(txn, self._tables).epoch()

    def forgotten_since(self, epoch: int) -> Forgotten:
        """What was forgotten after ``epoch``."""
        with self._read() as txn:
            return ForgetLog(txn, self._tables).since(epoch)

    def heads_of(self, document: bytes) -> set[ChunkKey]:
        """Keys of the chunks at which a document begins."""
        with self._read() as txn:
            return ForgetLog(txn, self._tables).heads(document)

    def last_commit(self) -> int:
        """A number that grows with every commit of any process."""
        self.check_process()
        with _translated():
            return int(self._env.info()["last_txnid"])

    @contextmanager
    def turn(self) -> Iterator[Turn]:
        """Wait for this thread's turn at writing, for a limited time.

        Raises:
            TimeoutError: If another writer does not finish.
        """
        self.check_process()
        with self._writer.turn() as turn:
            try:
                yield turn
            finally:
                try:
                    self._pad()
                except OSError:
                    turn.unclean = True

    @contextmanager
    def write(self) -> Iterator[IndexTransaction]:
        """One durable write transaction; an exception inside undoes all of it.

        To be opened in this thread's ``turn()``.
        """
        self.check_process()
        # Pages that a dead process was reading would never be used again.
        self._env.reader_check()
        with _translated(), self._env.begin(write=True) as txn:
            transaction = IndexTransaction(txn, self._tables)
            yield transaction
            transaction.finish()

    @contextmanager
    def _read(self) -> Iterator[lmdb.Transaction]:
        self.check_process()
        with _translated(), self._env.begin() as txn:
            yield txn

    @property
    def _file(self) -> Path:
        return self._folder / INDEX_FOLDER / _DATA_FILE

    def _wanted_length(self) -> int:
        return int((self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"])

    def _check_length(self, *, may_be_short: bool) -> None:
        """Before any page is touched: are they all there?

        To touch a mapped page behind the end of its file kills the process (SIGBUS).

        Args:
            may_be_short: The last writer died, maybe between its commit and ``_pad``.

        Raises:
            IndexTroubleError: If the file was cut short.
        """
        wanted, length = self._wanted_length(), os.fstat(self._data).st_size
        if wanted > _MAP_BYTES or (length < wanted and not may_be_short):
            raise IndexTroubleError(
                f"{_DATA_FILE} is damaged: it has {length} bytes instead of {wanted}"
            )
        self._pad()

    def _pad(self) -> None:
        """Make the file as long as LMDB says it is.

        LMDB does not write pages that one transaction both took and gave up. It never
        reads them either, but a file that ends before them looks like one cut short.
        """
        wanted = self._wanted_length()
        if os.fstat(self._data).st_size < wanted:
            os.ftruncate(self._data, wanted)
            os.fsync(self._data)


def _open_environment(folder: Path) -> lmdb.Environment:
    return lmdb.open(
        str(folder),
        map_size=_MAP_BYTES,
        max_readers=_MAX_READERS,
        max_dbs=len(Tables._fields),
    )


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except lmdb.Error as error:
        raise IndexTroubleError(f"the cache index refused: {error}") from error
