"""Leases of requests whose first tokens the device holds already."""

from __future__ import annotations

from typing import Any

import pytest

from tests.tiers.conftest import LAYOUT, content, keys_of, prompt
from tests.tiers.stepwise import StepIo
from tests.tiers.world import Waiting, question

SIZE = LAYOUT.chunk_tokens


def fill(lease: Any) -> None:
    """What a forward does: chunks in the row are copied out, others computed."""
    for index, slot in lease.sinks.items():
        slot.view[:] = content(lease.keys[index])
        lease.filled(index)


def test_what_the_device_holds_is_not_lent_but_counts_as_used(kit: Any) -> None:
    manager = kit.manager(ssd_chunks=0)
    tokens = [*prompt(1, 2, 3), 9]
    kit.serve(manager, tokens)
    keys = keys_of(tokens)
    with manager.lease(keys, tokens, 3, 2 * SIZE + 1) as lease:
        assert lease.covered == 2
        assert set(lease.sources) == {2}, "it is on the device in part only"
        assert not lease.sinks
        assert manager.check_memory() == []
    uses = [node.uses for node in manager._tree.match(keys)]
    assert uses == [2, 2, 2]
    assert [node.misses for node in manager._tree.match(keys)] == [1, 1, 1]
    stats = manager.snapshot()
    assert (stats.device_hit_tokens, stats.dram_hit_tokens) == (2 * SIZE, SIZE)
    assert (stats.miss_tokens, stats.holes) == (len(tokens) + 1, 0)
    assert stats.hit_rate == 3 * SIZE / (2 * len(tokens))
    assert "8 device, 4 DRAM, 0 SSD" in str(stats)


def test_what_was_really_reused_counts_if_somebody_says_so(kit: Any) -> None:
    manager = kit.manager(ssd_chunks=0)
    tokens = prompt(1, 2, 3)
    kit.serve(manager, [*tokens, 9])
    with manager.lease(keys_of(tokens), tokens, 3, SIZE) as lease:
        lease.reused = {"device": SIZE, "dram": SIZE + 3}
    stats = manager.snapshot()
    assert (stats.device_hit_tokens, stats.dram_hit_tokens) == (SIZE, SIZE + 3)
    assert stats.miss_tokens == len(tokens) + 1 + SIZE - 3


def test_a_chunk_that_dram_has_lost_is_to_be_copied_out(kit: Any) -> None:
    manager = kit.manager(ssd_chunks=0)
    tokens = [*prompt(1, 2, 3), 9]
    kit.serve(manager, tokens)
    keys = keys_of(tokens)
    manager._dram.evict(manager._tree.match(keys)[1])
    with manager.lease(keys, tokens, 3, 3 * SIZE) as lease:
        assert not lease.sources
        assert set(lease.sinks) == {1}
        fill(lease)
    assert manager.match(keys) == ["dram"] * 3
    assert manager.snapshot().holes == 0
    assert kit.serve(manager, tokens).tiers == dict.fromkeys(range(3), "dram")


def test_a_chunk_that_is_on_ssd_only_is_not_read(kit: Any) -> None:
    manager = kit.manager(slots=2)
    tokens = [*prompt(1, 2), 9]
    kit.serve(manager, tokens)
    kit.serve(manager, [*prompt(3, 4), 9])
    keys = keys_of(tokens)
    assert manager.match(keys) == ["ssd", "ssd"]
    with manager.lease(keys, tokens, 2, SIZE) as lease:
        lease.wait()
        assert set(lease.sources) == {1}
        assert set(lease.sinks) == {0}
        fill(lease)
    assert manager.snapshot().read == 1
    assert manager.snapshot().written == 4, "it was not written again"
    assert manager.match(keys) == ["dram", "dram"]


@pytest.mark.parametrize("begun", [False, True])
def test_a_read_ahead_is_taken_back_unless_it_runs(kit: Any, begun: bool) -> None:
    made: list[StepIo] = []

    def io(store: Any) -> StepIo:
        made.append(StepIo(store))
        return made[-1]

    first = kit.manager(slots=4)
    asked = question(1, 2)
    kit.serve(first, asked.tokens)
    first.close()
    manager = kit.manager(slots=4, io=io)
    manager.look_ahead([asked])
    assert len(made[0].reads) == 2
    if begun:
        made[0].begin_read(0)
    tokens = asked.tokens
    with manager.lease(asked.keys, tokens, 2, 2 * SIZE) as lease:
        assert not lease.pending
        assert not lease.sources
        assert set(lease.sinks) == ({1} if begun else {0, 1})
        assert manager.snapshot().prefetch_cancelled == (1 if begun else 2)
        fill(lease)
        made[0].run_all()
    manager.poll()
    assert manager.match(asked.keys) == ["dram", "dram"]
    assert manager.check_memory() == []
    assert kit.serve(manager, tokens).tiers == {
        0: "ssd" if begun else "dram",
        1: "dram",
    }


def test_computing_is_not_expected_of_what_the_device_holds(kit: Any) -> None:
    """What lies before a run on SSD costs nothing: so all of the run is read."""
    manager = kit.manager(slots=8)
    asked = Waiting([*prompt(1, 2, 3, 4), 9])
    kit.serve(manager, asked.tokens)
    for node in reversed(manager._tree.match(asked.keys)[:4]):
        manager._dram.evict(node)
    manager.prefill_times.observe(0, SIZE, 1.0)
    manager._reads.times.observe(kit.file_nbytes, 0.4)
    with manager.lease(asked.keys, asked.tokens, 4, 2 * SIZE) as lease:
        lease.wait()
        assert set(lease.sources) == {2, 3}
    assert manager.snapshot().recomputed == 0


def test_more_on_the_device_than_may_be_stored(kit: Any) -> None:
    """A request that must not store a document it holds has fewer keys than chunks."""
    manager = kit.manager(ssd_chunks=0)
    tokens = [*prompt(1, 2, 3), 9]
    with manager.lease(keys_of(tokens)[:1], tokens, 1, 3 * SIZE) as lease:
        assert lease.covered == 1
        assert set(lease.sinks) == {0}
        fill(lease)
    assert manager.snapshot().device_hit_tokens == SIZE
