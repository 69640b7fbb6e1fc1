"""Chunk files read side by side, layer by layer, each layer verified before it counts.

A model needs layer 0 of every chunk before layer 1 of any, so what is read in this
order can be computed on while it is read. The first read of a file brings its header:
with the digest in the index record, the chunk's identity and the checksums that the
header states, it must be exactly the header that was written. From then on each layer
needs its own checksum only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Sequence
from itertools import zip_longest
from pathlib import Path

import xxhash

from pcr_core.index.chunk import ChunkKey, ChunkLayout
from pcr_core.tiers.jobs import ReadJob
from pcr_core.tiers.store.chunk_file import (
    ReadOutcome,
    chunk_path,
    header_digest,
    read_all,
)
from pcr_core.tiers.store.files import Files
from pcr_core.tiers.store.records import Record

LEAST_READ = 64 * 2**10
"""Bytes below which layers are read together. Calls and checksums of 48 KiB instead of
144 take a quarter more time from the page cache, and none from a disk."""

_AHEAD = 4
"""Reads that the system is told of before they are made: it does them meanwhile. Left
to itself it reads on in each file, so that all layers come with the first."""

_MOST_OPEN = 256
"""Files that stay open meanwhile; those beyond are opened again for each read."""

Lookup = Callable[[Iterable[ChunkKey]], dict[ChunkKey, Record]]


def read_layers(
    files: Files,
    folder: Path,
    lookup: Lookup,
    jobs: Sequence[ReadJob],
    least: int,
) -> Generator[None, None, None]:
    """Read chunks side by side; see ``Backend.read_layers``.

    The last layer counts together with the outcome only: after one more look at the
    index, whether this is still the chunk it was.

    Args:
        files: System calls.
        folder: Where chunk files live.
        lookup: Finds the records of stored chunks.
        jobs: The reads, of one format.
        least: Bytes of a read below which layers are read together.

    Raises:
        OSError: If the index refused.
    """
    records = lookup([job.chunk.key for job in jobs])
    reads = {
        job: _LayerRead(files, folder, job, record.digest, number < _MOST_OPEN)
        for number, job in enumerate(jobs)
        if (record := records.get(job.chunk.key)) is not None
    }
    for job in jobs:
        if job not in reads:
            job.outcome = ReadOutcome.MISSING
    try:
        stops = _stops(jobs[0].format.layout, least)
        for stop, following in zip_longest(stops, stops[1:]):
            ended = _advance(reads, stop, following)
            now = lookup([job.chunk.key for job in ended]) if ended else {}
            for job, outcome in ended.items():
                record = now.get(job.chunk.key)
                same = record is not None and record.digest == reads[job].digest
                _end(job, outcome if same else ReadOutcome.MISSING)
                reads.pop(job).close()
            yield
    finally:
        for read in reads.values():
            read.close()


def _stops(layout: ChunkLayout, least: int) -> list[int]:
    """After how many layers each read ends."""
    stops, begun, last = list[int](), 0, len(layout.layers)
    for layer, end in enumerate(layout.layer_offsets[1:], start=1):
        if end - begun >= least or layer == last:
            stops.append(layer)
            begun = end
    return stops


def _advance(
    reads: dict[ReadJob, _LayerRead], stop: int, following: int | None
) -> dict[ReadJob, ReadOutcome]:
    """Bring all reads forward; returns those that have ended, and how.

    Args:
        reads: The reads.
        stop: How many layers each is to have.
        following: How many it is to have next, if there are more.
    """
    ended, order, begun = {}, list(reads.values()), time.perf_counter()
    for number, (job, read) in enumerate(reads.items()):
        later = number + _AHEAD
        if later < len(order):
            order[later].announce(stop)
        elif following is not None:
            order[later % len(order)].announce(following)
        outcome = read.advance(stop) if job.wanted else ReadOutcome.DROPPED
        if outcome is not ReadOutcome.OK or stop == len(job.format.layout.layers):
            ended[job] = outcome
        else:
            job.layers = stop
        done = time.perf_counter()
        job.seconds += done - begun
        begun = done
    return ended


def _end(job: ReadJob, outcome: ReadOutcome) -> None:
    if outcome is ReadOutcome.OK:
        job.layers = len(job.format.layout.layers)
    job.outcome = outcome


class _LayerRead:
    """One chunk file, and how far it has been read."""

    def __init__(
        self, files: Files, folder: Path, job: ReadJob, digest: bytes, stays_open: bool
    ) -> None:
        self.digest = digest
        self._files = files
        self._path = chunk_path(folder, job.chunk.key)
        self._job = job
        self._stays_open = stays_open
        self._fd: int | None = None
        self._done = 0
        self._sums: list[bytes] = []

    def advance(self, stop: int) -> ReadOutcome:
        """Read and verify the layers up to ``stop``, and to the file's end after all.

        Never raises for the state of the file.
        """
        try:
            good = self._read(stop)
        except (FileNotFoundError, NotADirectoryError):
            return ReadOutcome.MISSING
        except OSError as error:
            self._job.error = error
            return ReadOutcome.FAILED
        return ReadOutcome.OK if good else ReadOutcome.CORRUPT

    def announce(self, stop: int) -> None:
        """Have the system begin to read the layers up to ``stop``."""
        if not self._stays_open:
            return
        try:
            fd = self._open()
        except OSError:
            return  # it will be met again, and told
        fmt, start = self._job.format, self._done
        offsets = fmt.layout.layer_offsets
        at = fmt.header_nbytes + offsets[start] if start else 0
        self._files.reads_soon(fd, at, fmt.header_nbytes + offsets[stop] - at)

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        fd, self._fd = self._fd, None
        if fd is not None:
            self._files.close(fd)

    def _read(self, stop: int) -> bool:
        fmt, start = self._job.format, self._done
        offsets = fmt.layout.layer_offsets
        header = memoryview(bytearray(0 if start else fmt.header_nbytes))
        data = self._job.view[offsets[start] : offsets[stop]]
        beyond = memoryview(bytearray(stop == len(offsets) - 1))
        at = fmt.header_nbytes + offsets[start] - len(header)
        count = self._fill([header, data, beyond], at)
        if count != len(header) + len(data):
            return False
        if header and not self._take_header(header):
            return False
        self._done = stop
        return all(self._is_good(layer) for layer in range(start, stop))

    def _fill(self, buffers: list[memoryview], at: int) -> int:
        try:
            return read_all(self._files, self._open(), [b for b in buffers if b], at)
        finally:
            if not self._stays_open:
                self.close()

    def _open(self) -> int:
        if self._fd is None:
            self._fd = self._files.open_read(self._path)
            self._files.reads_apart(self._fd)
        return self._fd

    def _take_header(self, header: memoryview) -> bool:
        """Whether it is the one that was written, of the chunk that is wanted."""
        fmt = self._job.format
        if header_digest(header) != self.digest:
            return False
        try:
            self._sums = fmt.stated_sums(header)
        except ValueError:
            return False
        return header == fmt.header(self._job.chunk, self._sums)

    def _is_good(self, layer: int) -> bool:
        start, end = self._job.format.layout.layer_offsets[layer : layer + 2]
        found = xxhash.xxh3_128_digest(self._job.view[start:end])
        return found == self._sums[layer]
