"""A request's work depends on the request, not on how much is cached.

Counted, not timed: bytecodes, and the memory that a request takes for a moment, which
shows the copies of large collections that bytecodes do not.
"""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import pytest

from pcr_core.tiers import HostPool, InlineIo, SlabPlan, TierManager, TierSettings
from pcr_core.tiers.store.chunk_index import Record
from pcr_core.tiers.write_policy import WRITE_POLICIES
from tests.tiers.conftest import (
    FILE_BYTES,
    LAYOUT,
    NAMESPACE,
    Clock,
    content,
    keys_of,
    prompt,
)
from tests.tiers.memory_store import MemoryFolder, MemoryStore
from tests.tiers.world import Waiting, question

SMALL, LARGE = 300, 2400
LENGTH = 6
"""Chunks of each prompt."""


def bytecodes(work: Callable[[], None]) -> int:
    """How many bytecodes of the library ``work`` executes."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        if "pcr_core" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def momentary_bytes(work: Callable[[], None]) -> float:
    """How much more memory than before ``work`` takes at its worst moment: the median.

    A hash table that grows, or a heap that is tidied up, takes much now and then.
    """
    peaks = []
    tracemalloc.start()
    try:
        for _ in range(20):
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            work()
            peaks.append(tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()
    return median(peaks)


@dataclass
class House:
    """A manager whose tiers are full, and a stream of requests that never ends."""

    manager: TierManager
    store: MemoryStore
    number: int = 0
    queue: list[Waiting] = field(default_factory=list)

    @classmethod
    def of(cls, chunks: int, kit, **settings) -> House:
        store = MemoryStore(chunks * FILE_BYTES, MemoryFolder())
        for number in range(chunks):
            tokens = prompt(10**6 + number)
            record = Record(NAMESPACE.root, FILE_BYTES, 1 + number, b"", b"")
            data = content(keys_of(tokens)[0])
            store.folder.put(keys_of(tokens)[0], record, data, [NAMESPACE.root])
        manager = TierManager(
            LAYOUT,
            NAMESPACE,
            HostPool(LAYOUT, SlabPlan(chunks, LAYOUT.nbytes)),
            store,
            InlineIo(store),
            TierSettings(**settings),
            clock=Clock(10**6),
        )
        house = cls(manager, store)
        while not house.is_full(chunks):
            house.serve(house.fresh())
        return house

    def is_full(self, chunks: int) -> bool:
        return self.manager.stats.dram_evictions > 0

    def fresh(self) -> Waiting:
        """A prompt that shares its first chunk with the others."""
        self.number += 1
        first = 1000 + self.number * LENGTH
        return question(1, *range(first, first + LENGTH - 1))

    def serve(self, request: Waiting) -> None:
        self.manager.catch_up()
        self.manager.register({b"d" * 16: request.keys[0]})
        with self.manager.lease(request.keys, request.tokens, request.usable) as lease:
            lease.wait()
            for index, slot in lease.sinks.items():
                slot.view[:] = content(request.keys[index])
                lease.filled(index)

    def step(self) -> None:
        """One request as the engine serves it, while others wait."""
        while len(self.queue) < 4:
            self.queue.append(self.fresh())
        self.manager.look_ahead(self.queue)
        self.manager.match(self.queue[-1].keys)
        self.serve(self.queue.pop(0))
        self.manager.poll()
        self.manager.snapshot()
        self.manager.decisions(8192)
        self.manager.prepare()

    def a_while(self) -> None:
        for _ in range(20):
            self.step()


SETTINGS = [
    {"eviction": "lookahead-lru", "write_policy": "write_through"},
    {"eviction": "lookahead-lru", "write_policy": "second_touch"},
    {"eviction": "lookahead-lru", "write_policy": "on_evict"},
    {"eviction": "lru", "write_policy": "write_through"},
    {"eviction": "pgdsf", "write_policy": "on_evict"},
    {"eviction": "adaptive", "write_policy": "second_touch"},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(s.values()))
def test_work_does_not_grow_with_what_is_cached(kit, settings):
    codes, moments = [], []
    for chunks in (SMALL, LARGE):
        policy = WRITE_POLICIES[settings["write_policy"]]()
        house = House.of(chunks, kit, **{**settings, "write_policy": policy})
        house.a_while()
        house.store.calls.clear()
        codes.append(bytecodes(house.a_while))
        moments.append(momentary_bytes(house.step))
        assert house.store.calls["contents"] == 0
        assert house.manager.check_memory() == []
        house.manager.close()
    assert codes[1] < 1.1 * codes[0]
    assert moments[1] < moments[0] + 8 * SMALL


def test_the_count_sees_loops_and_copies():
    """The two measures themselves: each is blind to what the other sees."""
    large = list(range(LARGE))
    assert momentary_bytes(lambda: list(large)) > 8 * LARGE
    # Only what runs in the library is counted.
    assert bytecodes(lambda: sum(one for one in large)) == 0
    assert bytecodes(lambda: keys_of(prompt(*range(40)))) > 5 * bytecodes(
        lambda: keys_of(prompt(1))
    )
