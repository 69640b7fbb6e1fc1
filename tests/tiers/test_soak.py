"""Many requests through a manager with threads and tiny budgets: nothing grows.

Popular prompts and others that come once, a queue that is looked at, hints, requests
that give up, documents that are forgotten, files that disappear.
"""

from __future__ import annotations

import gc
import os
import random
import threading
from collections import deque

import psutil
import pytest

from pcr_core.tiers import WRITE_POLICIES, IoPool, TierManager, stop_policy
from pcr_core.tiers.store.chunk_file import chunk_path
from tests.tiers.conftest import LAYOUT, content
from tests.tiers.world import Waiting, question

SLOTS, FILES = 24, 60
REMEMBERED = 500


def any_question(rng: random.Random) -> Waiting:
    if rng.random() < 0.7:
        start = rng.choice([1, 1, 1, 2, 2, 3])
        return question(start, *(rng.randrange(4, 8) for _ in range(rng.randrange(5))))
    return question(*(rng.randrange(100, 10**6) for _ in range(rng.randint(1, 6))))


class Soak:
    """Serves a queue as the engine does."""

    def __init__(self, manager: TierManager, seed: int) -> None:
        self.manager = manager
        self.rng = random.Random(seed)
        self.queue: deque[Waiting] = deque()
        self.asked: deque[Waiting] = deque(maxlen=100)

    def run(self, requests: int) -> None:
        for number in range(requests):
            while len(self.queue) < 5:
                self.queue.append(any_question(self.rng))
            self.manager.poll()
            self.manager.catch_up()
            self.manager.look_ahead(list(self.queue)[: self.manager.window])
            self.serve(self.queue.popleft())
            if number % 20 == 0:
                self.manager.hint(any_question(self.rng))
            if number % 50 == 0:
                self.forget(self.rng.randrange(1, 8))
            if number % 70 == 69:
                self.lose_what_is_asked_next()

    def serve(self, request: Waiting) -> None:
        self.asked.append(request)
        documents = {
            bytes([token]) * 16: request.keys[at // LAYOUT.chunk_tokens]
            for at, token in reversed(list(enumerate(request.tokens[:-1])))
            if token < 100
        }
        self.manager.register(documents)
        with self.manager.lease(request.keys, request.tokens, request.usable) as lease:
            if self.rng.random() < 0.1:
                return  # cancelled, with reads under way
            lease.wait()
            for index, slot in lease.sources.items():
                assert bytes(slot.view) == content(request.keys[index])
            for index, slot in list(lease.sinks.items())[: self.rng.choice([9, 9, 1])]:
                slot.view[:] = content(request.keys[index])
                lease.filled(index)

    def forget(self, document: int) -> None:
        job = self.manager.begin_forget(bytes([document]) * 16)
        self.manager.end_forget(job)
        self.manager.wait_for(job)
        self.manager.end_forget(job)
        assert job.error is None

    def lose_what_is_asked_next(self) -> None:
        """Any file would not do: how many are read again depends on the threads."""
        assert self.manager.flush(60)
        self.manager.poll()
        for request in reversed(self.asked):
            states = self.manager.match(request.keys[: request.usable])
            held = states[: states.index("none")] if "none" in states else states
            if "ssd" in held:
                key = request.keys[held.index("ssd")]
                chunk_path(self.manager._store._folder, key).unlink()
                self.queue.appendleft(request)
                return

    def settle(self) -> None:
        self.manager.look_ahead([])
        reads = self.manager._reads
        while reads._readings:
            reads.wait_any(list(reads._readings.values()), 60.0)
            self.manager.poll()
        for _ in range(2):  # what the first has asked to be removed goes in the second
            assert self.manager.flush(60)
            self.manager.poll()


def owed(manager: TierManager) -> dict[str, int]:
    """What must be nothing when nothing is under way."""
    room, writes, io = manager._room, manager._writes, manager._io
    return {
        "leases": len(manager._leases),
        "pins": sum(node.pins for node in manager._tree.nodes()),
        "reads": len(manager._reads._readings) + len(manager._reads._by_node),
        "writes": len(writes._writing) + len(writes._waiting) + room._coming,
        "removals": len(room._deleting) + room._leaving + room._own_leaving,
        "hidden": len(manager._catalogue.leaving) + len(manager._catalogue.unreadable),
        "doomed": len(manager._forgetting._doomed),
        "queued": len(list(io._reads)) + len(io._writes),
        "done": len(io._done) + len(io._running),
        "slots": SLOTS - manager._tree.host_ready - manager._pool.free_count,
    }


def kept(manager: TierManager) -> dict[str, tuple[int, int]]:
    """What there may be of each thing: how much, and how much at most."""
    tree, writes = manager._tree, manager._writes
    shelves = tree._shelves._shelves.values()
    return {
        "nodes": (len(tree), 6 * (SLOTS + FILES) + 1),  # with the ancestors of each
        "DRAM queue": (len(tree._host_queue), 2 * SLOTS + 64),
        "SSD queue": (sum(len(shelf.queue) for shelf in shelves), 2 * FILES + 64),
        "reserved": (len(tree._reserved), 16 * 6),
        "ghosts": (len(tree._ghosts), REMEMBERED),
        "departures": (len(manager.departures._gone), REMEMBERED),
        "unsaved": (len(writes._unsaved), SLOTS),
        "saved": (len(writes._saved), SLOTS),
        "touched": (len(writes._touched), 512 + 6),
        "fetched": (len(manager._dram.fetched), SLOTS),
        "hints": (len(manager._hints), 16),
        "documents": (len(manager._forgetting._heads), 7),
    }


def check(manager: TierManager) -> None:
    assert {name: count for name, count in owed(manager).items() if count} == {}
    for name, (count, most) in kept(manager).items():
        assert count <= most, name
    assert manager.check(fix=True).memory == []  # the store has lost files
    assert manager.check().ok


def resident() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


def soak(kit, requests: int, **settings) -> None:
    manager = kit.manager(
        slots=SLOTS,
        ssd_chunks=FILES,
        io=IoPool,
        **settings,
    )
    manager.departures._capacity = REMEMBERED
    work = Soak(manager, seed=requests)
    work.run(requests // 2)
    work.settle()
    check(manager)
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    before = resident()
    work.run(requests // 2)
    work.settle()
    check(manager)
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == files
    assert resident() - before < 8 * 2**20
    stats = manager.snapshot()
    assert stats.requests == requests
    assert stats.dram_hit_tokens
    assert stats.ssd_hit_tokens
    assert stats.forgotten
    assert stats.missing >= requests // 100


@pytest.fixture(autouse=True)
def short_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pcr_core.tiers.assembly._REMEMBERED", REMEMBERED)


def test_a_thousand_requests(kit) -> None:
    soak(kit, 1000)


@pytest.mark.stress
@pytest.mark.parametrize(
    ("eviction", "writes", "stop"),
    [
        ("lookahead-lru", "write_through", "best_effort"),
        ("adaptive", "on_evict", "wait_complete"),
        ("pgdsf", "second_touch", "timeout"),
        ("lru", "write_through", "off"),
    ],
)
def test_ten_thousand_requests(kit, eviction, writes, stop) -> None:
    soak(
        kit,
        10_000,
        eviction=eviction,
        write_policy=WRITE_POLICIES[writes](),
        stop=stop_policy(stop, 0.05),
    )
