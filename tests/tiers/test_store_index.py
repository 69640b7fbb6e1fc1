"""What the index keeps beside the chunks: ancestors, tenants, documents, epochs."""

from __future__ import annotations

import errno
import os
import threading

import pytest

from pcr_core.index.chunk import ChunkKey
from pcr_core.tiers import ChunkStore
from pcr_core.tiers.jobs import (
    DeleteJob,
    DocumentJob,
    ForgetJob,
    ReadJob,
    TouchJob,
    WriteJob,
    WriteOutcome,
)
from pcr_core.tiers.store.chunk_file import ReadOutcome
from pcr_core.tiers.store.chunk_index import ChunkIndex
from pcr_core.tiers.store.forget_log import KEPT_EPOCHS
from pcr_core.tiers.store.records import Record

ALICE, BOB = b"a" * 16, b"b" * 16
DOC, OTHER = b"d" * 16, b"o" * 16


@pytest.fixture
def store(kit):
    made = []

    def make(chunks: int = 16, **settings) -> ChunkStore:
        budget = chunks * kit.file_nbytes
        made.append(ChunkStore(kit.folder, budget, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def write(kit):
    """Queue chunk ``index`` of a path of small numbers, as one commit."""

    def job(path, index, **more) -> WriteJob:
        tokens = kit.prompt(*path)
        chunk = kit.chunk_id(tokens, index)
        more.setdefault("ancestors", kit.keys_of(tokens))
        stamp = more.pop("stamp", 1)
        view = memoryview(kit.content(chunk.key))
        return WriteJob(kit.format, chunk, view, stamp, **more)

    def write(store, path, *indices, **more) -> list[WriteOutcome]:
        jobs = [job(path, index, **more) for index in indices or range(len(path))]
        store.commit(jobs)
        return [one.outcome for one in jobs]

    write.job = job
    return write


def key(kit, *path) -> ChunkKey:
    return kit.keys_of(kit.prompt(*path))[-1]


def names(kit) -> set[str]:
    return {path.stem for path in kit.chunk_files(kit.folder)}


def bare(store) -> set[bytes]:
    return set(store.bare_records())


# --- ancestors ---


def test_missing_ancestors_get_bare_records(kit, store, write):
    one = store()
    assert write(one, [1, 2, 3], 2) == [WriteOutcome.STORED]
    top, middle, leaf = (key(kit, *path) for path in ([1], [1, 2], [1, 2, 3]))
    assert set(one.records()) == {leaf}
    records = one.bare_records()
    assert set(records) == {top, middle}
    assert (records[middle].parent, records[top].parent) == (top, kit.namespace.root)
    assert one.lookup([top, middle, leaf]).keys() == {leaf}
    assert one.audit(fix=False) == []


def test_storing_a_bare_chunk_and_evicting_a_parent(kit, store, write):
    one = store()
    write(one, [1, 2, 3])
    one.commit([DeleteJob([key(kit, 1, 2)])])
    assert bare(one) == {key(kit, 1, 2)}
    assert one.used_bytes() == 2 * kit.file_nbytes
    write(one, [1, 2, 3], 1)
    assert (bare(one), one.used_bytes()) == (set(), 3 * kit.file_nbytes)
    assert one.audit(fix=False) == []


def test_bare_records_go_with_the_last_that_follows_them(kit, store, write):
    one = store()
    write(one, [1, 2, 3], 2)
    write(one, [1, 2, 4], 2)
    write(one, [1, 5], 1)
    one.commit([DeleteJob([key(kit, 1, 2, 3)])])
    assert bare(one) == {key(kit, 1), key(kit, 1, 2)}
    one.commit([DeleteJob([key(kit, 1, 2, 4)])])
    assert bare(one) == {key(kit, 1)}
    one.commit([DeleteJob([key(kit, 1, 5)])])
    contents = one.contents()
    assert (contents.stored, contents.bare, contents.roots) == ({}, {}, set())
    assert one.audit(fix=False) == []


def test_a_write_that_does_not_know_its_ancestors_fails_alone(kit, store, write):
    one = store()
    lost = write.job([1, 2, 3], 2, ancestors=[key(kit, 1)])
    good = write.job([7], 0, ancestors=())
    one.commit([lost, good])
    assert (lost.outcome, good.outcome) == (WriteOutcome.FAILED, WriteOutcome.STORED)
    assert "ancestors" in str(lost.error)
    assert set(one.records()) == {key(kit, 7)}
    assert one.audit(fix=False) == []


def test_recency_of_bare_and_missing_chunks_is_ignored(kit, store, write):
    one = store()
    write(one, [1, 2], 1)
    stamps = {key(kit, 1): 9, key(kit, 1, 2): 9, key(kit, 3): 9}
    one.commit([TouchJob(stamps)])
    assert {k: r.stamp for k, r in one.records().items()} == {key(kit, 1, 2): 9}
    assert bare(one) == {key(kit, 1)}


# --- opening ---


def test_the_records_of_opening_are_read_once(kit, store, write, monkeypatch):
    first = store()
    write(first, [1, 2], 1)
    first.close()
    passes = []
    real = ChunkIndex.contents
    monkeypatch.setattr(
        ChunkIndex, "contents", lambda self: passes.append(1) or real(self)
    )
    one = store()
    contents = one.contents()
    assert (set(contents.stored), set(contents.bare)) == (
        {key(kit, 1, 2)},
        {key(kit, 1)},
    )
    assert passes == []
    assert one.contents() == contents
    assert passes == [1]


def test_what_was_written_after_opening_is_not_missed(kit, store, write):
    one = store()
    write(one, [1])
    assert set(one.contents().stored) == {key(kit, 1)}


# --- tenants ---


def test_a_tenant_is_a_digest(kit):
    with pytest.raises(ValueError, match="16 bytes"):
        ChunkStore(kit.folder, 1, tenant=b"alice")


def test_a_quota_is_hard_and_is_the_tenants_own(kit, store, write):
    alice = store(8, tenant=ALICE, quota_bytes=2 * kit.file_nbytes)
    bob = store(8, tenant=BOB)
    outcomes = write(alice, [1, 2, 3])
    assert outcomes == [*[WriteOutcome.STORED] * 2, WriteOutcome.NO_ROOM]
    assert write(bob, [4, 5, 6]) == [WriteOutcome.STORED] * 3
    assert (alice.tenant_bytes(), bob.tenant_bytes()) == (
        2 * kit.file_nbytes,
        3 * kit.file_nbytes,
    )
    assert alice.used_bytes() == 5 * kit.file_nbytes
    assert {record.tenant for record in alice.records().values()} == {ALICE, BOB}
    alice.commit([DeleteJob([key(kit, 1, 2)])])
    assert write(alice, [7]) == [WriteOutcome.STORED]
    assert alice.audit(fix=False) == []


def test_opening_with_a_smaller_quota_evicts_the_tenants_oldest(kit, store, write):
    first = store(tenant=ALICE)
    for stamp, number in enumerate((3, 1, 2)):
        write(first, [number], stamp=stamp + 10)
    bob = store(tenant=BOB)
    write(bob, [9], stamp=1)
    first.close()
    second = store(tenant=ALICE, quota_bytes=kit.file_nbytes)
    left = {key(kit, 2), key(kit, 9)}
    assert set(second.records()) == left == {bytes.fromhex(n) for n in names(kit)}
    assert second.tenant_bytes() == kit.file_nbytes
    second.close()
    bob.close()
    # The quota comes first: it may make the room that the budget lacks.
    third = store(1, tenant=BOB, quota_bytes=0)
    assert set(third.records()) == {key(kit, 2)}
    assert third.audit(fix=False) == []


# --- documents ---


def test_forgetting_takes_what_contains_or_follows_and_nothing_else(kit, store, write):
    one = store()
    write(one, [1, 7, 2])
    write(one, [3, 7, 4])
    write(one, [1, 5])
    one.commit([DeleteJob([key(kit, 1, 7)])])
    one.commit([DocumentJob({DOC: [key(kit, 1, 7)], OTHER: [key(kit, 1, 5)]})])
    one.commit([DocumentJob({DOC: [key(kit, 3, 7)]})])
    one.close()
    two = store()
    job = ForgetJob(DOC)
    two.commit([job])
    gone = [[1, 7], [1, 7, 2], [3, 7], [3, 7, 4]]
    assert set(job.keys) == {key(kit, *path) for path in gone}
    stored = gone[1:]
    assert {name.split(".")[0] for name in job.files} == {
        key(kit, *path).hex() for path in stored
    }
    assert (job.nbytes, job.left, job.epoch) == (3 * kit.file_nbytes, [], 1)
    kept = {key(kit, 1), key(kit, 1, 5), key(kit, 3)}
    assert set(two.records()) == kept == {bytes.fromhex(n) for n in names(kit)}
    assert two.used_bytes() == kit.file_bytes(kit.folder)
    assert two.audit(fix=False) == []


def test_forgetting_what_nobody_knows(kit, store, write):
    one = store()
    write(one, [1])
    job = ForgetJob(DOC)
    one.commit([job])
    assert (job.keys, job.files, job.nbytes, job.epoch) == ([], [], 0, 1)
    assert one.epoch() == 1
    again = ForgetJob(DOC, heads=[key(kit, 1)])
    one.commit([again])
    assert (again.keys, again.epoch) == ([key(kit, 1)], 2)
    assert names(kit) == set()


def test_a_forgotten_document_has_no_heads_until_it_is_seen_again(kit, store, write):
    one = store()
    one.commit([DocumentJob({DOC: [key(kit, 1)]})])
    one.commit([ForgetJob(DOC)])
    write(one, [1], epoch=one.epoch())
    job = ForgetJob(DOC)
    one.commit([job])
    assert job.keys == []
    one.commit([DocumentJob({DOC: [key(kit, 1)]}, epoch=one.epoch())])
    one.commit([job := ForgetJob(DOC)])
    assert job.keys == [key(kit, 1)]


def test_writes_in_flight_do_not_bring_a_document_back(kit, store, write):
    one = store()
    queued = [write.job([1, 7, 2], index, epoch=one.epoch()) for index in range(3)]
    other = write.job([4, 7], 1, epoch=one.epoch())
    one.commit([DocumentJob({DOC: [key(kit, 1, 7)]})])
    one.commit([ForgetJob(DOC)])
    one.commit([*queued, other])
    outcomes = [job.outcome for job in queued]
    assert outcomes == [WriteOutcome.STORED, *[WriteOutcome.FORGOTTEN] * 2]
    # Nobody said that this is the document.
    assert other.outcome is WriteOutcome.STORED
    assert names(kit) == {key(kit, 1).hex(), key(kit, 4, 7).hex()}
    # Whoever knows of the removal means it.
    assert write(one, [1, 7, 2], epoch=one.epoch()) == [WriteOutcome.STORED] * 3
    assert one.audit(fix=False) == []


def test_a_write_and_the_removal_of_its_document_in_one_group(kit, store, write):
    one = store()
    before, after = write.job([7, 1], 0), write.job([7, 1], 1)
    job = ForgetJob(DOC, heads=[key(kit, 7)])
    one.commit([before, job, after])
    assert job.keys == [key(kit, 7)]
    assert after.outcome is WriteOutcome.FORGOTTEN
    assert names(kit) == set()
    assert one.audit(fix=False) == []


def test_heads_known_too_late_are_forgotten_as_well(kit, store, write):
    """Another process had the document in its queue when it was forgotten."""
    one = store()
    epoch = one.epoch()
    one.commit([ForgetJob(DOC)])
    late = [
        DocumentJob({DOC: [key(kit, 7)], OTHER: [key(kit, 8)]}, epoch=epoch),
        write.job([7, 1], 0, epoch=epoch),
        write.job([7, 1], 1, epoch=epoch),
        write.job([8], 0, epoch=epoch),
    ]
    one.commit(late)
    assert late[1].outcome is late[2].outcome is WriteOutcome.FORGOTTEN
    assert late[3].outcome is WriteOutcome.STORED
    assert one.forgotten_since(1) == (2, {key(kit, 7)}, set())
    # A use after the removal is not late.
    one.commit([DocumentJob({DOC: [key(kit, 7)]}, epoch=1)])
    one.commit([job := ForgetJob(DOC)])
    assert one.forgotten_since(2) == (3, {key(kit, 7)}, {DOC})
    assert job.keys == []


def test_others_learn_what_was_forgotten(kit, store, write):
    one, two = store(), store()
    assert two.forgotten_since(0) == (0, frozenset(), frozenset())
    one.commit([DocumentJob({DOC: [key(kit, 1)], OTHER: [key(kit, 2)]})])
    one.commit([ForgetJob(DOC, heads=[key(kit, 3)])])
    one.commit([ForgetJob(OTHER)])
    seen = two.forgotten_since(0)
    assert seen == (2, {key(kit, 1), key(kit, 2), key(kit, 3)}, {DOC, OTHER})
    assert two.forgotten_since(1) == (2, {key(kit, 2)}, {OTHER})
    assert two.forgotten_since(2) == (2, set(), set())
    assert seen.covers([key(kit, 9), key(kit, 3)])
    assert not seen.covers([key(kit, 9)])
    one.close()
    two.close()
    assert store().epoch() == 2


def test_whoever_is_too_far_behind_must_drop_everything(kit, store, write):
    one = store()
    jobs = [ForgetJob(bytes([i % 256, i // 256]) * 8) for i in range(KEPT_EPOCHS + 1)]
    one.commit(jobs)
    assert one.forgotten_since(0) == (KEPT_EPOCHS + 1, None, None)
    assert one.forgotten_since(0).covers([key(kit, 1)])
    assert one.forgotten_since(0).has(DOC)
    assert one.forgotten_since(1).documents == {job.document for job in jobs[1:]}
    assert write(one, [1], epoch=0) == [WriteOutcome.FORGOTTEN]
    assert write(one, [1], epoch=1) == [WriteOutcome.STORED]
    late = DocumentJob({DOC: [key(kit, 1)]}, epoch=0)
    one.commit([late])
    assert names(kit) == set()
    assert one.audit(fix=False) == []


@pytest.mark.parametrize("job", [ForgetJob(b"d"), ForgetJob(DOC, [b"k"])])
def test_digests_of_a_wrong_length_are_refused(store, job):
    one = store()
    one.commit([job])
    assert isinstance(job.error, ValueError)
    assert one.epoch() == 0
    bad = DocumentJob({DOC: [b"k"]})
    one.commit([bad])
    assert isinstance(bad.error, ValueError)


def test_heads_of_which_nothing_is_left_go_when_nobody_else_is_there(kit, store, write):
    one = store()
    write(one, [1])
    one.commit([DocumentJob({DOC: [key(kit, 1), key(kit, 2)]})])
    one.close()
    two = store()
    with two._index.turn(), two._index.write() as txn:
        assert txn.forgotten.heads(DOC) == {key(kit, 1)}


def test_reading_while_a_document_is_forgotten_is_a_miss(kit, store, write):
    entered, go = threading.Event(), threading.Event()

    class Slow(kit.FaultyFiles):
        def preadv(self, fd, buffers, at):
            entered.set()
            assert go.wait(60)
            return super().preadv(fd, buffers, at)

    one, other = store(files=Slow()), store()
    write(other, [1])
    chunk = kit.chunk_id(kit.prompt(1), 0)
    read = ReadJob(kit.format, chunk, memoryview(bytearray(kit.layout.nbytes)))
    thread = threading.Thread(target=one.read, args=[read])
    thread.start()
    assert entered.wait(60)
    other.commit([ForgetJob(DOC, heads=[chunk.key])])
    go.set()
    thread.join(60)
    assert read.outcome is ReadOutcome.MISSING


# --- files that cannot be removed ---


def test_a_forgotten_file_that_stays_is_not_served_and_takes_room(kit, store, write):
    files = kit.FaultyFiles()
    one = store(2, files=files)
    write(one, [7, 1])
    files.broken["unlink"] = errno.EACCES
    job = ForgetJob(DOC, heads=[key(kit, 7, 1)])
    one.commit([job])
    name = f"{key(kit, 7, 1).hex()}.safetensors"
    assert (job.keys, job.files, job.left) == ([key(kit, 7, 1)], [], [name])
    assert one.lookup([key(kit, 7, 1)]) == {}
    assert one.used_bytes() == kit.file_nbytes
    assert write(one, [2], epoch=1) == [WriteOutcome.NO_ROOM]
    assert one.audit(fix=False) == [f"file {name}: belongs to no chunk"]
    files.broken.clear()
    # The next group, of any process, tries again.
    assert write(one, [2], epoch=1) == [WriteOutcome.STORED]
    assert names(kit) == {key(kit, 7).hex(), key(kit, 2).hex()}
    assert one.audit(fix=False) == []


@pytest.mark.parametrize("how", ["opening", "repair"])
def test_a_forgotten_file_that_stayed_is_removed_later(kit, store, write, how):
    files = kit.FaultyFiles()
    one = store(files=files)
    write(one, [7])
    files.broken["unlink"] = errno.EACCES
    one.commit([ForgetJob(DOC, heads=[key(kit, 7)])])
    assert names(kit) == {key(kit, 7).hex()}
    if how == "opening":
        one.close()
        # It does not keep anybody from opening, either.
        store(files=files).close()
        store()
    else:
        files.broken.clear()
        assert len(one.audit(fix=True)) == 1
    assert names(kit) == set()


def test_forgetting_sweeps_what_a_dead_process_left(kit, store, write):
    """Such a file may hold the document, and no record tells."""
    one = store()
    write(one, [1])
    (good,) = kit.chunk_files(kit.folder)
    for name in (f"{good.stem}.{os.getpid()}.0.tmp", "ab" * 32 + ".safetensors"):
        good.with_name(name).write_bytes(good.read_bytes())
    one.commit([ForgetJob(DOC, heads=[key(kit, 2)])])
    assert kit.chunk_files(kit.folder) == [good]


# --- the audit ---


def damage(store, how, kit):
    index = store._index
    with index.turn(), index.write() as txn:
        tables, raw = txn._tables, txn._txn
        if how == "parent":
            raw.delete(key(kit, 1), db=tables.records)
        elif how == "value":
            raw.put(key(kit, 1, 2), b"?", db=tables.records)
        elif how == "link":
            raw.delete(key(kit, 1), key(kit, 1, 2), db=tables.children)
        elif how == "total":
            txn.used += 5
        elif how == "tenant":
            txn._totals[ALICE] = 5
        elif how == "bare":
            txn._write(key(kit, 8), Record(kit.namespace.root, 0, 0, b""))
        elif how == "epoch":
            raw.delete((1).to_bytes(8, "big"), db=tables.epochs)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("parent", "parent without record"),
        ("value", "cannot be read"),
        ("link", "table of children"),
        ("total", "bytes, its records have"),
        ("tenant", "bytes of tenant 6161"),
        ("bare", "has no children"),
        ("epoch", "forgotten in epoch 1"),
    ],
)
@pytest.mark.parametrize("then", ["repair", "reopen"])
def test_damage_to_the_index_is_found_and_mended(kit, store, write, how, text, then):
    one = store()
    write(one, [1, 2, 3], 2)
    write(one, [4])
    one.commit([ForgetJob(OTHER, heads=[key(kit, 9)])])
    damage(one, how, kit)
    assert any(text in line for line in one.audit(fix=False))
    if then == "repair":
        assert any(text in line for line in one.audit(fix=True))
    else:
        one.close()
        one = store()
        if how in ("link", "epoch"):
            # Seen by the audit only: opening reads the records and nothing else.
            assert one.audit(fix=True) != []
    assert one.audit(fix=False) == []
    kept = {key(kit, 4)}
    if how not in ("parent", "value"):
        kept.add(key(kit, 1, 2, 3))
    assert set(one.records()) == kept == {bytes.fromhex(n) for n in names(kit)}
    assert one.used_bytes() == kit.file_bytes(kit.folder)
    if how == "epoch":
        # What is not known any more counts as everything.
        assert one.forgotten_since(0) == (1, None, None)
        assert one.forgotten_since(1) == (1, set(), set())


def test_the_audit_may_run_while_others_write(kit, store, write):
    writer, auditor = store(files=kit.FaultyFiles()), store()
    stop = threading.Event()
    found = []

    def audit():
        while not stop.is_set():
            found.extend(auditor.audit(fix=False))

    thread = threading.Thread(target=audit)
    thread.start()
    for number in range(60):
        write(writer, [number, 1])
        if number >= 4:
            writer.commit([DeleteJob([key(kit, number - 4, 1), key(kit, number - 4)])])
    stop.set()
    thread.join(60)
    assert found == []
