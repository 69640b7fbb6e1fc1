"""The SSD tier: durable key -> bytes, under a hard budget of real file bytes.

One chunk is one file; the record is committed after the file is complete, and a
chunk without a record does not exist. A crash may lose a chunk, never serve a bad
one. Several engines and processes may use one folder: each sees what the others have
committed, a chunk removed by another is a miss, and one of them writes at a time.
"""

from __future__ import annotations

import errno
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path

from pcr_core.errors import StoreError
from pcr_core.index.chunk import ChunkKey
from pcr_core.tiers.jobs import DocumentJob, ReadJob, WriterJob
from pcr_core.tiers.store.audit import audit_store
from pcr_core.tiers.store.chunk_file import (
    ReadOutcome,
    chunk_path,
    read_chunk,
    stored_tokens,
)
from pcr_core.tiers.store.chunk_index import ChunkIndex, Record
from pcr_core.tiers.store.commit_group import CommitGroup
from pcr_core.tiers.store.files import Files
from pcr_core.tiers.store.folder import CHUNK_FOLDER, prepare_folder
from pcr_core.tiers.store.forget_log import Forgotten
from pcr_core.tiers.store.layer_reads import LEAST_READ, read_layers
from pcr_core.tiers.store.records import Contents, IndexTransaction
from pcr_core.tiers.store.recovery import Limits, recover, shrink

_TENANT_BYTES = 16


class ChunkStore:
    """Chunk files plus index in one folder.

    Everything may be called from any thread, ``commit`` from one. It, opening and
    ``audit`` wait for their turn at writing; nothing else does.

    Args:
        cache_dir: The folder; created when missing.
        budget_bytes: Hard limit on the bytes of all chunk files, whoever wrote them.
            Opening with a smaller budget than before evicts down to it.
        tenant: Whose chunks this store writes: a 16-byte digest of the name, or empty.
        quota_bytes: Hard limit on the bytes of that tenant's chunk files; ``None`` for
            no limit of its own. Opening with a smaller one evicts down to it.
        files: System calls; replaced in tests.
        least_read: Bytes below which ``read_layers`` reads several layers together.

    Raises:
        ConfigError: If the folder cannot be used.
        StoreError: If another format version wrote it, the index cannot be opened, or
            another process hangs while it writes.
        ValueError: If ``tenant`` has another length.
    """

    def __init__(
        self,
        cache_dir: Path,
        budget_bytes: int,
        *,
        tenant: bytes = b"",
        quota_bytes: int | None = None,
        files: Files | None = None,
        least_read: int = LEAST_READ,
    ) -> None:
        if len(tenant) not in (0, _TENANT_BYTES):
            raise ValueError(f"tenant must have {_TENANT_BYTES} bytes, or none")
        self.budget_bytes = budget_bytes
        self.quota_bytes = quota_bytes
        self.tenant = tenant
        self._least_read = least_read
        self._limits = Limits(budget_bytes, tenant, quota_bytes)
        self._files = files or Files()
        prepare_folder(cache_dir)
        self._folder = cache_dir / CHUNK_FOLDER
        self._index = ChunkIndex.acquire(cache_dir)
        self._lost = False
        self._closed = False
        self._unregistered: list[DocumentJob] = []
        self._opened: tuple[int, Contents] | None = None
        try:
            self._open()
        except BaseException:
            self._index.release()
            raise

    def used_bytes(self) -> int:
        """Bytes of all chunk files in the folder, headers included."""
        return self._index.used_bytes()

    def tenant_bytes(self) -> int:
        """Bytes of the chunk files of this store's tenant, headers included."""
        return self._index.tenant_bytes(self.tenant)

    def contents(self) -> Contents:
        """Return every record of every namespace, at one moment.

        The first call after opening costs nothing if nobody has written since.
        """
        opened, self._opened = self._opened, None
        if opened is not None and opened[0] == self._index.last_commit():
            return opened[1]
        return self._index.contents()

    def records(self) -> dict[ChunkKey, Record]:
        """Return the records of all stored chunks, of every namespace."""
        return self.contents().stored

    def bare_records(self) -> dict[ChunkKey, Record]:
        """Return the records of chunks that are not stored but have descendants."""
        return self.contents().bare

    def lookup(self, keys: Iterable[ChunkKey]) -> dict[ChunkKey, Record]:
        """Return the records of chunks stored now, by other processes, too.

        Raises:
            OSError: If the index refused.
            StoreError: In a child made by ``fork``.
        """
        if self._lost:
            return {}
        return self._index.lookup(keys)

    def tokens_of(self, key: ChunkKey) -> list[int]:
        """Token ids of a stored chunk, from its file's header; empty if unreadable."""
        return stored_tokens(chunk_path(self._folder, key))

    def epoch(self) -> int:
        """How many times something was forgotten in this folder, by any process.

        Raises:
            OSError: If the index refused.
        """
        return self._index.epoch()

    def forgotten_since(self, epoch: int) -> Forgotten:
        """Return what was forgotten after ``epoch``; one short read when nothing was.

        Raises:
            OSError: If the index refused.
        """
        return self._index.forgotten_since(epoch)

    def heads_of(self, document: bytes) -> set[ChunkKey]:
        """Return the chunks at which a document begins, behind any text.

        Raises:
            OSError: If the index refused.
        """
        return self._index.heads_of(document)

    def read(self, job: ReadJob) -> None:
        """Fill the job's buffer with complete and verified bytes, or say why not.

        A chunk that was evicted or forgotten in the meantime counts as missing.
        """
        try:
            job.outcome = self._read(job)
        except OSError as error:
            job.outcome, job.error = ReadOutcome.FAILED, error

    def read_layers(self, jobs: Sequence[ReadJob]) -> Generator[None, None, None]:
        """Fill the buffers of several jobs side by side, layer by layer, verified.

        Yields whenever ``layers`` of some have grown. To be closed.

        Raises:
            OSError: If the index refused.
        """
        lookup, least = self._index.lookup, self._least_read
        return read_layers(self._files, self._folder, lookup, jobs, least)

    def commit(self, jobs: Sequence[WriterJob]) -> None:
        """Do one group in order, alone of all threads and processes.

        Budget, quota, epoch and records are decided in one index transaction around
        the whole group. A file is removed when its job comes, so before those written
        after it, and the records change last, so a crash leaves no record of a file
        that was not complete.

        Raises:
            OSError: If the index refused, the folder is gone, or another writer does
                not finish. Jobs without an outcome have failed; nothing that was
                written in this group remains.
        """
        if not self._index.is_present():
            self._lost = True
            raise FileNotFoundError(
                errno.ENOENT, "the cache folder was deleted; restart to use it again"
            )
        # Documents are known before their chunks are stored, whatever failed before.
        jobs = [*self._unregistered, *jobs]
        self._unregistered = [job for job in jobs if isinstance(job, DocumentJob)]
        self._commit(jobs)
        self._unregistered = []

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

    def _commit(self, jobs: Sequence[WriterJob]) -> None:
        with self._index.turn() as turn:
            group = CommitGroup(self._folder, self._files, self._limits)
            try:
                with self._index.write() as txn:
                    if turn.unclean:
                        group.sweep(txn)
                        turn.unclean = False
                    group.run(txn, jobs)
            except BaseException:
                group.undo()
                raise
            finally:
                turn.unclean |= group.unclean
            group.settle()

    def _read(self, job: ReadJob) -> ReadOutcome:
        key = job.chunk.key
        record = self._index.lookup([key]).get(key)
        if record is None:
            return ReadOutcome.MISSING
        outcome = read_chunk(
            self._files,
            chunk_path(self._folder, key),
            job.format,
            job.chunk,
            record.digest,
            job.view,
        )
        now = self._index.lookup([key]).get(key)
        if now is None or now.digest != record.digest:
            return ReadOutcome.MISSING
        return outcome

    def _open(self) -> None:
        """Recover if we are the first of this process; shrink if need be."""
        first = self._index.users == 1
        try:
            if not first and self._fits():
                return
            with self._index.turn() as turn:
                with self._index.write() as txn:
                    if first:
                        contents, left = recover(txn, self._folder, self._files)
                        turn.unclean = bool(left)
                        self._prune(txn, contents)
                    shrunk = shrink(txn, self._folder, self._files, self._limits)
                if first and not shrunk:
                    self._opened = self._index.last_commit(), contents
        except OSError as error:
            raise StoreError(
                f"the cache folder {self._folder.parent} cannot be recovered and "
                f"brought down to {self.budget_bytes} bytes ({error}); free some disk "
                "space, raise ssd_bytes, or delete the folder to start afresh"
            ) from error

    def _fits(self) -> bool:
        quota = self.quota_bytes
        return self.used_bytes() <= self.budget_bytes and (
            quota is None or self.tenant_bytes() <= quota
        )

    def _prune(self, txn: IndexTransaction, contents: Contents) -> None:
        """Drop heads of documents of which nothing is left.

        Only when nobody else is here: another process may be about to write chunks of a
        document that it has registered.
        """
        with self._index.lock.alone() as alone:
            if alone:
                txn.forgotten.prune(
                    lambda key: key in contents.stored or key in contents.bare
                )
