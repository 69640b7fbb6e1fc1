"""Disks and indexes that fail the store."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil

import lmdb
import pytest

from pcr_core.errors import StoreError
from pcr_core.tiers import ChunkStore
from pcr_core.tiers.jobs import (
    DeleteJob,
    DocumentJob,
    ForgetJob,
    WriteJob,
    WriteOutcome,
    finish_group,
)
from pcr_core.tiers.store import chunk_index, records
from pcr_core.tiers.store.chunk_index import ChunkIndex, IndexTroubleError

DOC = b"d" * 16


@pytest.fixture
def store(kit):
    made = []

    def make(chunks: int = 16, **settings) -> ChunkStore:
        made.append(ChunkStore(kit.folder, chunks * kit.file_nbytes, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def job(kit):
    def job(*path, **more) -> WriteJob:
        tokens = kit.prompt(*path)
        chunk = kit.chunk_id(tokens, len(path) - 1)
        view = memoryview(kit.content(chunk.key))
        return WriteJob(
            kit.format, chunk, view, 1, ancestors=kit.keys_of(tokens), **more
        )

    return job


def key(kit, *path):
    return kit.keys_of(kit.prompt(*path))[-1]


# --- the disk ---


@pytest.mark.parametrize("call", ["open_new", "writev", "fsync", "replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_failed_write_fails_alone(kit, store, job, call, code):
    files = kit.FaultyFiles()
    one = store(files=files)
    files.broken[call] = code
    bad, removal = job(1), ForgetJob(DOC, heads=[key(kit, 2)])
    one.commit([bad, removal])
    assert (bad.outcome, bad.error.errno) == (WriteOutcome.FAILED, code)
    assert (removal.error, removal.epoch) == (None, 1)
    assert kit.chunk_files(kit.folder) == []
    assert one.audit(fix=False) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_removal_that_cannot_be_made_durable_has_not_happened(kit, store, job, code):
    files = kit.FaultyFiles()
    one = store(files=files)
    one.commit([job(1), job(1, 7), DocumentJob({DOC: [key(kit, 1, 7)]})])
    files.broken["fsync_folder"] = code
    removal = ForgetJob(DOC)
    finish_group(one, [removal])
    assert removal.error.errno == code
    assert (removal.epoch, one.epoch(), removal.keys) == (0, 0, ())
    files.broken.clear()
    # It is known what must be removed, so asking again is enough.
    again = ForgetJob(DOC)
    one.commit([again])
    assert (again.keys, again.epoch) == ([key(kit, 1, 7)], 1)
    assert one.audit(fix=False) == []


def test_a_document_is_known_before_its_chunks_are_stored(kit, store, job, monkeypatch):
    """Although the index refused when it was registered."""
    one = store()

    def refuse(self):
        raise IndexTroubleError("MDB_MAP_FULL")

    with monkeypatch.context() as patch:
        patch.setattr(records.IndexTransaction, "finish", refuse)
        finish_group(one, [seen := DocumentJob({DOC: [key(kit, 7)]}, epoch=0)])
    assert isinstance(seen.error, IndexTroubleError)
    one.commit([job(7), job(7, 1)])
    one.close()
    two = store()
    two.commit([removal := ForgetJob(DOC)])
    assert set(removal.keys) == {key(kit, 7), key(kit, 7, 1)}


def test_what_a_failed_write_leaves_is_removed_by_the_next_group(kit, store, job):
    files = kit.FaultyFiles()
    one = store(1, files=files)
    files.broken = {"fsync": errno.EIO, "unlink": errno.EIO}
    one.commit([failed := job(1)])
    assert failed.outcome is WriteOutcome.FAILED
    assert kit.file_bytes(kit.folder) == kit.file_nbytes
    files.broken = {"unlink": errno.EIO}
    one.commit([late := job(2)])
    assert late.outcome is WriteOutcome.NO_ROOM
    files.broken = {}
    one.commit([good := job(3)])
    assert good.outcome is WriteOutcome.STORED
    assert kit.file_bytes(kit.folder) == one.used_bytes() == kit.file_nbytes


def test_what_a_refused_group_leaves_is_removed_by_the_next(kit, store, job):
    files = kit.FaultyFiles()
    one = store(1, files=files)
    files.broken = {"fsync_folder": errno.EIO, "unlink": errno.EIO}
    finish_group(one, [failed := job(1)])
    assert failed.outcome is WriteOutcome.FAILED
    assert len(kit.chunk_files(kit.folder)) == 1
    assert one.records() == {}
    files.broken = {}
    one.commit([good := job(3)])
    assert good.outcome is WriteOutcome.STORED
    assert kit.file_bytes(kit.folder) == one.used_bytes() == kit.file_nbytes


def test_a_disk_too_full_for_the_mark_is_not_in_the_way(kit, store, job, monkeypatch):
    one = store()
    one.commit([job(1)])

    def refuse(fd, data, at):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", refuse)
    one.commit([DeleteJob([key(kit, 1)])])
    assert kit.chunk_files(kit.folder) == []


def test_the_folder_is_deleted_and_something_is_forgotten(kit, store, job):
    one = store()
    one.commit([job(1)])
    shutil.rmtree(kit.folder)
    removal = ForgetJob(DOC, heads=[key(kit, 1)])
    finish_group(one, [removal])
    assert isinstance(removal.error, FileNotFoundError)
    assert removal.epoch == 0
    assert one.lookup([key(kit, 1)]) == {}


# --- the index ---


def test_an_index_that_is_full(kit, store, job, monkeypatch):
    monkeypatch.setattr(chunk_index, "_MAP_BYTES", 128 * 1024)
    one = store(10**6)
    jobs, number = [], 0
    while not jobs or jobs[-1].outcome is WriteOutcome.STORED:
        number += 1
        jobs.append(job(number, 1))
        finish_group(one, jobs[-1:])
    assert jobs[-1].outcome is WriteOutcome.FAILED
    assert isinstance(jobs[-1].error, IndexTroubleError)
    assert len(one.records()) == len(kit.chunk_files(kit.folder)) == number - 1
    assert one.audit(fix=False) == []
    assert one.lookup([key(kit, 1, 1)])


def test_the_index_takes_so_many_records(kit, store, job, monkeypatch):
    monkeypatch.setattr(records, "MAX_RECORDS", 4)
    one = store()
    one.commit([job(1, 2, 3), late := job(4)])
    assert late.outcome is WriteOutcome.NO_ROOM
    one.commit([ForgetJob(DOC, heads=[key(kit, 1)]), again := job(4, epoch=1)])
    assert again.outcome is WriteOutcome.STORED


@contextlib.contextmanager
def no_file_longer_than(size: int):
    """A disk quota, as far as the index can tell: it cannot grow."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_an_index_that_cannot_grow(kit, store, job):
    one = store(10**6)
    one.commit([job(1)])
    size = (kit.folder / "index" / "data.mdb").stat().st_size
    number = 1
    with no_file_longer_than(size):
        outcome = WriteOutcome.STORED
        while outcome is WriteOutcome.STORED:
            number += 1
            group = [job(number * 20 + step, 1) for step in range(20)]
            finish_group(one, group)
            (outcome,) = {one.outcome for one in group}
        assert outcome is WriteOutcome.FAILED
        assert len(one.records()) == len(kit.chunk_files(kit.folder))
        assert one.audit(fix=False) == []
    one.commit([again := job(7)])
    assert again.outcome is WriteOutcome.STORED
    assert one.audit(fix=False) == []


def take_and_give_up(one, number: int) -> int:
    """Add many records and remove them in one transaction; return the pages wanted."""
    index = one._index
    with index.turn() as turn, index.write() as txn:
        names = [os.urandom(32) for _ in range(number)]
        for name in names:
            txn._txn.put(name, bytes(85), db=txn._tables.records)
        for name in names:
            txn._txn.delete(name, db=txn._tables.records)
        turn.unclean = True
    return (index._env.info()["last_pgno"] + 1) * index._env.stat()["psize"]


@pytest.mark.parametrize("killed", [False, True])
def test_pages_that_are_never_written(kit, store, job, monkeypatch, killed):
    """LMDB does not write pages that one transaction both took and gave up."""
    one = store()
    one.commit([job(1)])
    if killed:
        monkeypatch.setattr(ChunkIndex, "_pad", lambda self: None)
    data = kit.folder / "index" / "data.mdb"
    short = [
        data.stat().st_size < wanted
        for wanted in (take_and_give_up(one, n) for n in (1000, 3000, 5000))
    ]
    assert any(short) == killed
    monkeypatch.undo()
    one.close()
    two = store()
    assert set(two.records()) == {key(kit, 1)}
    assert two.audit(fix=False) == []


def test_a_page_number_out_of_this_world(kit, store, job, monkeypatch):
    store().close()
    monkeypatch.setattr(chunk_index, "_MAP_BYTES", 4096)
    with pytest.raises(StoreError, match="is damaged"):
        store()


def test_the_index_is_opened_again_after_an_error(kit, store, monkeypatch):
    def refuse(*args, **more):
        raise lmdb.Error("no")

    with monkeypatch.context() as patch:
        patch.setattr(lmdb, "open", refuse)
        with pytest.raises(StoreError, match="cannot be opened"):
            store()
    assert store().records() == {}
