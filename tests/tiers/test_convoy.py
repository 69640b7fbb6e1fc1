"""Chunks that are computed on while they are read: time, loss, hanging, letting go.

The manager is the real one; I/O ends when the test or its virtual clock says so.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pcr_core.errors import CancelledError, ChunkLostError
from pcr_core.index.chunk import ChunkLayout, LayerShape, Namespace, chunk_keys
from pcr_core.index.node import Host
from pcr_core.tiers import (
    ChunkStore,
    HostPool,
    InlineIo,
    IoPool,
    Lease,
    SlabPlan,
    StopPolicy,
    TierManager,
    TierSettings,
    stop_policy,
)
from tests.tiers.conftest import FILE_BYTES, LAYOUT, content, keys_of, prompt
from tests.tiers.memory_store import MemoryStore
from tests.tiers.stepwise import StepIo
from tests.tiers.virtual import VirtualIo, VirtualTime
from tests.tiers.world import CHUNK_SECONDS, World, question

READ_ALL = StopPolicy(recompute=False)
LAYERS = len(LAYOUT.layers)
ENDS = LAYOUT.layer_offsets


def go_through(
    lease: Lease, between: Callable[[], None] = lambda: None, layers: int = LAYERS
) -> int:
    """Do what a forward does with all that is lent; returns how often it starts anew.

    Args:
        lease: Whose sources it reads, checking every byte.
        between: Called after each layer.
        layers: How many it goes through.
    """
    restarts = 0
    while True:
        try:
            for layer in range(layers):
                for index, slot in lease.sources.items():
                    if index in lease.arriving:
                        lease.arriving[index].wait(layer)
                    span = slice(ENDS[layer], ENDS[layer + 1])
                    assert bytes(slot.view[span]) == content(lease.keys[index])[span]
                between()
        except ChunkLostError as error:
            lease.lost(error.index)
            restarts += 1
            continue
        return restarts


# --- time ---


class Pipeline:
    """A prompt on a virtual disk, under a model of so many equal layers."""

    def __init__(self, layers: int, chunks: int, readers: int, read: float) -> None:
        layout = ChunkLayout((LayerShape(1, 1, 1),) * layers, 4, "F32", 4)
        space = Namespace.of([("test", b"pipeline")])
        self.tokens = [1] * (4 * chunks + 1)
        self.keys = chunk_keys(space, self.tokens, 4)
        self.time = VirtualTime()
        store = MemoryStore(10**9)
        size = layout.nbytes
        pools = [HostPool(layout, SlabPlan(chunks, size)) for _ in range(2)]
        first = TierManager(layout, space, pools[0], store, InlineIo(store))
        with first.lease(self.keys, self.tokens, 0) as lease:
            for index, slot in lease.sinks.items():
                slot.view[:] = bytes([index]) * size
                lease.filled(index)
        assert first.flush()
        io = VirtualIo(store, self.time, bandwidth=size / read, readers=readers)
        self.manager = TierManager(
            layout,
            space,
            pools[1],
            store,
            io,
            TierSettings(stop=READ_ALL),
            timer=self.time,
        )
        self.layers, self.chunks = layers, chunks

    def seconds(self, compute: float) -> float:
        """Of a forward whose layers take so long each."""
        usable = len(self.keys)
        with self.manager.lease(self.keys, self.tokens, usable) as lease:
            assert len(lease.arriving) == self.chunks
            for layer in range(self.layers):
                for arrival in lease.arriving.values():
                    arrival.wait(layer)
                self.time.now += compute
        assert self.manager.stats.read == self.chunks
        return self.time.now


@settings(max_examples=60, deadline=None)
@given(
    layers=st.integers(1, 12),
    chunks=st.integers(1, 12),
    readers=st.integers(1, 3),
    read=st.floats(0.01, 1.0),
    compute=st.floats(0.001, 1.0),
)
def test_reading_hides_computing_or_is_hidden_but_for_a_layer(
    layers, chunks, readers, read, compute
):
    pipeline = Pipeline(layers, chunks, readers, read)
    busiest = -(-chunks // readers)  # chunks of one reader, which has its part of disk
    one_layer = busiest * readers * read / layers
    whole, computing = layers * one_layer, layers * compute
    spent = pipeline.seconds(compute)
    assert spent <= max(whole, computing) + one_layer + 1e-6
    exactly = one_layer + (layers - 1) * max(one_layer, compute) + compute
    assert spent == pytest.approx(exactly)


def test_what_was_read_so_measures_the_disk(kit):
    request = question(1, 2, 3, 4)
    world = World(kit, [request], stop=READ_ALL)
    world.run(request)
    times = world.manager._reads.times
    file_seconds = CHUNK_SECONDS * FILE_BYTES / LAYOUT.nbytes
    assert times.seconds(4 * FILE_BYTES) == pytest.approx(4 * CHUNK_SECONDS)
    assert times.bandwidth == pytest.approx(
        LAYOUT.nbytes / CHUNK_SECONDS * file_seconds
    )


# --- which chunks ---


def test_all_that_the_first_forward_needs_comes_together(kit):
    """SSD, DRAM, SSD, nothing, SSD: the last is behind a hole, so it comes alone."""
    request = question(1, 2, 3, 4, 5, 6)
    world = World(kit, [request], stop=READ_ALL)
    world.run(question(1, 2, 3))
    for node in world.manager._tree.match(request.keys[:2]):
        world.manager._dram.evict(node)
    world.manager._store.folder.remove(request.keys[4])
    world.manager._catalogue.resync()
    with world.manager.lease(request.keys, request.tokens, 6) as lease:
        assert set(lease.arriving) == {0, 1, 3}
        assert set(lease.sources) == {0, 1, 2, 3}
        assert set(lease.pending) == {5}
        assert set(lease.sinks) == {4}
        assert go_through(lease) == 0
        lease.settle(5)
        assert dict(lease.tiers) == {
            0: "ssd",
            1: "ssd",
            2: "dram",
            3: "ssd",
            5: "ssd",
        }
    assert world.manager.check().ok


def test_of_reads_made_ahead_only_those_that_have_begun_come_whole(kit):
    request = question(1, 2, 3, 4, 5)
    world = World(kit, [request], stop=READ_ALL)
    world.look(question(1, 2, 3))
    with world.manager.lease(request.keys, request.tokens, 5) as lease:
        assert set(lease.pending) == {0}
        assert set(lease.arriving) == {1, 2, 3, 4}
        lease.settle(0)
        assert world.time.now == pytest.approx(CHUNK_SECONDS)
        lease.arriving[4].wait(0)
        assert world.time.now == pytest.approx(3 * CHUNK_SECONDS)
        assert go_through(lease) == 0
    assert world.manager.snapshot().prefetch_late == 3
    assert world.in_dram(request) == [True] * 5
    assert world.manager.snapshot().read == 5
    assert world.manager.check().ok


def test_whoever_waits_for_so_long_only_gets_chunk_after_chunk(kit):
    request = question(1, 2, 3)
    world = World(kit, [request], stop=stop_policy("timeout", 1.5))
    with world.manager.lease(request.keys, request.tokens, 3) as lease:
        assert not lease.arriving
        assert set(lease.pending) == {0, 1, 2}


def test_with_two_slots_for_three_chunks(kit):
    request = question(1, 2, 3)
    world = World(kit, [request], slots=2, stop=READ_ALL)
    with world.manager.lease(request.keys, request.tokens, 3) as lease:
        assert set(lease.sources) == set(lease.arriving) == {0, 1}
        assert not lease.sinks
        assert go_through(lease) == 0
    assert world.manager.snapshot().bypassed_inserts == 1
    assert world.manager.check().ok


def test_another_request_computes_what_arrives_for_one(kit):
    request = question(1, 2)
    world = World(kit, [request], stop=READ_ALL)
    with world.manager.lease(request.keys, request.tokens, 2) as one:
        with world.manager.lease(request.keys, request.tokens, 2) as two:
            assert not two.sources
            assert not two.pending
            assert not two.sinks
        assert go_through(one) == 0
    assert world.in_dram(request) == [True] * 2


@pytest.mark.parametrize("threads", [False, True])
def test_from_real_files(kit, threads):
    tokens = [*prompt(*range(1, 9)), 9]
    keys = keys_of(tokens)
    first = kit.manager(slots=16, ssd_chunks=16)
    kit.serve(first, tokens)
    first.close()
    io = IoPool if threads else InlineIo
    manager = kit.manager(slots=16, ssd_chunks=16, io=io, stop=READ_ALL)
    with manager.lease(keys, tokens, 8) as lease:
        assert set(lease.sources) == set(range(8))
        assert go_through(lease) == 0
        assert dict(lease.tiers) == dict.fromkeys(range(8), "ssd")
    stats = manager.snapshot()
    assert (stats.read, stats.ssd_hit_tokens) == (8, 8 * LAYOUT.chunk_tokens)
    assert manager.match(keys) == ["dram"] * 8
    assert manager.check().ok


# --- what is lost ---


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_layer_that_fails_costs_its_chunk_and_a_new_start(kit, layer):
    request = question(1, 2, 3, 4)
    world = World(kit, [request], stop=READ_ALL)
    store = world.manager._store
    store.damaged = {request.keys[1]: layer}
    begun = []
    with world.manager.lease(request.keys, request.tokens, 4) as lease:
        assert go_through(lease, lambda: begun.append(len(lease.sources))) == 1
        assert set(lease.sources) == {0, 2, 3}
        assert set(lease.sinks) == {1}
        assert dict(lease.tiers) == {0: "ssd", 2: "ssd", 3: "ssd"}
        lease.sinks[1].view[:] = content(request.keys[1])
        lease.filled(1)
    assert begun == [4] * layer + [3] * LAYERS
    assert world.manager.stats.read_errors == 1
    assert world.in_dram(request) == [True] * 4
    stats = world.manager.snapshot()
    assert (stats.ssd_hit_tokens, stats.holes) == (3 * LAYOUT.chunk_tokens, 1)
    assert world.manager.check().ok


def test_all_of_them_lost_one_after_the_other(kit):
    request = question(1, 2, 3, 4)
    world = World(kit, [request], stop=READ_ALL)
    world.manager._store.unreadable = set(request.keys)
    with world.manager.lease(request.keys, request.tokens, 4) as lease:
        assert go_through(lease) == 1  # the others are known to be lost by then
        assert set(lease.sinks) == {0, 1, 2, 3}
    assert world.manager.check().ok


def damage_file(folder, key, at: int) -> None:
    path = folder / "chunks" / f"{key.hex()}.safetensors"
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("layer", [-1, *range(LAYERS)])
def test_a_damaged_file_is_removed_and_written_again(kit, layer, threads):
    """The last byte of a layer, or of the header."""
    tokens = [*prompt(1, 2, 3), 9]
    keys = keys_of(tokens)
    first = kit.manager()
    kit.serve(first, tokens)
    first.close()
    damage_file(kit.folder, keys[1], kit.format.header_nbytes + ENDS[layer + 1] - 1)
    io = IoPool if threads else InlineIo
    manager = kit.manager(io=io, stop=READ_ALL)
    with manager.lease(keys, tokens, 3) as lease:
        assert go_through(lease) <= 1
        assert set(lease.sources) == {0, 2}
        lease.sinks[1].view[:] = content(keys[1])
        lease.filled(1)
    assert manager.flush(60)
    assert manager.snapshot().corrupt == 1
    assert manager.snapshot().written == 1
    assert manager.check().ok


@pytest.mark.parametrize("call", ["open_read", "preadv"])
def test_a_disk_that_refuses(kit, call):
    tokens = [*prompt(1, 2, 3), 9]
    first = kit.manager()
    kit.serve(first, tokens)
    first.close()
    files = kit.FaultyFiles()
    manager = kit.manager(files=files, io=IoPool, stop=READ_ALL)
    files.broken[call] = errno.EIO
    assert kit.serve(manager, tokens).tiers == {}
    files.broken.clear()
    assert manager.snapshot().read_errors == 3
    assert manager.check().ok


# --- what hangs, or is slow ---


class Stepped:
    """A manager whose I/O goes on when the test says so, over chunks on SSD."""

    def __init__(self, kit, *chunks: int, stop: StopPolicy = READ_ALL) -> None:
        self.request = question(*chunks)
        store = MemoryStore(64 * FILE_BYTES)
        kit.serve(kit.manager(slots=16, store=store), self.request.tokens)
        self.time = VirtualTime()
        made: list[StepIo] = []

        def io(store):
            made.append(StepIo(store, self.time))
            return made[-1]

        self.manager = kit.manager(
            slots=16, store=store, io=io, timer=self.time, stop=stop
        )
        self.store = store
        self.io = made[0]

    def lease(self) -> Lease:
        request = self.request
        return self.manager.lease(request.keys, request.tokens, request.usable)

    def states(self) -> list[str]:
        return self.manager.match(self.request.keys)

    def hosts(self) -> list[Host]:
        return [node.host for node in self.manager._tree.match(self.request.keys)]


def test_a_hang_takes_all_that_is_not_there(kit):
    """One leg is there, the other hangs in its first layer."""
    stepped = Stepped(kit, 1, 2, 3, 4)
    lease = stepped.lease()
    stepped.io.begin_read()
    stepped.io.begin_read()
    for _ in range(LAYERS):
        stepped.io.step_read(0)
    stepped.io.hanging = True
    assert go_through(lease) == 1
    assert stepped.time.now == pytest.approx(60.0, abs=0.2)
    assert set(lease.sources) == {0, 2}
    assert not lease.arriving
    assert not lease.sinks, "the slots stay with the reads"
    assert stepped.manager.stats.read_timeouts == 2
    lease.close()
    assert stepped.states() == ["dram", "ssd", "dram", "ssd"]
    assert stepped.hosts()[1::2] == [Host.FILLING] * 2
    stepped.io.hanging = False
    stepped.io.run_reads()
    assert stepped.states() == ["dram", "ssd", "dram", "ssd"]
    assert stepped.manager.check().ok
    assert stepped.hosts()[1::2] == [Host.NONE] * 2
    assert stepped.manager.stats.read_errors == 0


def test_what_has_not_begun_when_it_hangs_is_computed_and_kept(kit):
    stepped = Stepped(kit, 1, 2)
    lease = stepped.lease()
    stepped.io.hanging = True
    assert go_through(lease) == 1
    assert set(lease.sinks) == {0, 1}
    assert not stepped.io.reads
    for index, slot in lease.sinks.items():
        slot.view[:] = content(lease.keys[index])
        lease.filled(index)
    lease.close()
    assert stepped.states() == ["dram", "dram"]
    assert stepped.manager.check().ok


def test_progress_anywhere_in_the_convoy_is_progress(kit):
    """A chunk that comes late does not hang while the others come forward."""
    stepped = Stepped(kit, *range(1, 7))
    lease = stepped.lease()
    stepped.io.begin_read()
    stepped.io.begin_read()
    arrival, io = lease.arriving[1], stepped.io
    io.hanging, looks = True, 0

    def look():
        nonlocal looks
        looks += 1
        if looks == 400:  # after fifty seconds
            io.step_read(0)
        if looks == 800:
            io.hanging = False

    lease.checkpoint = look
    arrival.wait(0)
    assert looks == 800
    assert stepped.time.now > 100.0
    lease.close()


def test_after_a_pending_read_has_hung_nothing_else_is_waited_for(kit):
    stepped = Stepped(kit, 1, 2, 3, 4)
    stepped.manager.look_ahead([question(1)])
    stepped.io.begin_read()
    lease = stepped.lease()
    assert set(lease.pending) == {0}
    stepped.io.hanging = True
    lease.settle(0)
    before = stepped.time.now
    assert go_through(lease) == 1
    assert stepped.time.now == before
    assert set(lease.sinks) == {1, 2, 3}
    lease.close()
    assert stepped.manager.check().ok


def test_what_comes_after_it_was_given_up_is_not_lent_again(kit):
    stepped = Stepped(kit, 1, 2)
    lease = stepped.lease()
    stepped.io.begin_read()
    stepped.io.hanging = True
    with pytest.raises(ChunkLostError, match="hangs"):
        lease.arriving[0].wait(0)
    stepped.io.hanging = False
    for _ in range(LAYERS):
        stepped.io.step_read()
    lease.lost(0)
    assert set(lease.sources) == {1}
    assert not lease.sinks
    lease.lost(0)  # no matter
    lease.close()
    assert stepped.states()[0] == "dram"
    assert stepped.manager.check().ok


def test_a_disk_that_has_become_slow_is_left(kit):
    """What computing would take is known, and the read takes ten times that."""
    request = question(*range(1, 9))
    world = World(kit, [request])
    tokens = len(request.tokens)
    for _ in range(8):
        world.manager.prefill_times.observe(0, tokens, 4 * CHUNK_SECONDS)
        world.manager._reads.times.observe(FILE_BYTES, 0.01 * CHUNK_SECONDS)
    world.io.bandwidth /= 5  # forty seconds instead of a tenth of one
    with world.manager.lease(request.keys, request.tokens, 8) as lease:
        assert len(lease.arriving) == 8
        assert go_through(lease) == 1
        assert world.time.now < 1.5 * 4 * CHUNK_SECONDS
        assert not lease.sources
    assert world.manager.stats.recomputed == 8
    assert world.manager.stats.read_timeouts == 0
    world.time.now += 1000
    assert world.in_dram(request) == [False] * 8
    assert world.manager.check().ok


def test_a_disk_that_is_slow_but_faster_than_computing_is_not_left(kit):
    request = question(*range(1, 9))
    world = World(kit, [request])
    for _ in range(8):
        world.manager.prefill_times.observe(0, len(request.tokens), 100 * CHUNK_SECONDS)
        world.manager._reads.times.observe(FILE_BYTES, 0.01 * CHUNK_SECONDS)
    with world.manager.lease(request.keys, request.tokens, 8) as lease:
        assert go_through(lease) == 0
        assert len(lease.sources) == 8
    assert world.time.now == pytest.approx(8 * CHUNK_SECONDS)


# --- letting go ---


@pytest.mark.parametrize("steps", range(LAYERS + 1))
def test_a_request_that_is_cancelled_in_a_forward(kit, steps):
    stepped = Stepped(kit, 1, 2, 3, 4)
    lease = stepped.lease()
    stepped.io.begin_read()
    for _ in range(steps):
        stepped.io.step_read()
    stepped.io.hanging = True

    def cancelled():
        raise CancelledError("nobody waits any more")

    lease.checkpoint = cancelled
    with lease, pytest.raises(CancelledError):
        go_through(lease)
    there = ["dram", "ssd"] if steps == LAYERS else ["ssd", "ssd"]
    assert stepped.states() == there * 2
    # What has not begun was taken back; the slots of the rest stay with it.
    assert not stepped.io.reads
    filling = Host.READY if steps == LAYERS else Host.FILLING
    assert stepped.hosts() == [filling, Host.NONE] * 2
    found = 2 if steps == LAYERS else 0
    stats = stepped.manager.snapshot()
    assert stats.ssd_hit_tokens == found * LAYOUT.chunk_tokens
    stepped.io.hanging = False
    stepped.io.run_reads()
    stepped.manager.poll()
    assert stepped.states() == there * 2
    assert Host.FILLING not in stepped.hosts()
    # What was read until then has been learnt from.
    assert stepped.manager._reads.times.ready == (steps > 0)
    assert stepped.manager.check().ok
    with stepped.lease() as again:
        assert go_through(again) == 0
        assert len(again.sources) == 4


def test_whoever_asks_again_joins_what_is_left(kit):
    """The first was cancelled and its reads have not noticed yet."""
    stepped = Stepped(kit, 1, 2)
    lease = stepped.lease()
    stepped.io.begin_read()
    stepped.io.begin_read()
    lease.close()
    with stepped.lease() as again:
        assert set(again.pending) == {0, 1}
        again.wait()
        assert set(again.sinks) == {0, 1}
    assert stepped.manager.stats.read_errors == 0
    assert stepped.manager.check().ok


def test_closing_while_chunks_arrive(kit):
    tokens = [*prompt(*range(1, 9)), 9]
    first = kit.manager(slots=16, ssd_chunks=16)
    kit.serve(first, tokens)
    first.close()
    manager = kit.manager(slots=16, ssd_chunks=16, io=IoPool, stop=READ_ALL)
    lease = manager.lease(keys_of(tokens), tokens, 8)
    manager.close()
    lease.close()


def test_a_source_that_is_not_there_cannot_be_lost(kit):
    request = question(1)
    world = World(kit, [request], stop=READ_ALL)
    with world.manager.lease(request.keys, request.tokens, 1) as lease:
        lease.lost(5)
        assert set(lease.sources) == {0}
        lease.wait()
        assert not lease.arriving
        assert set(lease.sources) == {0}


def test_chunks_are_read_by_layer_from_a_store_with_many_files(kit, tmp_path):
    """The descriptors of a long prompt are not all open at a time."""
    tokens = [*prompt(*range(1, 41)), 9]
    first = kit.manager(slots=64, ssd_chunks=64)
    kit.serve(first, tokens)
    first.close()
    manager = kit.manager(slots=64, ssd_chunks=64, stop=READ_ALL)
    assert isinstance(manager._store, ChunkStore)
    before = len(os.listdir("/proc/self/fd"))
    assert len(kit.serve(manager, tokens).tiers) == 40
    assert len(os.listdir("/proc/self/fd")) == before
