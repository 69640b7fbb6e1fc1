"""Room on SSD: limits that others share, chunks out of use, work that stays bounded."""

from __future__ import annotations

import random

import pytest

from pcr_core.index.chunk import Namespace, chunk_keys
from pcr_core.tiers.jobs import DeleteJob
from pcr_core.tiers.write_policy import OnEvict
from tests.tiers.conftest import FILE_BYTES, LAYOUT, keys_of, prompt, serve
from tests.tiers.memory_store import MemoryFolder, MemoryStore
from tests.tiers.stepwise import StepIo


def stored(store: MemoryStore, *chunks: int) -> list[bool]:
    return [key in store.folder.records for key in keys_of(prompt(*chunks))]


def ask(manager, *chunks: int):
    return serve(manager, [*prompt(*chunks), 99])


# --- chunks that cannot be read ---


def test_a_full_folder_of_unreadable_chunks_comes_back_into_use(kit):
    store = MemoryStore(2 * FILE_BYTES)
    ask(kit.manager(store=store), 1, 2)
    manager = kit.manager(store=store)
    store.unreadable = set(store.folder.records)  # out of descriptors, say
    assert ask(manager, 1, 2).tiers == {}
    assert manager.stats.read_errors == 2
    assert stored(store, 1, 2) == [True, True]
    assert store.unreadable == set()  # both have been written anew
    assert manager.stats.write_drops == 0
    again = kit.manager(store=store)
    assert ask(again, 1, 2).tiers == {0: "ssd", 1: "ssd"}


def test_unreadable_chunks_give_way_first(kit):
    store = MemoryStore(3 * FILE_BYTES)
    first = kit.manager(store=store)
    for number in (1, 2, 3):
        ask(first, number)
    manager = kit.manager(store=store)
    store.unreadable = set(keys_of(prompt(3)))
    lease = manager.lease(keys_of(prompt(3)), prompt(3), 1)
    lease.wait()
    lease.close()
    ask(manager, 4)
    assert stored(store, 1) == stored(store, 2) == stored(store, 4) == [True]
    assert stored(store, 3) == [False]
    assert manager.stats.ssd_evictions == 0
    assert not manager._catalogue.unreadable


def test_what_others_removed_is_not_unreadable_for_ever(kit):
    store = MemoryStore(8 * FILE_BYTES)
    ask(kit.manager(store=store), 1)
    manager = kit.manager(store=store)
    store.unreadable = set(keys_of(prompt(1)))
    manager.lease(keys_of(prompt(1)), prompt(1), 1).close()
    manager.poll()
    store.commit([DeleteJob(keys_of(prompt(1)))])
    manager._catalogue.resync()
    assert not manager._catalogue.unreadable


def test_nothing_is_evicted_while_the_index_cannot_be_read(kit):
    store = MemoryStore(2 * FILE_BYTES)
    manager = kit.manager(store=store)
    ask(manager, 1, 2)
    store.broken = {"read"}
    ask(manager, 3)
    assert (manager.stats.ssd_evictions, manager.stats.write_drops) == (0, 1)
    store.broken = set()
    assert stored(store, 1, 2) == [True, True]
    manager.flush()
    assert stored(store, 3) == [True]


# --- others on the same folder ---


def test_what_another_process_evicted_makes_no_room(kit):
    """Both would take the same victim, and the second would find no room."""
    folder = MemoryFolder()
    stores = [MemoryStore(4 * FILE_BYTES, folder) for _ in range(2)]
    one, two = (kit.manager(store=store, clock=kit.Clock()) for store in stores)
    for number in (1, 2, 3, 4):
        ask(one, number)
    two._catalogue.resync()
    for number in range(10, 40):
        ask(one, number)
        ask(two, number + 100)
        assert len(folder.records) == 4
    assert one.stats.write_drops == two.stats.write_drops == 0
    for manager in (one, two):
        assert manager.check_memory() == []
        assert manager.snapshot().ssd_bytes == 4 * FILE_BYTES


def test_a_quota_counts_what_another_process_of_the_tenant_wrote(kit):
    folder = MemoryFolder()
    tenant = b"t" * 16
    limits = {"tenant": tenant, "quota_bytes": 3 * FILE_BYTES}
    stores = [MemoryStore(100 * FILE_BYTES, folder, **limits) for _ in range(2)]
    one, two = (kit.manager(store=store, **limits) for store in stores)
    for number in range(10, 30):
        ask(one, number)
        ask(two, number + 100)
        assert folder.used_bytes(tenant) <= 3 * FILE_BYTES
    assert one.stats.write_drops == two.stats.write_drops == 0


def test_other_peoples_chunks_make_room_for_the_budget_not_for_the_quota(kit):
    folder = MemoryFolder()
    other = Namespace.of([("test", b"other")])
    strangers = MemoryStore(4 * FILE_BYTES, folder, tenant=b"s" * 16)
    stranger = kit.manager(store=strangers, namespace=other, tenant=b"s" * 16)
    for number in (1, 2, 3):
        tokens = [*prompt(number), 9]
        keys = chunk_keys(other, tokens, LAYOUT.chunk_tokens)
        with stranger.lease(keys, tokens, 1) as lease:
            lease.filled(0)
    limits = {"tenant": b"t" * 16, "quota_bytes": 2 * FILE_BYTES}
    store = MemoryStore(4 * FILE_BYTES, folder, **limits)
    manager = kit.manager(store=store, clock=kit.Clock(10**6), **limits)
    for number in range(10, 20):
        ask(manager, number)
    assert folder.used_bytes(b"t" * 16) == 2 * FILE_BYTES
    assert folder.used_bytes(b"s" * 16) == 2 * FILE_BYTES
    assert manager.stats.write_drops == 0


def test_two_busy_processes_read_all_records_rarely(kit):
    """Once for every sixteenth of the folder that the other has written, at most."""
    folder, chunks = MemoryFolder(), 160
    stores = [MemoryStore(chunks * FILE_BYTES, folder) for _ in range(2)]
    clock = kit.Clock()
    one, two = (kit.manager(store=store, clock=clock, slots=4) for store in stores)
    rounds = 400
    for number in range(rounds):
        ask(one, 1000 + number)
        ask(two, 2000 + number)
    assert len(folder.records) == chunks
    for store in stores:
        assert store.calls["contents"] <= 2 + rounds / (chunks // 16)
    assert one.stats.write_drops == two.stats.write_drops == 0
    # Neither has pushed the other out: both are about as recent.
    theirs = sum(stored(stores[0], 2000 + number)[0] for number in range(rounds))
    assert 0.3 * chunks < theirs < 0.7 * chunks


def test_without_an_ssd_nothing_is_unsaved_and_nothing_dropped(kit):
    manager = kit.manager(ssd_chunks=0, slots=4)
    for number in range(10):
        ask(manager, number)
    assert manager.flush()
    assert manager.stats.write_drops == 0
    assert not manager._writes._touched


# --- chunks that leave DRAM ---


@pytest.mark.parametrize("hot", [0, 8])
def test_what_leaves_has_been_written_before(kit, hot):
    """With a disk that keeps up, nothing is dropped, whatever else is in DRAM."""
    store = MemoryStore(10_000 * FILE_BYTES)
    made = []

    def io(backend):
        made.append(StepIo(backend))
        return made[-1]

    manager = kit.manager(slots=64, store=store, write_policy=OnEvict(), io=io)
    rng = random.Random(1)
    for number in range(300):
        if hot:
            ask(manager, *range(1, hot + 1))
        ask(manager, *(1000 + 3 * number + i for i in range(rng.randint(1, 3))))
        made[0].run_writes()
        manager.poll()
    assert manager.stats.write_drops == 0
    assert manager.stats.bypassed_inserts == 0
    assert manager.stats.dram_evictions > 300


def test_a_chunk_that_stays_is_not_written_ahead(kit):
    store = MemoryStore(1000 * FILE_BYTES)
    manager = kit.manager(slots=64, store=store, write_policy=OnEvict())
    for _ in range(50):
        ask(manager, 1, 2, 3)
        ask(manager, 4, 5, 6)
    assert manager.stats.written == 0


def test_flush_writes_the_latest_first(kit):
    """Where there is no room for all, nothing is written to be evicted again."""
    store = MemoryStore(3 * FILE_BYTES)
    manager = kit.manager(slots=64, store=store, write_policy=OnEvict())
    ask(manager, 1, 2)
    ask(manager, 3, 4, 5)
    manager.flush()
    manager.poll()
    assert stored(store, 3, 4, 5) == [True] * 3
    assert (manager.stats.written, manager.stats.ssd_evictions) == (3, 0)
