"""One group of writer's jobs, done in order inside one index transaction."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from pcr_core.index.chunk import ChunkKey
from pcr_core.tiers.jobs import (
    DeleteJob,
    DocumentJob,
    ForgetJob,
    TouchJob,
    WriteJob,
    WriteOutcome,
    WriterJob,
)
from pcr_core.tiers.store.chunk_file import (
    StrayFileError,
    chunk_path,
    discard,
    write_chunk,
)
from pcr_core.tiers.store.files import Files
from pcr_core.tiers.store.forget_log import LATE, Forgotten, check_digests
from pcr_core.tiers.store.records import IndexTransaction, Record
from pcr_core.tiers.store.recovery import Limits, sweep

_log = logging.getLogger("pcr_core.tiers")


class CommitGroup:
    """Does jobs: files at once, records in a transaction that its owner commits.

    What the jobs have come to is in them only after ``settle``, which its owner calls
    after the commit; ``undo`` after anything else.

    Args:
        folder: Where chunk files live.
        files: System calls.
        limits: What may be stored.

    Attributes:
        unclean: Files that no record names are left in the folder.
    """

    def __init__(self, folder: Path, files: Files, limits: Limits) -> None:
        self._folder = folder
        self._files = files
        self._limits = limits
        self._stray_bytes = 0
        self._written: list[Path] = []
        self._must_flush = self._must_sweep = False
        self._left: list[str] = []
        self._settled: list[Callable[[], None]] = []
        self._since: dict[int, Forgotten] = {}
        self.unclean = False

    def run(self, txn: IndexTransaction, jobs: Iterable[WriterJob]) -> None:
        """Do the jobs; in the end the folder's names are on the device.

        Raises:
            OSError: If the index or the folder refuses.
        """
        for job in jobs:
            if isinstance(job, WriteJob):
                self._write(txn, job)
            elif isinstance(job, DeleteJob):
                self._delete(txn, job.keys)
            elif isinstance(job, TouchJob):
                for key, stamp in job.stamps.items():
                    txn.touch(key, stamp)
            elif isinstance(job, DocumentJob):
                self._register(txn, job)
            else:
                self._forget(txn, job)
        if self._must_sweep:
            # Whatever else lies there without a record may be forgotten, too.
            self.sweep(txn)
        if self._must_flush:
            self._files.fsync_folder(self._folder)

    def sweep(self, txn: IndexTransaction) -> None:
        """Remove files that no record names.

        Those that cannot be removed take room from the budget.
        """
        left = sweep(txn, self._folder, self._files)
        self._left = list(left)
        self._stray_bytes = sum(left.values())
        self.unclean = bool(left)

    def settle(self) -> None:
        """After the commit: give the jobs their outcomes."""
        for settle in self._settled:
            settle()

    def undo(self) -> None:
        """The transaction failed: remove the files that it would have named."""
        for path in self._written:
            self.unclean |= not discard(self._files, path)

    # --- chunks ---

    def _write(self, txn: IndexTransaction, job: WriteJob) -> None:
        key = job.chunk.key
        try:
            lineage = job.lineage()
            if self._forgotten(txn, job.epoch).covers([*lineage, key]):
                self._outcome(job, WriteOutcome.FORGOTTEN)
                return
            if txn.stored(key) is not None:
                self._outcome(job, WriteOutcome.STORED)
                return
            if not self._has_room(txn, job.nbytes):
                self._outcome(job, WriteOutcome.NO_ROOM)
                return
            digest = write_chunk(
                self._files, self._folder, job.format, job.chunk, job.view
            )
        except (OSError, ValueError) as error:
            job.outcome, job.error = WriteOutcome.FAILED, error
            self.unclean |= isinstance(error, StrayFileError)
            return
        self._written.append(chunk_path(self._folder, key))
        self._must_flush = True
        tenant = self._limits.tenant
        record = Record(job.chunk.parent, job.nbytes, job.stamp, digest, tenant)
        txn.put(key, record, lineage)
        self._outcome(job, WriteOutcome.STORED)

    def _has_room(self, txn: IndexTransaction, size: int) -> bool:
        limits = self._limits
        if txn.is_full() or txn.used + self._stray_bytes + size > limits.budget:
            return False
        if limits.quota is None:
            return True
        return txn.tenant_bytes(limits.tenant) + size <= limits.quota

    def _delete(self, txn: IndexTransaction, keys: Collection[ChunkKey]) -> None:
        for key in keys:
            if txn.stored(key) is None:
                continue
            try:
                self._files.unlink(chunk_path(self._folder, key))
            except OSError as error:
                # The file still takes space, so its record stays and is counted.
                _log.warning("cannot remove chunk file %s: %s", key.hex(), error)
                continue
            txn.remove(key)

    # --- documents ---

    def _register(self, txn: IndexTransaction, job: DocumentJob) -> None:
        try:
            for document, heads in job.heads.items():
                check_digests(document, heads)
        except ValueError as error:
            job.error = error
            return
        for document, heads in job.heads.items():
            seen = txn.forgotten.epoch() if job.epoch is None else job.epoch
            if self._forgotten(txn, seen).has(document):
                # Its chunks may be on their way behind this job.
                self._remove(txn, LATE, heads)
            else:
                txn.forgotten.add_heads(document, heads)

    def _forget(self, txn: IndexTransaction, job: ForgetJob) -> None:
        try:
            check_digests(job.document, job.heads)
        except ValueError as error:
            job.error = error
            return
        heads = txn.forgotten.heads(job.document).union(job.heads)
        txn.forgotten.clear(job.document)
        keys, files, epoch = self._remove(txn, job.document, heads)

        def settle() -> None:
            job.keys, job.files, job.left = keys, list(files), self._left
            job.nbytes, job.epoch = sum(files.values()), epoch

        self._settled.append(settle)

    def _remove(
        self, txn: IndexTransaction, document: bytes, heads: Collection[ChunkKey]
    ) -> tuple[list[ChunkKey], dict[str, int], int]:
        """Forget; return keys of records, bytes of files that went, and the epoch."""
        gone = txn.remove_subtrees(heads)
        files = {}
        for key, record in gone.items():
            path = chunk_path(self._folder, key)
            if record.size and discard(self._files, path):
                files[path.name] = record.size
            else:
                self._stray_bytes += record.size
        self._must_flush = self._must_sweep = True
        self._since.clear()
        return list(gone), files, txn.forgotten.record(document, heads)

    # --- parts ---

    def _forgotten(self, txn: IndexTransaction, epoch: int) -> Forgotten:
        if epoch not in self._since:
            self._since[epoch] = txn.forgotten.since(epoch)
        return self._since[epoch]

    def _outcome(self, job: WriteJob, outcome: WriteOutcome) -> None:
        def settle() -> None:
            job.outcome = outcome

        self._settled.append(settle)
