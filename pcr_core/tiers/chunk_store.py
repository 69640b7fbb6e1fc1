"""The SSD tier: durable key -> bytes, under a hard budget of real file bytes.

One chunk is one file; the record is committed after the file is complete, and a
chunk without a record does not exist. A crash may lose a chunk, never serve a bad
one. Several engines and processes may use one folder: each sees what the others have
committed, and a chunk removed by another is a miss.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

from pcr_core.index.chunk import ChunkKey
from pcr_core.tiers.chunk_file import (
    ReadOutcome,
    chunk_path,
    discard,
    read_chunk,
    write_chunk,
)
from pcr_core.tiers.chunk_index import ChunkIndex, Record
from pcr_core.tiers.files import Files
from pcr_core.tiers.folder import CHUNK_FOLDER, prepare_folder
from pcr_core.tiers.jobs import (
    DeleteJob,
    ReadJob,
    TouchJob,
    WriteJob,
    WriteOutcome,
    WriterJob,
)
from pcr_core.tiers.recovery import audit_store, recover, shrink

_log = logging.getLogger("pcr_core.tiers")


class ChunkStore:
    """Chunk files plus index in one folder.

    ``lookup`` and ``read`` may be called from any thread, ``commit`` from one.

    Args:
        cache_dir: The folder; created when missing.
        budget_bytes: Hard limit on the bytes of all chunk files, whoever wrote them.
            Opening with a smaller budget than before evicts down to it.
        files: System calls; replaced in tests.

    Raises:
        ConfigError: If the folder cannot be used.
        StoreError: If another format version wrote it, or the index cannot be opened.
    """

    def __init__(
        self, cache_dir: Path, budget_bytes: int, *, files: Files | None = None
    ) -> None:
        self.budget_bytes = budget_bytes
        self._files = files or Files()
        prepare_folder(cache_dir)
        self._folder = cache_dir / CHUNK_FOLDER
        self._index = ChunkIndex.acquire(cache_dir)
        self._lost = False
        self._closed = False
        try:
            if self._index.users == 1:
                recover(self._index, self._folder, self._files)
            shrink(self._index, self._folder, self._files, budget_bytes)
        except BaseException:
            self._index.release()
            raise

    def used_bytes(self) -> int:
        """Bytes of all chunk files in the folder, headers included."""
        return self._index.used_bytes()

    def records(self) -> dict[ChunkKey, Record]:
        """Return every record, of every namespace."""
        return self._index.records()

    def lookup(self, keys: Iterable[ChunkKey]) -> dict[ChunkKey, Record]:
        """Return the records that exist now, other processes' included.

        Raises:
            OSError: If the index refused.
            StoreError: In a child made by ``fork``.
        """
        if self._lost:
            return {}
        return self._index.lookup(keys)

    def read(self, job: ReadJob) -> None:
        """Fill the job's buffer with complete and verified bytes, or say why not."""
        key = job.chunk.key
        try:
            record = self._index.lookup([key]).get(key)
        except OSError as error:
            job.outcome, job.error = ReadOutcome.FAILED, error
            return
        if record is None:
            job.outcome = ReadOutcome.MISSING
            return
        job.outcome = read_chunk(
            self._files,
            chunk_path(self._folder, key),
            job.format,
            job.chunk,
            record.digest,
            job.view,
        )

    def commit(self, jobs: Sequence[WriterJob]) -> None:
        """Do one group: remove, write files, then one index transaction.

        Files are removed before others are written, so real bytes never pass the
        budget, and records change last, so a crash leaves no record of a file that
        was not complete.

        Raises:
            OSError: If the index refused or the folder is gone. Jobs without an
                outcome have failed; nothing that was written in this group remains.
        """
        if not self._index.is_present():
            self._lost = True
            raise FileNotFoundError(
                errno.ENOENT, "the cache folder was deleted; restart to use it again"
            )
        deletes = [job for job in jobs if isinstance(job, DeleteJob)]
        removed = self._remove([key for job in deletes for key in job.keys])
        writes = [job for job in jobs if isinstance(job, WriteJob)]
        entries = self._write(writes, removed)
        touched: dict[ChunkKey, int] = {}
        for job in jobs:
            if isinstance(job, TouchJob):
                touched.update(job.stamps)
        try:
            if entries:
                self._files.fsync_folder(self._folder)
            self._publish(removed, entries, touched)
        except BaseException:
            for job in entries:
                discard(self._files, chunk_path(self._folder, job.chunk.key))
            raise

    def audit(self, *, fix: bool) -> list[str]:
        """Read every chunk file and compare it with the index; return what is wrong.

        Args:
            fix: Also remove what is wrong.

        Raises:
            StoreError: If the audit could not finish.
        """
        return audit_store(self._index, self._folder, self._files, fix=fix)

    def close(self) -> None:
        """Let go of the folder. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self._index.release()

    def _remove(self, keys: Sequence[ChunkKey]) -> dict[ChunkKey, int]:
        """Unlink files; return the sizes of the records that may now go."""
        removed: dict[ChunkKey, int] = {}
        for key, record in self._index.lookup(keys).items():
            try:
                self._files.unlink(chunk_path(self._folder, key))
            except OSError as error:
                # The file still takes space, so its record stays and is counted.
                _log.warning("cannot remove chunk file %s: %s", key.hex(), error)
                continue
            removed[key] = record.size
        return removed

    def _write(
        self, jobs: Sequence[WriteJob], removed: dict[ChunkKey, int]
    ) -> dict[WriteJob, Record]:
        """Write files, each within the budget; return those that want a record."""
        known = self._index.lookup(job.chunk.key for job in jobs)
        used = self._index.used_bytes() - sum(removed.values())
        entries: dict[WriteJob, Record] = {}
        for job in jobs:
            key = job.chunk.key
            old = known.get(key) if key not in removed else None
            if old is not None and not job.replace:
                job.outcome = WriteOutcome.STORED
                continue
            if used + job.nbytes > self.budget_bytes:
                job.outcome = WriteOutcome.NO_ROOM
                continue
            record = self._write_one(job)
            if record is not None:
                entries[job] = record
                used += job.nbytes - (old.size if old else 0)
        return entries

    def _write_one(self, job: WriteJob) -> Record | None:
        try:
            digest = write_chunk(
                self._files, self._folder, job.format, job.chunk, job.view
            )
        except OSError as error:
            job.outcome, job.error = WriteOutcome.FAILED, error
            return None
        return Record(job.chunk.parent, job.nbytes, job.stamp, digest)

    def _publish(
        self,
        removed: dict[ChunkKey, int],
        entries: dict[WriteJob, Record],
        touched: dict[ChunkKey, int],
    ) -> None:
        """The commit: after it the written chunks exist, and only then."""
        if not (removed or entries or touched):
            return
        crowded = []
        with self._index.write() as txn:
            for key in removed:
                txn.remove(key)
            for job, record in entries.items():
                # Another process may have used the room since it was checked.
                if txn.used + record.size > self.budget_bytes:
                    crowded.append(job)
                    txn.remove(job.chunk.key)
                    continue
                txn.put(job.chunk.key, record)
            for key, stamp in touched.items():
                txn.touch(key, stamp)
        for job in entries:
            job.outcome = WriteOutcome.STORED
        for job in crowded:
            job.outcome = WriteOutcome.NO_ROOM
            discard(self._files, chunk_path(self._folder, job.chunk.key))
