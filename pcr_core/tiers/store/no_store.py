"""The SSD tier that is not there: ``ssd_bytes=0``."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence

from pcr_core.index.chunk import ChunkKey
from pcr_core.tiers.jobs import ReadJob, WriterJob
from pcr_core.tiers.store.chunk_file import ReadOutcome
from pcr_core.tiers.store.chunk_index import Record
from pcr_core.tiers.store.chunk_store import ChunkStore
from pcr_core.tiers.store.forget_log import Forgotten
from pcr_core.tiers.store.records import Contents


class NoStore:
    """Holds nothing and takes nothing. A stand-in for ``ChunkStore``; any thread."""

    budget_bytes = 0
    quota_bytes = None
    tenant = b""

    def used_bytes(self) -> int:
        """Return 0."""
        return 0

    def tenant_bytes(self) -> int:
        """Return 0."""
        return 0

    def records(self) -> dict[ChunkKey, Record]:
        """Return nothing."""
        return {}

    def contents(self) -> Contents:
        """Return nothing."""
        return Contents({}, {}, set(), [])

    def epoch(self) -> int:
        """Return 0."""
        return 0

    def forgotten_since(self, epoch: int) -> Forgotten:
        """Return that nothing was."""
        return Forgotten(0, frozenset(), frozenset())

    def heads_of(self, document: bytes) -> set[ChunkKey]:
        """Return nothing."""
        return set()

    def lookup(self, keys: Iterable[ChunkKey]) -> dict[ChunkKey, Record]:
        """Return nothing."""
        return {}

    def tokens_of(self, key: ChunkKey) -> list[int]:
        """Return nothing."""
        return []

    def read(self, job: ReadJob) -> None:
        """Say that the chunk is not there."""
        job.outcome = ReadOutcome.MISSING

    def read_layers(self, jobs: Sequence[ReadJob]) -> Generator[None, None, None]:
        """Say that none of the chunks is there."""
        for job in jobs:
            self.read(job)
        yield

    def commit(self, jobs: Sequence[WriterJob]) -> None:
        """Do nothing."""

    def audit(self, *, fix: bool) -> list[str]:
        """Find nothing wrong."""
        return []

    def close(self) -> None:
        """Do nothing."""


Store = ChunkStore | NoStore
"""The SSD tier, or its absence."""
