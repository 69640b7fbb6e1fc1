"""The SSD tier: folder, budget, recovery, faults, several users of one folder."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import threading
from pathlib import Path

import pytest

from pcr_core.errors import ConfigError, StoreError
from pcr_core.tiers import ChunkStore, InlineIo, IoPool
from pcr_core.tiers.jobs import DeleteJob, ReadJob, WriteJob, WriteOutcome
from pcr_core.tiers.store.chunk_file import ReadOutcome


def listing(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def write_job(kit, tokens, index, stamp=1) -> WriteJob:
    chunk = kit.chunk_id(tokens, index)
    view = memoryview(kit.content(chunk.key))
    return WriteJob(kit.format, chunk, view, stamp, ancestors=kit.keys_of(tokens))


@pytest.fixture
def store(kit):
    made = []

    def make(chunks: int = 8, files=None, folder: Path | None = None) -> ChunkStore:
        budget = chunks * kit.file_nbytes
        made.append(ChunkStore(folder or kit.folder, budget, files=files))
        return made[-1]

    yield make
    for one in made:
        one.close()


# --- the folder ---


@pytest.mark.parametrize(
    "text", ['{"format": 1}', '{"format": "2"}', "[]", "{}", "not json", ""]
)
def test_unknown_formats_are_refused_and_left_untouched(kit, store, text):
    store().close()
    (kit.folder / "format.json").write_text(text)
    (kit.folder / "chunks" / "stray.tmp").write_text("kept")
    before = listing(kit.folder)
    with pytest.raises(StoreError, match="nothing was changed"):
        store()
    assert listing(kit.folder) == before


def test_a_folder_with_other_files_is_refused_and_left_untouched(kit, store):
    kit.folder.mkdir()
    (kit.folder / "thesis.tex").write_text("precious")
    before = listing(kit.folder)
    with pytest.raises(StoreError, match=r"thesis\.tex"):
        store()
    assert listing(kit.folder) == before


def test_converted_models_and_hidden_files_may_be_there_first(kit, store):
    (kit.folder / "models").mkdir(parents=True)
    (kit.folder / ".lock").touch()
    store()
    assert json.loads((kit.folder / "format.json").read_text()) == {"format": 2}


def test_a_file_where_the_folder_should_be(kit, store, tmp_path):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="is not a folder"):
            store(folder=place)


def test_a_folder_that_cannot_be_made(store):
    with pytest.raises(ConfigError, match="cannot be used"):
        store(folder=Path("/proc/pcr-cache"))


def test_a_folder_that_cannot_be_written(kit, store, monkeypatch):
    real = os.open

    def refuse(path, flags, *rest, **more):
        if flags & os.O_CREAT:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ConfigError, match="may read and write"):
        store()


def test_an_index_that_is_no_index(kit, store):
    store().close()
    (kit.folder / "index" / "data.mdb").write_bytes(b"x" * 8192)
    with pytest.raises(StoreError, match="cannot be opened"):
        store()


def test_a_deleted_folder_cannot_be_shared(kit, store):
    store()
    shutil.rmtree(kit.folder)
    with pytest.raises(StoreError, match="deleted while"):
        store()


# --- reading and writing ---


def test_written_chunks_are_read_back(kit, store):
    one = store()
    tokens = kit.prompt(1, 2)
    jobs = [write_job(kit, tokens, 0), write_job(kit, tokens, 1)]
    one.commit(jobs)
    assert [job.outcome for job in jobs] == [WriteOutcome.STORED] * 2
    assert one.used_bytes() == kit.file_bytes(kit.folder) == 2 * kit.file_nbytes
    for index in range(2):
        chunk = kit.chunk_id(tokens, index)
        read = ReadJob(kit.format, chunk, memoryview(bytearray(kit.layout.nbytes)))
        one.read(read)
        assert read.outcome is ReadOutcome.OK
        assert bytes(read.view) == kit.content(chunk.key)
    record = one.lookup(kit.keys_of(tokens))[kit.keys_of(tokens)[1]]
    assert (record.parent, record.stamp) == (kit.keys_of(tokens)[0], 1)


def test_a_chunk_without_a_record_does_not_exist(kit, store):
    chunk = kit.chunk_id(kit.prompt(1), 0)
    read = ReadJob(kit.format, chunk, memoryview(bytearray(kit.layout.nbytes)))
    one = store()
    one.read(read)
    assert read.outcome is ReadOutcome.MISSING
    assert one.lookup([chunk.key]) == {}


def test_a_group_shares_one_commit_and_skips_what_is_stored(kit, store):
    files = kit.FaultyFiles()
    one = store(files=files)
    one.commit([write_job(kit, kit.prompt(1), 0), write_job(kit, kit.prompt(2), 0)])
    assert (files.calls["writev"], files.calls["fsync_folder"]) == (2, 1)
    again = write_job(kit, kit.prompt(1), 0)
    one.commit([again])
    assert again.outcome is WriteOutcome.STORED
    assert files.calls["writev"] == 2
    again = write_job(kit, kit.prompt(1), 0)
    one.commit([DeleteJob([again.chunk.key]), again])  # unless it is to be written anew
    assert again.outcome is WriteOutcome.STORED
    assert files.calls["writev"] == 3
    assert one.used_bytes() == 2 * kit.file_nbytes


def test_the_budget_is_hard(kit, store):
    files = kit.FaultyFiles()
    one = store(chunks=2, files=files)
    jobs = [write_job(kit, kit.prompt(number), 0) for number in (1, 2, 3)]
    one.commit(jobs)
    assert [job.outcome for job in jobs] == [
        WriteOutcome.STORED,
        WriteOutcome.STORED,
        WriteOutcome.NO_ROOM,
    ]
    assert files.calls["writev"] == 2
    assert kit.file_bytes(kit.folder) == one.used_bytes() == 2 * kit.file_nbytes


def test_victims_leave_before_their_successors_arrive(kit, store):
    peak = 0

    class Watching(kit.FaultyFiles):
        def replace(self, source, target):
            nonlocal peak
            super().replace(source, target)
            peak = max(peak, kit.file_bytes(kit.folder))

    one = store(chunks=2, files=Watching())
    one.commit([write_job(kit, kit.prompt(number), 0) for number in (1, 2)])
    victims = DeleteJob(kit.keys_of(kit.prompt(1)))
    late = write_job(kit, kit.prompt(3), 0)
    one.commit([victims, late])
    assert late.outcome is WriteOutcome.STORED
    assert peak == 2 * kit.file_nbytes


def test_a_file_that_cannot_be_removed_stays_counted(kit, store, caplog):
    files = kit.FaultyFiles()
    one = store(files=files)
    one.commit([write_job(kit, kit.prompt(1), 0)])
    files.broken["unlink"] = errno.EACCES
    with caplog.at_level(logging.WARNING, logger="pcr_core.tiers"):
        one.commit([DeleteJob(kit.keys_of(kit.prompt(1)))])
    assert one.used_bytes() == kit.file_bytes(kit.folder) == kit.file_nbytes
    assert "cannot remove" in caplog.text


# --- recovery ---


def test_opening_removes_temporary_files_and_orphans(kit, store):
    one = store()
    one.commit([write_job(kit, kit.prompt(1), 0)])
    one.close()
    (good,) = kit.chunk_files(kit.folder)
    orphan = good.with_name("ab" * 32 + ".safetensors")
    shutil.copy(good, orphan)
    temporary = good.with_name(f"{good.stem}.{os.getpid()}.abc.tmp")
    temporary.write_bytes(b"half")
    two = store()
    assert kit.chunk_files(kit.folder) == [good]
    assert two.used_bytes() == kit.file_nbytes


def test_opening_drops_records_without_a_file(kit, store):
    one = store()
    one.commit([write_job(kit, kit.prompt(number), 0) for number in (1, 2)])
    one.close()
    path = kit.folder / "chunks" / f"{kit.keys_of(kit.prompt(1))[0].hex()}.safetensors"
    path.unlink()
    two = store()
    assert set(two.records()) == set(kit.keys_of(kit.prompt(2)))
    assert two.used_bytes() == kit.file_bytes(kit.folder) == kit.file_nbytes


def test_a_file_cut_short_is_found_when_it_is_read(kit, store):
    tokens = kit.prompt(1)
    one = store()
    one.commit([write_job(kit, tokens, 0)])
    one.close()
    os.truncate(kit.chunk_files(kit.folder)[0], 100)
    manager = kit.manager()
    assert manager.snapshot().ssd_bytes == kit.file_nbytes
    assert kit.serve(manager, [*tokens, 9]).tiers == {}
    assert manager.snapshot().corrupt == 1
    assert manager.check().ok


def test_audit_finds_and_fixes(kit, store):
    one = store()
    one.commit([write_job(kit, kit.prompt(number), 0) for number in (1, 2, 3)])
    paths = {
        number: kit.folder
        / "chunks"
        / f"{kit.keys_of(kit.prompt(number))[0].hex()}.safetensors"
        for number in (1, 2, 3)
    }
    assert one.audit(fix=False) == []
    paths[1].unlink()
    raw = bytearray(paths[2].read_bytes())
    raw[-1] ^= 1
    paths[2].write_bytes(raw)
    stray = paths[3].with_name("cd" * 32 + ".safetensors")
    stray.write_bytes(b"?")
    problems = one.audit(fix=True)
    assert len(problems) == 3
    assert "missing" in "".join(problems)
    assert "data is damaged" in "".join(problems)
    assert "belongs to no chunk" in "".join(problems)
    assert one.audit(fix=False) == []
    assert kit.chunk_files(kit.folder) == [paths[3]]
    assert one.used_bytes() == kit.file_nbytes


# --- faults while running ---


@pytest.mark.parametrize(
    "call", ["open_new", "writev", "fsync", "replace", "fsync_folder"]
)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_failed_writes_are_counted_and_the_engine_goes_on(kit, call, code):
    files = kit.FaultyFiles()
    manager = kit.manager(files=files)
    tokens = [*kit.prompt(1, 2), 9]
    files.broken[call] = code
    kit.serve(manager, tokens)
    stats = manager.snapshot()
    assert (stats.written, stats.write_errors) == (0, 2)
    assert kit.chunk_files(kit.folder) == []
    assert kit.serve(manager, tokens).tiers == {0: "dram", 1: "dram"}
    assert manager.check().ok
    files.broken.clear()
    kit.serve(manager, tokens)
    assert manager.snapshot().written == 2
    assert manager.check().ok


@pytest.mark.parametrize("call", ["open_read", "preadv"])
def test_failed_reads_are_holes_and_are_written_again(kit, call):
    tokens = [*kit.prompt(1, 2), 9]
    first = kit.manager()
    kit.serve(first, tokens)
    first.close()
    files = kit.FaultyFiles()
    manager = kit.manager(files=files)
    files.broken[call] = errno.EIO
    served = kit.serve(manager, tokens)
    assert (served.tiers, served.sinks) == ({}, [0, 1])
    stats = manager.snapshot()
    assert (stats.read_errors, stats.written, stats.corrupt) == (2, 2, 0)
    files.broken.clear()
    manager.close()
    assert kit.serve(kit.manager(), tokens).tiers == {0: "ssd", 1: "ssd"}


def test_an_index_that_refuses_leaves_nothing_behind(kit, monkeypatch):
    from pcr_core.tiers.store.chunk_index import IndexTransaction, IndexTroubleError

    manager = kit.manager()

    def refuse(self, key, record):
        raise IndexTroubleError("MDB_MAP_FULL")

    with monkeypatch.context() as patch:
        patch.setattr(IndexTransaction, "put", refuse)
        kit.serve(manager, [*kit.prompt(1), 9])
    assert manager.snapshot().write_errors == 1
    assert kit.chunk_files(kit.folder) == []
    assert manager.check().ok


def test_the_folder_is_deleted_while_running(kit, caplog):
    manager = kit.manager()
    tokens = [*kit.prompt(1, 2), 9]
    kit.serve(manager, tokens)
    shutil.rmtree(kit.folder)
    assert kit.serve(manager, tokens).tiers == {0: "dram", 1: "dram"}
    with caplog.at_level(logging.WARNING, logger="pcr_core.tiers"):
        for number in range(3, 30):
            kit.serve(manager, [*kit.prompt(number), 9])
        again = kit.serve(manager, tokens)
    assert (again.tiers, again.sinks) == ({}, [0, 1])
    stats = manager.snapshot()
    assert stats.write_errors > 0
    assert stats.missing > 0
    assert not kit.folder.exists()
    assert len(caplog.records) <= 4
    manager.close()
    assert kit.serve(kit.manager(), tokens).tiers == {}


# --- several users in one process ---


def test_engines_of_one_process_share_a_folder(kit, tmp_path):
    alias = tmp_path / "alias"
    tokens = [*kit.prompt(1, 2), 9]
    first = kit.manager()
    alias.symlink_to(kit.folder)
    second = kit.manager(folder=alias)
    kit.serve(first, tokens)
    assert second.match(kit.keys_of(tokens)) == ["ssd", "ssd"]
    assert kit.serve(second, tokens).tiers == {0: "ssd", 1: "ssd"}
    first.close()
    assert second.check().ok
    kit.serve(second, [*kit.prompt(3), 9])
    second.close()
    assert kit.manager().match(kit.keys_of(kit.prompt(3))) == ["ssd"]


def test_chunks_of_another_engine_compete_for_room(kit):
    clock = kit.Clock()
    first = kit.manager(ssd_chunks=2, clock=clock)
    second = kit.manager(ssd_chunks=2, clock=clock)
    kit.serve(first, [*kit.prompt(1, 2), 9])
    kit.serve(second, [*kit.prompt(3), 9])
    stats = second.snapshot()
    assert (stats.written, stats.write_drops, stats.ssd_evictions) == (1, 0, 1)
    assert kit.file_bytes(kit.folder) == 2 * kit.file_nbytes
    # The first engine's second chunk is gone under its feet: a miss, not an error.
    for number in range(10, 18):
        kit.serve(first, [*kit.prompt(number), 9])
    assert kit.serve(first, [*kit.prompt(1, 2), 9]).sinks
    assert first.check().ok
    assert second.check().ok


def test_files_of_a_write_under_way_survive_another_opening(kit):
    entered, go = threading.Event(), threading.Event()

    class Slow(kit.FaultyFiles):
        def fsync_folder(self, path):
            entered.set()
            assert go.wait(60)
            super().fsync_folder(path)

    tokens = [*kit.prompt(1), 9]
    first = kit.manager(files=Slow(), io=IoPool)
    kit.serve(first, tokens)
    assert entered.wait(60)
    assert len(kit.chunk_files(kit.folder)) == 1
    second = kit.manager()
    assert second.match(kit.keys_of(tokens)) == ["none"]
    go.set()
    assert first.flush(60)
    assert second.match(kit.keys_of(tokens)) == ["ssd"]
    assert second.check().ok


# --- threads ---


def test_slots_being_written_stay_readable_and_pinned(kit):
    go = threading.Event()

    class Slow(kit.FaultyFiles):
        def fsync(self, fd):
            assert go.wait(60)
            super().fsync(fd)

    manager = kit.manager(slots=4, files=Slow(), io=IoPool)
    written = manager._pool.reserves.writes
    tokens, other = [*kit.prompt(1), 9], [*kit.prompt(3, 4, 5, 6), 9]
    kit.serve(manager, tokens)
    assert written == 1, "so the chunk is pinned"
    assert kit.serve(manager, other).sinks == [0, 1, 2]
    assert kit.serve(manager, tokens).tiers == {0: "dram"}
    go.set()
    assert manager.flush(60)
    assert kit.serve(manager, other).sinks == [3]
    assert manager.check().ok
    assert manager.snapshot().bypassed_inserts == 1


def test_reads_on_threads_give_the_same_bytes(kit):
    prompts = [[*kit.prompt(n, n + 1, n + 2), 9] for n in range(0, 30, 3)]
    first = kit.manager(slots=64, ssd_chunks=64, io=IoPool)
    for tokens in prompts:
        kit.serve(first, tokens)
    assert first.flush(60)
    first.close()
    second = kit.manager(slots=4, ssd_chunks=64, io=IoPool)
    for tokens in prompts * 2:
        tiers = kit.serve(second, tokens).tiers
        assert tiers == {0: "ssd", 1: "ssd", 2: "ssd"}
    assert second.check().ok


def test_close_is_bounded_when_the_disk_hangs(kit, caplog):
    entered, go = threading.Event(), threading.Event()

    class Hanging(kit.FaultyFiles):
        def fsync(self, fd):
            entered.set()
            assert go.wait(60)
            super().fsync(fd)

    manager = kit.manager(files=Hanging(), io=IoPool)
    kit.serve(manager, [*kit.prompt(1), 9])
    assert entered.wait(60)
    with caplog.at_level(logging.ERROR, logger="pcr_core.tiers"):
        manager.close(timeout=0.0)
    assert "hangs in a system call" in caplog.text
    go.set()
    for thread in threading.enumerate():
        if thread.name == "pcr-write":
            thread.join(60)
    manager._store.close()


def test_inline_is_the_same_interface():
    public = {name for name in vars(InlineIo) if not name.startswith("_")}
    assert public == {name for name in vars(IoPool) if not name.startswith("_")}
