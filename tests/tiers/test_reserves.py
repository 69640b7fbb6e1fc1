"""Whatever moves in and out, the request that runs finds its part of DRAM."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcr_core.tiers import WRITE_POLICIES, IoPool
from pcr_core.tiers.jobs import WriteOutcome
from pcr_core.tiers.reserves import Reserves
from pcr_core.tiers.write_policy import OnEvict
from tests.tiers.memory_store import MemoryStore
from tests.tiers.stepwise import StepIo
from tests.tiers.world import question

MIB = 2**20


@given(st.integers(1, 100) | st.integers(1, 10**6), st.integers(1, 2**30))
def test_the_shares_are_a_pool(capacity, slot_bytes):
    shares = Reserves.of(capacity, slot_bytes)
    assert shares.reads_ahead >= 1
    assert shares.writes >= 1
    if capacity >= 3:
        assert shares.reads_ahead + shares.writes + shares.floor == capacity
        assert shares.floor >= max(1, capacity // 4)
        assert shares.writes <= capacity // 2
    assert shares.reads_ahead * slot_bytes <= max(256 * MIB, slot_bytes)


@pytest.mark.parametrize(
    ("capacity", "shares"),
    [(1, (1, 1, 0)), (2, (1, 1, 0)), (3, (1, 1, 1)), (8, (3, 3, 2)), (22, (9, 8, 5))],
)
def test_small_pools(capacity, shares):
    assert Reserves.of(capacity, 3 * MIB) == Reserves(*shares)


def test_in_a_large_pool_reads_ahead_are_limited_by_time_and_writes_have_half():
    assert Reserves.of(32_768, MIB) == Reserves(256, 16_384, 16_128)


class Stuck:
    """A store whose writer does nothing until it is let go."""

    def __init__(self, store) -> None:
        self.store = store
        self.gate = threading.Event()

    def read(self, job) -> None:
        self.store.read(job)

    def commit(self, jobs) -> None:
        self.gate.wait(60)
        self.store.commit(jobs)


def asked(manager, kit, *chunks: int) -> tuple[int, int]:
    """Serve a new prompt; how many chunks it has and how many of them were kept."""
    served = kit.serve(manager, [*kit.prompt(*chunks), 9])
    return len(chunks), len(served.sinks)


@pytest.mark.parametrize("policy", ["write_through", "second_touch", "on_evict"])
def test_a_disk_that_takes_nothing_leaves_room_for_the_request_that_runs(kit, policy):
    stuck = []

    def io(store):
        stuck.append(Stuck(store))
        return IoPool(stuck[0])

    manager = kit.manager(
        slots=16, ssd_chunks=500, io=io, write_policy=WRITE_POLICIES[policy]()
    )
    floor = manager._pool.reserves.floor
    assert floor == 4
    for number in range(100, 400, floor):
        chunks = range(number, number + floor)
        assert asked(manager, kit, *chunks) == (floor, floor)
        if policy == "second_touch":
            kit.serve(manager, [*kit.prompt(*chunks), 9])
    assert manager.snapshot().bypassed_inserts == 0
    assert manager.snapshot().write_drops > 0
    stuck[0].gate.set()
    assert manager.flush(60)
    assert manager.check().ok


def test_nor_do_reads_ahead_and_writes_together_take_it(kit):
    waiting = [question(50 + n, 60 + n, 70 + n) for n in range(5)]
    store = MemoryStore(500 * kit.file_nbytes)
    first = kit.manager(slots=64, store=store)
    for one in waiting:
        kit.serve(first, one.tokens)
    first.close()
    manager = kit.manager(slots=16, store=store, io=StepIo)
    shares = manager._pool.reserves
    manager.look_ahead(waiting)
    assert len(manager._io.reads) == shares.reads_ahead == 6
    assert asked(manager, kit, *range(100, 110)) == (10, 10)
    assert len(manager._io.writes) == shares.writes == 6
    for number in range(200, 240, shares.floor):
        manager.look_ahead(waiting)
        assert len(manager._io.reads) == shares.reads_ahead
        assert asked(manager, kit, *range(number, number + shares.floor)) == (4, 4)
    assert manager.check_memory() == []


def test_what_exceeds_the_share_of_writes_is_written_later(kit):
    manager = kit.manager(slots=8, ssd_chunks=50, io=StepIo)
    io, tokens = manager._io, [*kit.prompt(*range(8)), 9]
    kit.serve(manager, tokens)
    names = []
    while io.writes:
        assert len(io.writes) <= manager._pool.reserves.writes == 3
        names += [job.chunk.key for job in io.writes]
        io.run_writes()
        manager.poll()
    assert names == kit.keys_of(tokens), "root first"
    assert manager.snapshot().written == 8
    assert manager.snapshot().write_drops == 0


def test_what_waits_for_the_writer_can_be_evicted_and_is_counted(kit):
    manager = kit.manager(slots=8, ssd_chunks=50, io=StepIo)
    kit.serve(manager, [*kit.prompt(*range(8)), 9])
    assert asked(manager, kit, 20, 21) == (2, 2)
    assert manager.snapshot().write_drops == 2
    manager._io.run_writes()
    assert manager.flush()
    assert manager.snapshot().written == 8
    assert manager.check().ok


def test_what_waits_for_the_writer_can_be_forgotten(kit):
    manager = kit.manager(slots=8, ssd_chunks=50, io=StepIo)
    tokens = [*kit.prompt(*range(8)), 9]
    kit.serve(manager, tokens)
    assert len(manager._writes._waiting) == 5
    job = manager.begin_forget(b"d" * 16, kit.keys_of(tokens)[4:5])
    manager.end_forget(job)
    assert len(manager._writes._waiting) == 1
    assert manager.flush()
    manager.end_forget(job)
    assert manager.snapshot().written == 4
    assert manager.match(kit.keys_of(tokens))[3:5] == ["dram", "none"]
    assert manager.check().ok


def test_a_flush_writes_more_than_its_share(kit):
    manager = kit.manager(slots=8, ssd_chunks=50, io=IoPool, write_policy=OnEvict())
    kit.serve(manager, [*kit.prompt(*range(8)), 9])
    assert manager.snapshot().written == 0
    assert manager.flush(60)
    assert manager.snapshot().written == 8


class Hanging(StepIo):
    """Nothing is ever written; at the end what is queued is dropped."""

    closed = False

    def write(self, job) -> None:
        assert not self.closed
        super().write(job)

    def flush(self, timeout=None) -> bool:
        return False

    def close(self, timeout=10.0) -> bool:
        self.closed = True
        for job in self.writes:
            job.outcome = WriteOutcome.DROPPED
        self._done += self.writes
        self.writes = []
        return True


def test_what_waits_at_the_end_is_dropped_and_counted(kit):
    manager = kit.manager(slots=8, ssd_chunks=50, io=Hanging)
    kit.serve(manager, [*kit.prompt(*range(8)), 9])
    manager.close()
    assert manager.stats.write_drops == 8
    assert manager.stats.write_errors == 0
