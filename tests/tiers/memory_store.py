"""``ChunkStore`` without files: for tests of what stands above it.

As fast as a dict, it fails when told to, and it counts what it is asked. Several
managers may share one ``MemoryFolder``, as processes share a folder.
"""

from __future__ import annotations

import errno
from collections import Counter
from itertools import pairwise

from pcr_core.index.chunk import ChunkKey
from pcr_core.tiers.jobs import (
    DeleteJob,
    DocumentJob,
    ForgetJob,
    TouchJob,
    WriteJob,
    WriteOutcome,
)
from pcr_core.tiers.store.chunk_file import ReadOutcome
from pcr_core.tiers.store.chunk_index import Record
from pcr_core.tiers.store.forget_log import LATE, Forgotten
from pcr_core.tiers.store.records import Contents


class MemoryFolder:
    """What a folder holds: records, bytes, documents, what was forgotten."""

    def __init__(self) -> None:
        self.records: dict[ChunkKey, Record] = {}
        self.bytes: dict[ChunkKey, bytes] = {}
        self.ancestors: dict[ChunkKey, list[bytes]] = {}
        self.heads: dict[bytes, set[ChunkKey]] = {}
        self.forgotten: list[tuple[bytes, frozenset[ChunkKey]]] = []
        self._totals: Counter[bytes | None] = Counter()

    def used_bytes(self, tenant: bytes | None = None) -> int:
        return self._totals[tenant]

    def put(self, key: ChunkKey, record: Record, data: bytes, lineage) -> None:
        self.records[key] = record
        self.bytes[key] = data
        self.ancestors[key] = lineage
        self._count(record, record.size)

    def remove(self, key: ChunkKey) -> None:
        record = self.records.pop(key, None)
        if record is not None:
            del self.bytes[key], self.ancestors[key]
            self._count(record, -record.size)

    def _count(self, record: Record, size: int) -> None:
        self._totals.update({None: size, record.tenant: size})

    def since(self, epoch: int) -> Forgotten:
        past = self.forgotten[epoch:]
        heads = frozenset().union(*(heads for _, heads in past))
        documents = frozenset(document for document, _ in past) - {LATE}
        return Forgotten(len(self.forgotten), heads, documents)

    def forget(self, document: bytes, heads) -> list[ChunkKey]:
        self.forgotten.append((document, frozenset(heads)))
        gone = [
            key
            for key in self.records
            if not frozenset(heads).isdisjoint([*self.ancestors[key], key])
        ]
        for key in gone:
            self.remove(key)
        return gone


class MemoryStore:
    """One user of a ``MemoryFolder``.

    Attributes:
        broken: Whether the index refuses: ``"read"``, ``"write"``, or both.
        unreadable: Chunks whose reads fail.
        damaged: Those of which a layer does; noticed when layers are read.
        calls: How often each method was called.
    """

    def __init__(
        self,
        budget_bytes: int,
        folder: MemoryFolder | None = None,
        *,
        tenant: bytes = b"",
        quota_bytes: int | None = None,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.quota_bytes = quota_bytes
        self.tenant = tenant
        self.folder = folder or MemoryFolder()
        self.broken: set[str] = set()
        self.unreadable: set[ChunkKey] = set()
        self.damaged: dict[ChunkKey, int] = {}
        self.calls: Counter[str] = Counter()
        self._owed: list[DocumentJob] = []

    def _call(self, name: str, what: str) -> None:
        self.calls[name] += 1
        if what in self.broken:
            raise OSError(errno.EIO, "the index refused")

    def used_bytes(self) -> int:
        self._call("used_bytes", "read")
        return self.folder.used_bytes()

    def tenant_bytes(self) -> int:
        self._call("tenant_bytes", "read")
        return self.folder.used_bytes(self.tenant)

    def contents(self) -> Contents:
        self._call("contents", "read")
        stored = dict(self.folder.records)
        bare = {}
        for key in stored:
            above = self.folder.ancestors[key]
            for parent, child in pairwise(above):
                if child not in stored:
                    bare[child] = Record(parent, 0, 0, b"", stored[key].tenant)
        roots = {ChunkKey(above[0]) for above in self.folder.ancestors.values()}
        return Contents(stored, bare, roots, [])

    def records(self) -> dict[ChunkKey, Record]:
        return self.contents().stored

    def lookup(self, keys) -> dict[ChunkKey, Record]:
        self._call("lookup", "read")
        records = self.folder.records
        return {key: records[key] for key in keys if key in records}

    def epoch(self) -> int:
        self._call("epoch", "read")
        return len(self.folder.forgotten)

    def forgotten_since(self, epoch: int) -> Forgotten:
        self._call("forgotten_since", "read")
        return self.folder.since(epoch)

    def tokens_of(self, key: ChunkKey) -> list[int]:
        return []

    def read(self, job) -> None:
        self.calls["read"] += 1
        key = job.chunk.key
        if key in self.unreadable:
            job.outcome = ReadOutcome.FAILED
        elif key not in self.folder.records:
            job.outcome = ReadOutcome.MISSING
        else:
            job.view[:] = self.folder.bytes[key]
            job.outcome = ReadOutcome.OK

    def read_layers(self, jobs):
        """One layer at a time."""
        self.calls["read_layers"] += 1
        layers = len(jobs[0].format.layout.layers)
        for layer in range(layers):
            for job in jobs:
                if job.outcome is None:
                    job.outcome = self._read_layer(job, layer)
            yield

    def _read_layer(self, job, layer: int) -> ReadOutcome | None:
        key, offsets = job.chunk.key, job.format.layout.layer_offsets
        if not job.wanted:
            return ReadOutcome.DROPPED
        if key in self.unreadable or self.damaged.get(key) == layer:
            return ReadOutcome.FAILED
        if key not in self.folder.records:
            return ReadOutcome.MISSING
        span = slice(offsets[layer], offsets[layer + 1])
        job.view[span] = self.folder.bytes[key][span]
        job.layers = layer + 1
        return ReadOutcome.OK if job.layers == len(offsets) - 1 else None

    def commit(self, jobs) -> None:
        jobs = [*self._owed, *jobs]
        self._owed = [job for job in jobs if isinstance(job, DocumentJob)]
        self._call("commit", "write")
        self._owed = []
        for job in jobs:
            if isinstance(job, WriteJob):
                job.outcome = self._write(job)
            elif isinstance(job, DeleteJob):
                for key in job.keys:
                    self.unreadable.discard(key)
                    self.folder.remove(key)
            elif isinstance(job, DocumentJob):
                self._register(job)
            elif isinstance(job, ForgetJob):
                heads = self.folder.heads.pop(job.document, set()).union(job.heads)
                job.keys = self.folder.forget(job.document, heads)
                job.epoch = len(self.folder.forgotten)
            else:
                assert isinstance(job, TouchJob)

    def audit(self, *, fix: bool) -> list[str]:
        return []

    def close(self) -> None:
        pass

    def _write(self, job: WriteJob) -> WriteOutcome:
        folder, key, lineage = self.folder, job.chunk.key, job.lineage()
        if folder.since(job.epoch).covers([*lineage, key]):
            return WriteOutcome.FORGOTTEN
        if key in folder.records:
            return WriteOutcome.STORED
        if folder.used_bytes() + job.nbytes > self.budget_bytes:
            return WriteOutcome.NO_ROOM
        if self.quota_bytes is not None:
            mine = folder.used_bytes(self.tenant)
            if mine + job.nbytes > self.quota_bytes:
                return WriteOutcome.NO_ROOM
        record = Record(job.chunk.parent, job.nbytes, job.stamp, b"", self.tenant)
        folder.put(key, record, bytes(job.view), lineage)
        return WriteOutcome.STORED

    def _register(self, job: DocumentJob) -> None:
        for document, heads in job.heads.items():
            if self.folder.since(job.epoch or 0).documents.intersection([document]):
                self.folder.forget(LATE, heads)
            else:
                self.folder.heads.setdefault(document, set()).update(heads)
