"""Chunk files read layer by layer: none counts before it and its header are right."""

from __future__ import annotations

import errno
import os
from contextlib import closing
from itertools import pairwise

import pytest

from pcr_core.index.chunk import ChunkLayout, LayerShape, Namespace
from pcr_core.tiers.jobs import ReadJob, finish_layers
from pcr_core.tiers.store import layer_reads
from pcr_core.tiers.store.chunk_file import (
    ChunkFormat,
    ReadOutcome,
    chunk_path,
    write_chunk,
)
from pcr_core.tiers.store.files import Files
from pcr_core.tiers.store.layer_reads import read_layers
from pcr_core.tiers.store.records import Record
from tests.tiers.conftest import FaultyFiles, chunk_id, prompt

LAYOUT = ChunkLayout(
    (LayerShape(1, 4, 2), LayerShape(2, 2, 4), LayerShape(1, 2, 2)), 4, "F32", 4
)
NAMESPACE = Namespace.of([("test", b"tiny")])
FORMAT = ChunkFormat(LAYOUT, NAMESPACE)
LAYERS = len(LAYOUT.layers)
ENDS = LAYOUT.layer_offsets
HEADER = FORMAT.header_nbytes
TOKENS = prompt(1, 2, 3, 4)


def data_of(index: int) -> bytes:
    return bytes((index + 3 * at) % 251 for at in range(LAYOUT.nbytes))


class Shelf:
    """Four chunks on disk, and their records."""

    def __init__(self, folder, files: Files | None = None) -> None:
        self.folder = folder
        self.files = files or Files()
        self.chunks = [chunk_id(TOKENS, index) for index in range(4)]
        self.records = {}
        for index, chunk in enumerate(self.chunks):
            view = memoryview(data_of(index))
            digest = write_chunk(Files(), folder, FORMAT, chunk, view)
            record = Record(chunk.parent, FORMAT.file_nbytes, 1, digest)
            self.records[chunk.key] = record

    def path(self, index: int):
        return chunk_path(self.folder, self.chunks[index].key)

    def lookup(self, keys):
        return {key: self.records[key] for key in keys if key in self.records}

    def jobs(self, *indices: int) -> list[ReadJob]:
        return [
            ReadJob(FORMAT, self.chunks[i], memoryview(bytearray(LAYOUT.nbytes)))
            for i in indices
        ]

    def read(self, jobs, least: int = 1):
        return read_layers(self.files, self.folder, self.lookup, jobs, least)

    def read_all(self, *indices: int) -> list[ReadJob]:
        jobs = self.jobs(*indices)
        for _ in self.read(jobs):
            self.look(jobs)
        self.look(jobs)
        return jobs

    def look(self, jobs) -> None:
        """What must hold at any time, from any thread."""
        for job in jobs:
            index = self.chunks.index(job.chunk)
            there = ENDS[job.layers]
            assert bytes(job.view[:there]) == data_of(index)[:there]
            assert (job.layers == LAYERS) == (job.outcome is ReadOutcome.OK)


@pytest.fixture
def shelf(tmp_path):
    return Shelf(tmp_path)


def outcomes(jobs) -> list[ReadOutcome | None]:
    return [job.outcome for job in jobs]


# --- what comes when ---


def test_the_first_layers_of_all_come_before_the_second_of_any(shelf):
    jobs, seen = shelf.jobs(0, 1, 2, 3), []
    for _ in shelf.read(jobs):
        shelf.look(jobs)
        seen.append([job.layers for job in jobs])
    assert seen == [[1] * 4, [2] * 4, [3] * 4]
    assert outcomes(jobs) == [ReadOutcome.OK] * 4
    assert all(job.seconds > 0.0 for job in jobs)


@pytest.mark.parametrize(
    ("least", "stops"),
    [
        (1, [1, 2, 3]),
        (ENDS[1], [1, 2, 3]),
        (ENDS[1] + 1, [2, 3]),
        (ENDS[2], [2, 3]),
        (ENDS[2] + 1, [3]),
        (10**9, [3]),
    ],
)
def test_small_layers_are_read_together(tmp_path, least, stops):
    shelf = Shelf(tmp_path, FaultyFiles())
    (job,) = jobs = shelf.jobs(0)
    assert [job.layers for _ in shelf.read(jobs, least)] == stops
    # The last read sees the end of the file, by one more call.
    assert shelf.files.calls["preadv"] == len(stops) + 1
    assert shelf.files.calls["open_read"] == 1


def test_files_beyond_a_number_are_opened_for_each_read(tmp_path, monkeypatch):
    monkeypatch.setattr(layer_reads, "_MOST_OPEN", 2)
    shelf = Shelf(tmp_path, FaultyFiles())
    assert outcomes(shelf.read_all(0, 1, 2, 3)) == [ReadOutcome.OK] * 4
    assert shelf.files.calls["open_read"] == 2 + 2 * LAYERS


def test_a_read_that_is_left_closes_its_files(shelf):
    before = len(os.listdir("/proc/self/fd"))
    with closing(shelf.read(shelf.jobs(0, 1))) as steps:
        next(steps)
        assert len(os.listdir("/proc/self/fd")) == before + 2
    assert len(os.listdir("/proc/self/fd")) == before


# --- damage ---


def layers_before(position: int) -> int:
    """Layers of which all bytes lie before a position in the file."""
    return sum(HEADER + end <= position for end in ENDS[1:])


# Every byte of the data and of the header's start, and one in seven of the rest: it is
# all covered by one digest.
POSITIONS = [*range(64), *range(64, HEADER, 7), *range(HEADER - 1, FORMAT.file_nbytes)]


def test_every_flipped_byte_is_noticed_before_its_layer_counts(shelf):
    good, missed = shelf.path(1).read_bytes(), []
    with open(shelf.path(1), "r+b", buffering=0) as file:
        for position in POSITIONS:
            flipped = good[position] ^ (1 << position % 8)
            os.pwrite(file.fileno(), bytes([flipped]), position)
            (job,) = shelf.read_all(1)
            right = ReadOutcome.CORRUPT, layers_before(position)
            if (job.outcome, job.layers) != right:
                missed.append(position)
            os.pwrite(file.fileno(), good[position : position + 1], position)
    assert missed == []
    assert shelf.read_all(1)[0].outcome is ReadOutcome.OK


def test_every_truncation_is_noticed(shelf):
    missed = []
    for length in reversed(POSITIONS):
        os.truncate(shelf.path(1), length)
        (job,) = shelf.read_all(1)
        if (job.outcome, job.layers) != (ReadOutcome.CORRUPT, layers_before(length)):
            missed.append(length)
    assert missed == []


@pytest.mark.parametrize("step", range(LAYERS))
def test_a_file_that_grows_meanwhile_is_noticed_at_its_end(shelf, step):
    jobs = shelf.jobs(0, 1)
    steps = shelf.read(jobs)
    for _ in range(step):
        next(steps)
    with open(shelf.path(1), "ab") as file:
        file.write(b"\x00")
    for _ in steps:
        shelf.look(jobs)
    assert outcomes(jobs) == [ReadOutcome.OK, ReadOutcome.CORRUPT]
    assert jobs[1].layers == LAYERS - 1


@pytest.mark.parametrize("step", range(1, LAYERS))
def test_a_file_that_is_cut_meanwhile(shelf, step):
    jobs = shelf.jobs(0, 1)
    steps = shelf.read(jobs)
    for _ in range(step):
        next(steps)
    os.truncate(shelf.path(1), HEADER + ENDS[step])
    for _ in steps:
        shelf.look(jobs)
    assert outcomes(jobs) == [ReadOutcome.OK, ReadOutcome.CORRUPT]
    assert jobs[1].layers == step


def test_a_good_file_of_another_chunk_gives_no_layer(shelf):
    shelf.path(1).write_bytes(shelf.path(2).read_bytes())
    (job,) = shelf.read_all(1)
    assert (job.outcome, job.layers) == (ReadOutcome.CORRUPT, 0)
    # Not even if the record says that it is the one.
    key = shelf.chunks[1].key
    shelf.records[key] = shelf.records[shelf.chunks[2].key]
    (job,) = shelf.read_all(1)
    assert (job.outcome, job.layers) == (ReadOutcome.CORRUPT, 0)


def test_a_good_file_of_another_namespace_gives_no_layer(shelf):
    other = ChunkFormat(LAYOUT, Namespace.of([("other", b"")]))
    (job,) = jobs = shelf.jobs(1)
    job.format = other
    assert [job.layers for _ in shelf.read(jobs)] == [0] * LAYERS
    assert job.outcome is ReadOutcome.CORRUPT


@pytest.mark.parametrize("junk", [b"", b'"layers_xxh3_128":"', b"\xff" * 4096])
def test_a_header_of_junk_whose_digest_is_right(shelf, junk):
    """The record's digest alone makes no header: its checksums must be read from it."""
    key, path = shelf.chunks[1].key, shelf.path(1)
    header = junk.ljust(HEADER)[:HEADER]
    path.write_bytes(header + data_of(1))
    digest = layer_reads.header_digest(header)
    shelf.records[key] = Record(shelf.chunks[1].parent, FORMAT.file_nbytes, 1, digest)
    (job,) = shelf.read_all(1)
    assert (job.outcome, job.layers) == (ReadOutcome.CORRUPT, 0)


def test_stated_checksums_round_trip():
    sums = FORMAT.checksums(data_of(1))
    assert FORMAT.stated_sums(FORMAT.header(chunk_id(TOKENS, 1), sums)) == sums


# --- what the index says ---


def test_a_chunk_without_record_is_missing(shelf):
    del shelf.records[shelf.chunks[1].key]
    assert outcomes(shelf.read_all(0, 1)) == [ReadOutcome.OK, ReadOutcome.MISSING]


@pytest.mark.parametrize("step", range(1, LAYERS))
def test_a_chunk_that_is_removed_meanwhile_is_missing(shelf, step):
    """Its file is still open, and right to the last byte."""
    jobs = shelf.jobs(0, 1)
    steps = shelf.read(jobs)
    for _ in range(step):
        next(steps)
    del shelf.records[shelf.chunks[1].key]
    for _ in steps:
        shelf.look(jobs)
    assert outcomes(jobs) == [ReadOutcome.OK, ReadOutcome.MISSING]
    assert jobs[1].layers == LAYERS - 1


def test_a_chunk_that_is_replaced_meanwhile_is_missing_not_damaged(shelf):
    (job,) = jobs = shelf.jobs(1)
    steps = shelf.read(jobs)
    next(steps)
    os.truncate(shelf.path(1), 0)  # as a reader of the old file might find it
    key = shelf.chunks[1].key
    old = shelf.records[key]
    shelf.records[key] = Record(old.parent, old.size, 2, bytes(16))
    list(steps)
    assert (job.outcome, job.layers) == (ReadOutcome.MISSING, 1)


@pytest.mark.parametrize("at", ["the start", "the end"])
def test_an_index_that_refuses_fails_what_is_open(shelf, at):
    looked = []

    def lookup(keys):
        looked.append(keys)
        if at == "the start" or len(looked) > 1:
            raise OSError(errno.EIO, "refused")
        return Shelf.lookup(shelf, keys)

    shelf.lookup = lookup

    class Backend:
        def read_layers(self, jobs):
            return shelf.read(jobs)

    jobs = shelf.jobs(0, 1)
    for _ in finish_layers(Backend(), jobs):
        shelf.look(jobs)
    assert outcomes(jobs) == [ReadOutcome.FAILED] * 2
    assert all(isinstance(job.error, OSError) for job in jobs)


# --- what the system says ---


class FailsAt(FaultyFiles):
    """One call of ``preadv`` fails."""

    def __init__(self, call: int) -> None:
        super().__init__()
        self._call_number = call

    def preadv(self, fd, buffers, at):
        if self.calls["preadv"] == self._call_number:
            self.calls["preadv"] += 1
            raise OSError(errno.EIO, "a bad sector")
        return super().preadv(fd, buffers, at)


@pytest.mark.parametrize("call", range(3 * LAYERS))
def test_every_call_that_fails_costs_its_chunk_only(tmp_path, call):
    shelf = Shelf(tmp_path, FailsAt(call))
    jobs = shelf.read_all(0, 1, 2)
    (lost,) = [job for job in jobs if job.outcome is not ReadOutcome.OK]
    assert lost.outcome is ReadOutcome.FAILED
    assert lost.layers == min(call // 3, LAYERS - 1)
    assert outcomes(jobs).count(ReadOutcome.OK) == 2


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EACCES])
def test_a_file_that_cannot_be_opened(tmp_path, code):
    shelf = Shelf(tmp_path, FaultyFiles())
    shelf.files.broken["open_read"] = code
    jobs = shelf.read_all(0, 1)
    assert outcomes(jobs) == [ReadOutcome.FAILED] * 2
    assert all(job.error.errno == code for job in jobs)


def test_a_file_that_is_gone(shelf):
    shelf.path(1).unlink()
    assert outcomes(shelf.read_all(0, 1)) == [ReadOutcome.OK, ReadOutcome.MISSING]


class Stingy(Files):
    """Moves at most 7 bytes per call, as an interrupted system call may."""

    def preadv(self, fd, buffers, at):
        return super().preadv(fd, [buffers[0][:7]], at)


def test_short_reads_are_continued(tmp_path):
    shelf = Shelf(tmp_path, Stingy())
    assert outcomes(shelf.read_all(0, 1)) == [ReadOutcome.OK] * 2


# --- what is not wanted any more ---


@pytest.mark.parametrize("step", range(LAYERS))
def test_what_nobody_wants_ends_with_its_next_layer(tmp_path, step):
    shelf = Shelf(tmp_path, FaultyFiles())
    jobs = shelf.jobs(0, 1)
    steps = shelf.read(jobs)
    for _ in range(step):
        next(steps)
    jobs[1].wanted = False
    list(steps)
    assert outcomes(jobs) == [ReadOutcome.OK, ReadOutcome.DROPPED]
    assert jobs[1].layers == step
    assert shelf.files.calls["preadv"] == LAYERS + 1 + step


def test_the_layout_of_these_tests_has_layers_of_several_sizes():
    assert len({end - start for start, end in pairwise(ENDS)}) == LAYERS
