"""Jobs for the SSD tier, and how they are handed over.

A job's outcome is in the job, so that nothing is ever raised on a worker's thread and
forgotten there.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from pcr_core.index.chunk import ChunkKey
from pcr_core.tiers.store.chunk_file import ChunkFormat, ChunkId, ReadOutcome


class WriteOutcome(enum.Enum):
    """What became of a write."""

    STORED = "stored"
    DROPPED = "dropped"
    NO_ROOM = "no room"
    FORGOTTEN = "forgotten"
    FAILED = "failed"


class ReadSpan(NamedTuple):
    """When some layers of a chunk, or of several, were read."""

    first: int
    last: int
    start: float
    stop: float


@dataclass(slots=True, eq=False)
class ReadJob:
    """Fill ``view`` with a chunk's bytes. The view is lent until the job is done.

    Attributes:
        urgent: A request waits for it; goes before reads that are made ahead.
        begun: It has started: it cannot be taken back any more.
        wanted: Cleared when nobody needs it any more: a read layer by layer then ends
            with the next one.
        layers: Leading layers that are in place and verified. Grows only; all of them
            are there exactly when the outcome is ``OK``.
        seconds: How long the read took. Of reads made side by side, its own part.
        parallel: Readers that were busy meanwhile, its own included; a mean.
        spans: When bytes were read, for a timeline: first and last layer, start and
            stop in seconds of ``time.perf_counter``. Of reads made side by side, the
            first one has the spans of all.
    """

    format: ChunkFormat
    chunk: ChunkId
    view: memoryview
    urgent: bool = True
    begun: bool = False
    wanted: bool = True
    layers: int = 0
    outcome: ReadOutcome | None = None
    error: BaseException | None = None
    seconds: float = 0.0
    parallel: float = 1.0
    spans: list[ReadSpan] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class WriteJob:
    """Make a chunk durable. The view is lent until the job is done.

    Attributes:
        stamp: Recency of the chunk.
        ancestors: Keys of the prompt's chunks, root first, up to this one's parent.
            What follows the parent is ignored, so the jobs of a prompt may share one
            list of all its keys.
        epoch: The store's epoch when the chunk was known to belong to nothing that is
            forgotten. If it, or a chunk before it, has been forgotten since, the write
            is dropped.
    """

    format: ChunkFormat
    chunk: ChunkId
    view: memoryview
    stamp: int
    ancestors: Sequence[ChunkKey] = ()
    epoch: int = 0
    outcome: WriteOutcome | None = None
    error: BaseException | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the file it makes."""
        return self.format.file_nbytes

    def lineage(self) -> list[bytes]:
        """Digest of the namespace, then the keys of all chunks before this one.

        Raises:
            ValueError: If the parent is not among ``ancestors``.
        """
        root = self.format.namespace.root
        if self.chunk.parent == root:
            return [root]
        try:
            depth = self.ancestors.index(ChunkKey(self.chunk.parent))
        except ValueError:
            raise ValueError("a write whose parent is not in its ancestors") from None
        return [root, *self.ancestors[: depth + 1]]


@dataclass(slots=True, eq=False)
class DeleteJob:
    """Remove chunks from the SSD tier, record and file. Never dropped."""

    keys: Sequence[ChunkKey]
    error: BaseException | None = None


@dataclass(slots=True, eq=False)
class TouchJob:
    """Record recency in the index. Rides along with the next commit."""

    stamps: dict[ChunkKey, int] = field(default_factory=dict)
    error: BaseException | None = None


@dataclass(slots=True, eq=False)
class DocumentJob:
    """Remember where documents begin, so that they can be forgotten. Never dropped.

    To be queued before the writes of the chunks it names.

    Attributes:
        heads: Digest of a document (16 bytes) -> key of the first chunk that contains
            any of it, under each prefix it was seen behind. Added to what is known.
        epoch: The store's epoch when the documents were seen. Those forgotten since are
            not remembered: their heads count as forgotten, too. ``None`` skips this.
    """

    heads: Mapping[bytes, Collection[ChunkKey]]
    epoch: int | None = None
    error: BaseException | None = None


@dataclass(slots=True, eq=False)
class ForgetJob:
    """Remove all chunks that contain or follow a document. Never dropped.

    Of every model and namespace that uses the folder, if they named the document by the
    same digest.

    Attributes:
        document: Its digest (16 bytes).
        heads: First chunks known to the caller only, beside those in the index.
        keys: Receipt: chunks whose record was removed.
        files: Names of the files that were removed.
        left: Names of files that could not be removed. No record names them, so they
            are never read; the next write, opening or repair removes them.
        nbytes: Bytes of ``files``.
        epoch: Number of this removal; 0 while it has not happened.
    """

    document: bytes
    heads: Collection[ChunkKey] = ()
    keys: Sequence[ChunkKey] = ()
    files: Sequence[str] = ()
    left: Sequence[str] = ()
    nbytes: int = 0
    epoch: int = 0
    error: BaseException | None = None


WriterJob = WriteJob | DeleteJob | TouchJob | DocumentJob | ForgetJob
Job = ReadJob | WriterJob


class Backend(Protocol):
    """What does the work; ``ChunkStore`` is one."""

    def read(self, job: ReadJob) -> None:
        """Set the job's outcome (reader threads)."""

    def read_layers(self, jobs: Sequence[ReadJob]) -> Generator[None, None, None]:
        """Read chunks side by side: of each the first layers, then the next, ...

        Yields whenever ``layers`` of some jobs have grown; outcomes come with it, or
        before. Adds to ``seconds`` what each read takes. To be closed (reader threads).
        """

    def commit(self, jobs: Sequence[WriterJob]) -> None:
        """Do the jobs in order and set their outcomes (the writer thread)."""


class Io(Protocol):
    """How the tier manager gets I/O done. All methods: engine thread."""

    def read(self, job: ReadJob) -> None:
        """Queue a read; urgent ones first, otherwise in the order they came."""

    def read_layers(self, jobs: Sequence[ReadJob]) -> None:
        """Queue urgent reads that are made side by side, layer by layer.

        All of one format. They are shared out among the readers.
        """

    def hurry(self, job: ReadJob) -> None:
        """Make a queued read urgent; a request waits for it now."""

    def cancel(self, job: ReadJob) -> bool:
        """Take back a read that has not started.

        Returns:
            True if it was taken back: its view is free and ``poll`` will not return
            it. False if it runs or has ended.
        """

    def write(self, job: WriterJob) -> None:
        """Queue work for the writer."""

    def poll(self) -> list[Job]:
        """Return the jobs that ended since the last call, oldest first."""

    def wait(self, jobs: Iterable[Job], timeout: float | None = None) -> bool:
        """Block until these jobs have ended; ``poll`` still returns them.

        Returns:
            False if ``timeout`` seconds passed first.
        """

    def wait_any(self, jobs: Iterable[Job], timeout: float | None = None) -> bool:
        """Block until one of these jobs, of which there is one, has ended.

        Returns:
            False if ``timeout`` seconds passed first.
        """

    def wait_layer(self, job: ReadJob, layer: int, timeout: float) -> bool:
        """Block until ``job.layers > layer``, or it has an outcome.

        Returns:
            False if ``timeout`` seconds passed first.
        """

    def flush(self, timeout: float | None = None) -> bool:
        """Block until the writer has nothing left to do; False at the timeout."""

    def close(self, timeout: float = 10.0) -> bool:
        """End: finish what the timeout allows, drop the rest, join the threads.

        Returns:
            False if a thread hangs in a system call and still uses the backend.
        """


def finish(backend: Backend, job: ReadJob) -> None:
    """Run one read; whatever it raises becomes the job's outcome."""
    started = time.perf_counter()
    job.begun = True
    try:
        backend.read(job)
    except Exception as error:
        job.error, job.outcome = error, ReadOutcome.FAILED
    if job.outcome is ReadOutcome.OK:
        job.layers = len(job.format.layout.layers)
    stopped = time.perf_counter()
    job.seconds = stopped - started
    job.spans.append(ReadSpan(0, len(job.format.layout.layers) - 1, started, stopped))


def finish_layers(
    backend: Backend, jobs: Sequence[ReadJob]
) -> Generator[None, None, None]:
    """Run reads side by side; whatever that raises becomes the outcome of those left.

    Yields whenever there is something new, and once more at the end.
    """
    for job in jobs:
        job.begun = True
    since, spans = time.perf_counter(), jobs[0].spans
    try:
        with closing(backend.read_layers(jobs)) as steps:
            for _ in steps:
                have = max(job.layers for job in jobs)
                done = spans[-1].last + 1 if spans else 0
                if have > done:
                    now = time.perf_counter()
                    spans.append(ReadSpan(done, have - 1, since, now))
                    since = now
                yield
    except Exception as error:
        fail(jobs, error)
    yield


def finish_group(backend: Backend, jobs: Sequence[WriterJob]) -> None:
    """Run one group of the writer; whatever it raises fails the jobs it left open."""
    try:
        backend.commit(jobs)
    except Exception as error:
        fail(jobs, error)


def fail(jobs: Iterable[Job], error: BaseException) -> None:
    """Give every job without an outcome the outcome "failed"."""
    for job in jobs:
        if isinstance(job, ReadJob) and job.outcome is None:
            job.outcome, job.error = ReadOutcome.FAILED, error
        elif isinstance(job, WriteJob) and job.outcome is None:
            job.outcome, job.error = WriteOutcome.FAILED, error
        elif not isinstance(job, (ReadJob, WriteJob)):
            job.error = job.error or error
