"""The right to be forgotten, in memory: writes and reads under way, other processes.

Document ``d`` is the chunk with the number ``d``: forgetting it removes every chunk
whose prompt so far has that number in it. Managers that share a ``MemoryFolder`` stand
for processes that share a folder.
"""

from __future__ import annotations

import pytest

from pcr_core.errors import ChunkLostError
from pcr_core.index.node import Disk, Host
from pcr_core.tiers import StopPolicy, TierManager
from pcr_core.tiers.jobs import DocumentJob, WriteJob, WriteOutcome
from tests.tiers.conftest import FILE_BYTES, LAYOUT, content, keys_of, prompt
from tests.tiers.memory_store import MemoryFolder, MemoryStore
from tests.tiers.stepwise import StepIo
from tests.tiers.world import question

ROOM = 100 * FILE_BYTES


def digest(document: int) -> bytes:
    return bytes([document]) * 16


class Process:
    """A manager with I/O by hand, on a folder that others may use, too."""

    def __init__(self, kit, folder: MemoryFolder | None = None, **options) -> None:
        self.kit = kit
        self.store = MemoryStore(ROOM, folder)
        self.made: list[StepIo] = []
        self.manager: TierManager = kit.manager(
            slots=options.pop("slots", 16),
            store=self.store,
            io=self._io,
            stop=StopPolicy(recompute=False),
            **options,
        )

    def _io(self, store) -> StepIo:
        self.made.append(StepIo(store))
        return self.made[-1]

    @property
    def io(self) -> StepIo:
        return self.made[0]

    def open(self, *chunks: int, documents=None):
        """Do what the engine does before it computes."""
        tokens = [*prompt(*chunks), 99]
        keys = keys_of(tokens)
        self.manager.catch_up()
        numbers = chunks if documents is None else documents
        heads = {digest(d): keys[chunks.index(d)] for d in numbers if d in chunks}
        self.manager.register(heads)
        return self.manager.lease(keys, tokens, len(keys))

    def end(self, lease) -> dict[int, str]:
        lease.wait()
        for index, slot in lease.sources.items():
            assert bytes(slot.view) == content(lease.keys[index])
        for index, slot in lease.sinks.items():
            slot.view[:] = content(lease.keys[index])
            lease.filled(index)
        tiers = dict(lease.tiers)
        lease.close()
        return tiers

    def serve(self, *chunks: int) -> dict[int, str]:
        tiers = self.end(self.open(*chunks))
        self.settle()
        return tiers

    def settle(self) -> None:
        self.io.run_all()
        self.manager.poll()
        while self.io.writes:  # more than their share at once
            self.io.run_writes()
            self.manager.poll()

    def begin_forget(self, document: int):
        return self.manager.begin_forget(digest(document))

    def forget(self, document: int):
        job = self.begin_forget(document)
        self.io.run_writes()
        return job, self.manager.end_forget(job)

    def states(self, *chunks: int) -> list[str]:
        return self.manager.match(keys_of(prompt(*chunks)))

    def is_clean(self) -> bool:
        manager = self.manager
        return not manager.check_memory() and not manager._forgetting._doomed


@pytest.fixture
def process(kit):
    def make(folder: MemoryFolder | None = None, **options) -> Process:
        return Process(kit, folder, **options)

    return make


@pytest.fixture
def folder() -> MemoryFolder:
    return MemoryFolder()


# --- one process ---


def test_a_document_goes_with_all_that_follows_from_both_tiers(process):
    one = process()
    one.serve(1, 2, 3)
    one.serve(4, 2)
    one.serve(1, 5)
    job, removed = one.forget(2)
    keys = {*keys_of(prompt(1, 2, 3))[1:], keys_of(prompt(4, 2))[1]}
    assert set(job.keys) == keys
    assert set(removed.dram) == keys
    assert all(map(removed.covers, keys))
    assert not removed.covers(keys_of(prompt(1))[0])
    assert one.states(1, 2, 3) == ["dram", "none", "none"]
    assert one.states(4, 2) == ["dram", "none"]
    assert one.states(1, 5) == ["dram", "dram"]
    assert not keys & set(one.store.folder.records)
    assert one.manager.stats.forgotten == 6
    assert one.manager.departures.find(keys_of(prompt(4, 2))[1]).reason == "forgotten"
    assert one.is_clean()
    assert one.serve(1, 2, 3) == {0: "dram"}


def test_only_in_dram(kit):
    manager = kit.manager(ssd_chunks=0)
    tokens = [*prompt(1, 2, 3), 9]
    keys = keys_of(tokens)
    manager.register({digest(2): keys[1]})
    kit.serve(manager, tokens)
    job = manager.begin_forget(digest(2))
    manager.wait_for(job)
    removed = manager.end_forget(job)
    assert removed.dram == [keys[2], keys[1]]
    assert manager.match(keys) == ["dram", "none", "none"]
    assert manager.catch_up() is None


def test_what_was_never_seen_is_forgotten_easily(process):
    one = process()
    one.serve(1, 2)
    job, removed = one.forget(7)
    assert (list(job.keys), removed.dram, job.error) == ([], [], None)
    assert one.states(1, 2) == ["dram", "dram"]


def test_a_write_that_waits_behind_it_is_not_carried_out(process):
    one = process()
    one.end(one.open(1, 2, 3))
    job = one.begin_forget(2)
    one.end(one.open(4, 2))  # meanwhile, and behind another prefix
    writes = [job for job in one.io.writes if isinstance(job, WriteJob)]
    assert len(writes) == 5
    one.io.run_writes()
    assert [job.outcome for job in writes[-2:]] == [
        WriteOutcome.STORED,
        WriteOutcome.FORGOTTEN,
    ]
    one.manager.end_forget(job)
    assert one.states(1, 2, 3) == ["dram", "none", "none"]
    assert one.states(4, 2) == ["dram", "none"]
    assert set(one.store.folder.records) == {*keys_of(prompt(1)), *keys_of(prompt(4))}
    assert one.manager.stats.write_errors == 0
    assert one.is_clean()


def test_a_request_whose_document_is_not_yet_recorded_is_covered_too(process):
    """It starts while the store forgets; its document is in the writer's queue only."""
    one = process()
    one.serve(1, 2)
    job = one.begin_forget(2)
    one.end(one.open(4, 2))
    assert isinstance(one.io.writes[1], DocumentJob)
    one.io.run_writes(1)  # the removal and nothing else
    removed = one.manager.end_forget(job)
    assert removed.covers(keys_of(prompt(4, 2))[1])
    lease = one.open(4, 2)
    assert dict(lease.tiers) == {0: "dram"}
    lease.close()
    one.settle()
    assert one.states(4, 2) == ["dram", "none"]
    assert keys_of(prompt(4, 2))[1] not in one.store.folder.records
    assert one.is_clean()


def test_seen_again_it_is_stored_again_and_can_be_forgotten_again(process):
    one = process()
    one.serve(1, 2, 3)
    one.forget(2)
    assert one.serve(1, 2, 3) == {0: "dram"}
    assert set(keys_of(prompt(1, 2, 3))) <= set(one.store.folder.records)
    job, _ = one.forget(2)
    assert set(job.keys) == set(keys_of(prompt(1, 2, 3))[1:])
    assert one.states(1, 2, 3) == ["dram", "none", "none"]


# --- somebody is using it ---


def test_a_chunk_that_is_read_by_a_request_goes_when_the_request_ends(process):
    one = process()
    one.serve(1, 2, 3)
    lease = one.open(1, 2, 3)
    _, removed = one.forget(2)
    assert len(removed.dram) == 2
    assert bytes(lease.sources[2].view) == content(keys_of(prompt(1, 2, 3))[2])
    again = one.open(1, 2, 3)  # the document is back at once
    assert dict(again.tiers) == {0: "dram"}
    assert not again.sinks
    one.end(again)
    one.end(lease)
    one.settle()
    assert one.states(1, 2, 3) == ["dram", "none", "none"]
    assert one.is_clean()


def test_a_chunk_that_is_being_computed_is_not_kept(process):
    one = process()
    lease = one.open(1, 2, 3)
    one.forget(2)
    one.end(lease)
    one.settle()
    assert one.states(1, 2, 3) == ["dram", "none", "none"]
    assert set(one.store.folder.records) == set(keys_of(prompt(1)))
    assert one.is_clean()


def test_a_chunk_that_is_being_written_goes_when_it_is_written(process):
    one = process()
    one.end(one.open(1, 2))
    writing = [node for node in one.manager._tree.nodes() if node.disk is Disk.WRITING]
    assert len(writing) == 2
    other = process(one.store.folder)
    other.manager.register({digest(2): keys_of(prompt(1, 2))[1]})
    other.io.run_writes()
    other.forget(2)
    assert one.manager.catch_up().dram == [keys_of(prompt(1, 2))[1]]
    assert one.states(1, 2)[1] == "dram"  # the writer still needs its bytes
    lease = one.open(1, 2)
    assert dict(lease.tiers) == {0: "dram"}
    one.end(lease)
    one.settle()
    assert one.states(1, 2) == ["dram", "none"]
    assert set(one.store.folder.records) == set(keys_of(prompt(1)))
    assert one.is_clean()


def test_stored_just_before_it_was_forgotten(process, folder):
    """The write has been done, and undone by another process; we hear of it late."""
    one, other = process(folder), process(folder)
    one.end(one.open(1, 2))
    one.io.run_writes()
    other.forget(2)
    one.manager.catch_up()
    one.manager.poll()
    assert one.states(1, 2) == ["dram", "none"]
    assert one.manager.snapshot().ssd_chunks == 1
    assert one.is_clean()


@pytest.mark.parametrize("begun", [False, True])
def test_a_chunk_that_is_being_read_ahead_is_not_published(process, begun):
    one = process()
    one.serve(1, 2, 3)
    two = process(one.store.folder)
    two.manager.look_ahead([question(1, 2, 3)])
    assert len(two.io.reads) == 3
    if begun:
        two.io.begin_read(1)
        job = two.io.begun[0].jobs[0]
        job.view[:] = content(job.chunk.key)
    one.forget(2)
    two.manager.catch_up()
    two.manager.look_ahead([])
    two.settle()
    assert two.states(1, 2, 3)[1:] == ["none", "none"]
    assert two.is_clean()


def test_a_chunk_forgotten_between_its_layers(process):
    """What was computed on of it was right; the rest is not used, nor is it kept."""
    one = process()
    one.serve(1, 2, 3)
    two = process(one.store.folder)
    lease = two.open(1, 2, 3)
    two.io.begin_read()
    two.io.begin_read()
    two.io.step_read(0)
    two.io.step_read(1)
    one.forget(2)
    two.manager.catch_up()
    assert [arrival.layers for arrival in lease.arriving.values()] == [1, 1, 1]
    with pytest.raises(ChunkLostError) as caught:
        lease.arriving[1].wait(1)
    assert caught.value.index == 1
    lease.lost(1)
    assert 1 in lease.sinks
    assert two.end(lease) == {0: "ssd"}
    two.settle()
    assert two.states(1, 2, 3) == ["dram", "none", "none"]
    assert two.is_clean()


@pytest.mark.parametrize("ahead", [False, True])
def test_a_read_that_a_request_waits_for(process, ahead):
    one = process()
    one.serve(1, 2, 3)
    two = process(one.store.folder)
    if ahead:
        two.manager.look_ahead([question(1, 2, 3)])
        for _ in range(3):
            two.io.begin_read()
    lease = two.open(1, 2, 3)
    assert set(lease.pending if ahead else lease.arriving) == {0, 1, 2}
    one.forget(2)
    two.manager.catch_up()
    assert two.end(lease) == {0: "ssd"}
    two.settle()
    assert two.states(1, 2, 3) == ["dram", "none", "none"]
    assert two.is_clean()


# --- other processes ---


def test_what_another_process_forgets_is_dropped_at_the_next_look(process, folder):
    one, two = process(folder), process(folder)
    one.serve(1, 2, 3)
    two.serve(1, 2, 3)
    one.forget(2)
    assert two.states(1, 2, 3) == ["dram"] * 3
    removed = two.manager.catch_up()
    assert set(removed.dram) == set(keys_of(prompt(1, 2, 3))[1:])
    assert two.states(1, 2, 3) == ["dram", "none", "none"]
    assert two.manager.catch_up() is None
    assert two.is_clean()
    assert two.serve(1, 2, 3) == {0: "dram"}
    assert one.manager.catch_up() is None
    assert one.serve(1, 2, 3) == {0: "dram", 1: "ssd", 2: "ssd"}


def test_a_document_that_only_this_process_knows_behind_a_prefix(process, folder):
    """Its own record is not in the index yet when another process forgets it."""
    one, two = process(folder), process(folder)
    two.end(two.open(4, 2, 5))
    two.manager.poll()
    one.serve(1, 2)
    one.forget(2)
    removed = two.manager.catch_up()
    assert removed.covers(keys_of(prompt(4, 2))[1])
    lease = two.open(4, 2, 5)
    assert dict(lease.tiers) == {0: "dram"}
    two.end(lease)
    two.settle()
    two.manager.catch_up()
    two.settle()
    assert keys_of(prompt(4, 2))[1] not in folder.records
    assert two.is_clean()


def test_chunks_behind_some_that_are_in_no_tier(process, folder):
    """Where a document begins may be gone while what follows it is still there."""
    one, two = process(folder), process(folder)
    one.serve(1, 2, 3, 4)
    for key in keys_of(prompt(1, 2, 3)):  # damaged, say
        folder.remove(key)
    two.manager.look_ahead([question(1, 2, 3, 4)])
    two.settle()
    assert two.states(1, 2, 3, 4) == ["none", "none", "none", "dram"]
    one.forget(2)
    assert two.manager.catch_up().dram == keys_of(prompt(1, 2, 3, 4))[3:]
    assert two.states(1, 2, 3, 4) == ["none"] * 4
    assert two.is_clean()


def test_chunks_behind_one_that_is_out_of_use(process, folder):
    one, two = process(folder), process(folder)
    one.serve(1, 2)
    keys = keys_of(prompt(1, 2, 3))
    two.store.unreadable = {keys[1]}
    two.open(1, 2).close()
    lease = two.open(1, 2)
    lease.wait()  # it cannot be read here
    lease.close()
    one.serve(1, 2, 3)
    two.manager._catalogue.resync()
    two.manager.look_ahead([question(1, 2, 3)])
    two.settle()
    assert two.states(1, 2, 3) == ["dram", "none", "dram"]
    one.forget(1)
    two.manager.catch_up()
    assert two.states(1, 2, 3) == ["none"] * 3
    assert two.is_clean()


def test_whoever_is_too_far_behind_drops_everything(process, folder):
    one, two = process(folder), process(folder)
    two.serve(1, 2, 3)
    lease = two.open(4, 5)
    real = two.store.forgotten_since
    one.forget(9)
    two.store.forgotten_since = lambda epoch: real(epoch)._replace(
        heads=None, documents=None
    )
    removed = two.manager.catch_up()
    assert removed.heads is None
    assert removed.covers(b"anything")
    assert len(removed.dram) == 5
    two.store.forgotten_since = real
    two.end(lease)
    two.settle()
    assert two.states(1, 2, 3) == ["ssd"] * 3  # it was not forgotten after all
    assert two.states(4, 5) == ["none"] * 2
    assert two.is_clean()
    assert two.serve(1, 2, 3) == dict.fromkeys(range(3), "ssd")


def test_two_processes_forget_the_same_at_the_same_time(process, folder):
    one, two = process(folder), process(folder)
    one.serve(1, 2)
    two.serve(1, 2)
    jobs = [one.begin_forget(2), two.begin_forget(2)]
    one.io.run_writes()
    two.io.run_writes()
    assert [job.epoch for job in jobs] == [1, 2]
    for process_, job in zip((two, one), reversed(jobs), strict=True):
        process_.manager.end_forget(job)
        assert process_.states(1, 2) == ["dram", "none"]
        assert process_.is_clean()


def test_a_chunk_is_in_the_receipt_once(process, folder):
    one, two = process(folder), process(folder)
    one.serve(1, 2)
    lease = one.open(1, 2)
    two.forget(1)
    _, removed = one.forget(2)
    assert sorted(removed.dram) == sorted(keys_of(prompt(1, 2)))
    one.end(lease)
    assert one.is_clean()


# --- what is registered ---


def test_a_request_that_meets_the_same_head_again_registers_nothing(process):
    one = process()
    one.serve(1, 2)
    one.end(one.open(1, 2))
    assert not any(isinstance(job, DocumentJob) for job in one.io.writes)


def test_registered_again_after_another_process_forgot_it(process, folder):
    """Or its chunks would be on disk, and nobody could find them to forget them."""
    one, two = process(folder), process(folder)
    two.serve(1, 2)
    one.forget(2)
    two.serve(1, 2)
    assert folder.heads[digest(2)] == {keys_of(prompt(1, 2))[1]}
    one.forget(2)
    assert keys_of(prompt(1, 2))[1] not in folder.records


def test_a_lease_takes_no_news_in(process, folder):
    """Between registering its documents and its end, a request sees one epoch."""
    one, two = process(folder), process(folder)
    two.serve(1, 2)
    keys = keys_of(prompt(1, 2, 3))
    two.manager.register({digest(2): keys[1]})  # known: nothing to record
    one.forget(2)
    lease = two.manager.lease(keys, [*prompt(1, 2, 3), 9], 3)
    two.end(lease)
    two.settle()
    assert set(folder.records) == {keys[0]}
    assert two.manager.catch_up().covers(keys[1])
    assert two.states(1, 2, 3) == ["dram", "none", "none"]


def test_many_documents_are_not_looked_through_for_each_request(process, monkeypatch):
    monkeypatch.setattr("pcr_core.tiers.forgetting._MOST_HEADS", 4)
    one = process()
    looks = []
    real = one.manager._tree.match
    one.manager._tree.match = lambda keys: looks.append(len(keys)) or real(keys)
    for number in range(1, 30):
        one.serve(number)
    assert one.states(1) == ["ssd"]
    assert sum(looks) < 10 * 30
    for number in range(1, 30):
        job, _ = one.forget(number)
        assert job.keys


def test_pruning_keeps_what_is_about_to_be_computed(kit, monkeypatch):
    """Without an index nobody else remembers where a document begins."""
    monkeypatch.setattr("pcr_core.tiers.forgetting._MOST_HEADS", 2)
    manager = kit.manager(ssd_chunks=0, slots=4)
    for number in range(1, 20):
        keys = keys_of(prompt(number))
        manager.register({digest(number): keys[0]})
        kit.serve(manager, [*prompt(number), 99])
        job = manager.begin_forget(digest(number)) if number % 3 == 0 else None
        if job is not None:
            assert manager.end_forget(job).dram == keys
    assert manager._forgetting._count <= 6


def test_a_hint_to_what_is_forgotten_goes_too(process):
    one = process()
    one.serve(1, 2, 3)
    one.manager.hint(question(1, 2, 3))
    one.manager.hint(question(1, 5))
    one.forget(2)
    assert [hint.tokens for hint in one.manager._hints] == [question(1, 5).tokens]
    other = process(one.store.folder)
    other.forget(5)
    one.manager.register({digest(5): keys_of(prompt(1, 5))[1]})
    one.manager.catch_up()
    assert list(one.manager._hints) == []


# --- failing disks ---


def test_an_index_that_refuses_says_so_and_is_asked_again(process):
    one = process()
    one.serve(1, 2)
    one.store.broken = {"write"}
    job, removed = one.forget(2)
    assert job.error is not None
    assert removed.dram == [keys_of(prompt(1, 2))[1]]
    assert one.states(1, 2) == ["dram", "ssd"]  # the disk still has it
    one.store.broken = set()
    job, _ = one.forget(2)
    assert job.error is None
    assert one.states(1, 2) == ["dram", "none"]
    assert one.is_clean()


def test_what_only_this_process_knew_is_known_when_it_is_asked_again(process):
    one = process()
    one.store.broken = {"write"}
    one.serve(1, 2)
    job, _ = one.forget(2)
    assert job.error is not None
    one.store.broken = set()
    one.serve(1, 2)
    assert len(one.store.folder.records) == 2
    one.forget(2)
    assert set(one.store.folder.records) == set(keys_of(prompt(1)))


def test_an_index_that_cannot_be_read_drops_nothing(process, folder):
    one, two = process(folder), process(folder)
    one.serve(1, 2)
    two.serve(1, 2)
    one.forget(2)
    two.store.broken = {"read"}
    assert two.manager.catch_up() is None
    two.store.broken = set()
    assert two.manager.catch_up() is not None
    assert two.states(1, 2) == ["dram", "none"]


def test_opened_while_the_index_cannot_be_read(kit, process, folder):
    one = process(folder)
    one.serve(1, 2)
    one.forget(2)
    one.serve(1, 2)

    class Blind(MemoryStore):
        def __init__(self, *args) -> None:
            super().__init__(*args)
            self.broken = {"read"}

    store = Blind(ROOM, folder)
    manager = kit.manager(store=store, slots=4)
    assert manager.match(keys_of(prompt(1, 2))) == ["none", "none"]
    store.broken = set()
    assert kit.serve(manager, [*prompt(1, 2), 9]).tiers == {0: "ssd", 1: "ssd"}
    manager.catch_up()  # from the beginning: it may have been forgotten since
    assert manager.match(keys_of(prompt(1, 2))) == ["dram", "ssd"]


def test_what_is_written_was_registered(kit):
    """A document that could not be recorded is recorded before anything is stored."""
    store = kit.manager()._store
    tokens = prompt(1, 2)
    keys = keys_of(tokens)
    files = store._files = kit.FaultyFiles()
    document = DocumentJob({digest(2): [keys[1]]}, epoch=0)
    jobs = []
    for index in range(2):
        view = memoryview(content(keys[index]))
        jobs.append(WriteJob(kit.format, kit.chunk_id(tokens, index), view, 1))
        jobs[-1].ancestors = keys
    files.broken["fsync_folder"] = 5
    with pytest.raises(OSError, match="Input/output"):
        store.commit([document, jobs[0]])
    files.broken.clear()
    store.commit([jobs[1]])
    assert jobs[1].outcome is WriteOutcome.STORED
    from pcr_core.tiers.jobs import ForgetJob

    forget = ForgetJob(digest(2))
    store.commit([forget])
    assert list(forget.keys) == [keys[1]]


def test_nothing_is_left_of_a_full_house(process):
    one = process(slots=4)
    for numbers in ((1, 2), (3, 2), (4, 2), (5, 2)):
        one.serve(*numbers)
    one.forget(2)
    assert one.manager._dram.spare == 4 - one.manager._tree.host_ready
    assert all(
        node.host is not Host.READY or node.key not in keys_of(prompt(n, 2))
        for n in (1, 3, 4, 5)
        for node in one.manager._tree.nodes()
        if node.key == keys_of(prompt(n, 2))[1]
    )
    assert one.is_clean()
    assert LAYOUT.nbytes * 4 == one.manager.snapshot().dram_budget
