"""What a request reads and what it computes, on a disk and a model of declared speed.

The manager, its planner and its estimates are the real ones; only the clock is not.
"""

from __future__ import annotations

import math
from functools import cache

import pytest

from pcr_core.errors import ChunkLostError
from pcr_core.index.chunk import ChunkLayout, LayerShape, Namespace, chunk_keys
from pcr_core.model.prefill_plan import (
    Cuts,
    Segment,
    front_chunk,
    grid,
    next_segment,
    shape_independent,
)
from pcr_core.tiers import (
    HostPool,
    InlineIo,
    Lease,
    SlabPlan,
    StopPolicy,
    TierManager,
    TierSettings,
    stop_policy,
)
from pcr_core.tiers.store.chunk_file import ChunkFormat
from tests.tiers.conftest import LAYOUT, content
from tests.tiers.memory_store import MemoryStore
from tests.tiers.test_load_plan import CHUNK, RUNS, Machine, alone, machines
from tests.tiers.virtual import VirtualIo, VirtualTime
from tests.tiers.world import CHUNK_SECONDS, World, question

LAYERS = 4
SMALL = ChunkLayout((LayerShape(1, 1, 1),) * LAYERS, CHUNK, "F32", 4)
SPACE = Namespace.of([("test", b"loading")])
ANYWHERE = shape_independent()
TAIL = 20


class Bench:
    """A prompt whose last chunks are on a virtual disk, the others in DRAM.

    Args:
        machine: How fast disk and model are.
        run: The chunks that are on SSD.
        believed: How fast they were when they were measured.
    """

    def __init__(
        self,
        machine: Machine,
        run: range,
        *,
        believed: Machine | None = None,
        stop: StopPolicy | None = None,
        cuts: Cuts = ANYWHERE,
    ) -> None:
        self.machine, self.run, self.cuts = machine, run, cuts
        self.tokens = [
            *(token for chunk in range(run.stop) for token in [chunk + 5] * CHUNK),
            *([1] * TAIL),
        ]
        self.keys = chunk_keys(SPACE, self.tokens, CHUNK)
        self.time = VirtualTime()
        self.store = MemoryStore(10**9)
        self._serve(self._manager(InlineIo(self.store)), run.stop)
        size = SMALL.nbytes / machine.read
        self.io = VirtualIo(
            self.store, self.time, bandwidth=size, readers=machine.readers
        )
        settings = TierSettings(
            stop=stop or StopPolicy(), longest_forward=self.cuts.step
        )
        self.manager = self._manager(self.io, settings)
        self._serve(self.manager, run.start)
        self._train(believed or machine)
        self.restarts = 0
        self.time.now = 0.0
        self.io.start_afresh()

    def _manager(self, io, settings=None) -> TierManager:
        pool = HostPool(SMALL, SlabPlan(2 * self.run.stop + 2, SMALL.nbytes))
        return TierManager(
            SMALL, SPACE, pool, self.store, io, settings, timer=self.time
        )

    def _serve(self, manager: TierManager, chunks: int) -> None:
        keys, tokens = self.keys[:chunks], self.tokens[: chunks * CHUNK]
        with manager.lease(keys, tokens, chunks) as lease:
            lease.wait()
            for index, slot in lease.sinks.items():
                slot.view[:] = self._content(index)
                lease.filled(index)
        assert manager.flush()

    def _train(self, machine: Machine) -> None:
        """Let the manager have seen what ``machine`` can do."""
        planner = machine.planner(self.cuts)
        size = ChunkFormat(SMALL, SPACE).file_nbytes
        reads = self.manager._reads.times
        parallel = machine.readers
        for _ in range(100):
            reads.observe(size, parallel * machine.read, parallel=parallel)
        vars(self.manager.prefill_times).update(vars(planner.prefill))

    @cache  # noqa: B019 - it lives as long as a test
    def _content(self, index: int) -> bytes:
        return (self.keys[index] * (SMALL.nbytes // 32 + 1))[: SMALL.nbytes]

    def prefill(self, *, give_up_at: int | None = None) -> float:
        """Prefill as the runner does; returns seconds. Checks every byte lent."""
        begun, position = self.time.now, 0
        usable = len(self.keys)
        with self.manager.lease(self.keys, self.tokens, usable) as lease:
            while position < len(self.tokens) and position != give_up_at:
                while (
                    front := front_chunk(position, CHUNK, lease.sources)
                ) in lease.pending:
                    lease.settle(front)
                    assert front not in lease.pending
                segment = next_segment(
                    position,
                    len(self.tokens),
                    CHUNK,
                    lease.sources,
                    lease.pending,
                    self.cuts,
                )
                try:
                    self.forward(lease, segment)
                except ChunkLostError as error:
                    lost = error.index
                    lease.lost(lost)
                    assert lost not in lease.sources
                    self.restarts += 1
                    continue
                for index in segment.stores:
                    if index in lease.sinks:
                        lease.sinks[index].view[:] = self._content(index)
                        lease.filled(index)
                position = segment.stop
            self.tiers = dict(lease.tiers)
        assert self.manager.check_memory() == []
        return self.time.now - begun

    def forward(self, lease: Lease, segment: Segment) -> None:
        """Layer by layer: wait for what it reads, look at it, let the time go by."""
        new = segment.stop - segment.start
        seconds = self.machine.forward(segment.start, new)
        for layer in range(LAYERS):
            for index in segment.loads:
                if index in lease.arriving:
                    lease.arriving[index].wait(layer)
                start, end = SMALL.layer_offsets[layer : layer + 2]
                found = bytes(lease.sources[index].view[start:end])
                assert found == self._content(index)[start:end]
            self.time.now += seconds / LAYERS
        self.manager.prefill_times.observe(segment.start, new, seconds)

    def forget_dram(self) -> None:
        """Have the run on SSD only again."""
        for node in self.manager._tree.match(self.keys[self.run.start :])[::-1]:
            if node is not None and node.key in self.manager._dram.slots:
                self.manager._dram.evict(node)

    def states(self) -> list[str]:
        self.io.close()
        self.manager.poll()
        return self.manager.match(self.keys)

    @property
    def seconds(self) -> tuple[float, float]:
        """Of loading the whole run and of computing it, and the tail after either."""
        return alone(self.machine, self.run, len(self.tokens), self.cuts)


# --- two-ended fill ---


@pytest.mark.parametrize("cuts", [ANYWHERE, grid(CHUNK)], ids=lambda c: c.name)
def test_never_worse_than_either(cuts: Cuts) -> None:
    """For slow and fast disks, models and runs: within 5 % of the better of the two."""
    for machine in machines():
        for run in RUNS:
            bench = Bench(machine, run, cuts=cuts)
            for _ in range(3):  # what is guessed wrong is measured then
                bench.forget_dram()
                spent = bench.prefill()
            assert spent <= 1.05 * min(bench.seconds), (machine, run)
            assert set(bench.states()) == {"dram"}


@pytest.mark.parametrize("readers", [1, 2])
@pytest.mark.parametrize("read", [1e-4, 1e-3, 4e-3])
@pytest.mark.parametrize("fixed", [1e-4, 0.03, 0.3])
def test_a_run_that_is_read_whole_is_computed_on_meanwhile(
    readers: int, read: float, fixed: float
) -> None:
    """For two forwards: one shorter than the read, one longer, one about as long."""
    for run in (range(20), range(3, 40), range(10, 80)):
        bench = Bench(Machine(fixed=fixed, read=read, readers=readers), run)
        loading = bench.machine.load(len(run))
        computing = bench.machine.forward(run.stop * CHUNK, TAIL)
        spent = bench.prefill()
        assert list(bench.tiers.values()).count("ssd") == len(run)
        assert spent <= max(loading, computing) + loading / LAYERS + 1e-9
        assert bench.restarts == 0


@pytest.mark.parametrize("readers", [1, 2])
@pytest.mark.parametrize(("slower", "most"), [(40, 1.4), (100, 2.0), (1000, 2.1)])
def test_a_convoy_that_is_slower_than_computing_is_left(
    readers: int, slower: int, most: float
) -> None:
    """The plan was made for another disk. It is noticed between two layers, or when
    the first has taken as long as computing would."""
    believed = Machine(readers=readers, read=0.003)
    true = Machine(readers=readers, read=0.003 * slower)
    bench = Bench(true, range(60), believed=believed)
    spent = bench.prefill()
    loaded, computed = bench.seconds
    assert loaded > 1.3 * computed
    assert bench.restarts == 1
    assert bench.manager.stats.recomputed == 60
    assert spent < most * computed


@pytest.mark.parametrize("readers", [1, 2])
@pytest.mark.parametrize("read", [0.04, 0.064, 0.1])
def test_both_at_once_where_they_are_of_a_speed(readers: int, read: float) -> None:
    for run in (range(20), range(3, 40), range(10, 80)):
        bench = Bench(Machine(read=read, readers=readers), run)
        both = bench.prefill()
        loaded, computed = bench.seconds
        assert both < 0.8 * min(loaded, computed)
        assert both < 1.25 / (1 / loaded + 1 / computed)
        read_indices = [i for i in run if bench.tiers.get(i) == "ssd"]
        assert read_indices == list(range(read_indices[0], run.stop))
        assert bench.manager.stats.recomputed == len(run) - len(read_indices)


def test_reads_come_from_the_back_to_meet_the_front() -> None:
    bench = Bench(Machine(readers=1), range(4, 30))
    bench.prefill()
    indices = [bench.keys.index(key) for key in bench.io.order]
    assert indices == list(range(29, 29 - len(indices), -1))
    assert 8 < len(indices) < 26


@pytest.mark.parametrize("slower", [4, 20])
def test_what_is_slower_than_it_was_is_noticed_after_each_read(slower: int) -> None:
    """The plan was made for another disk: the front goes on where reads are late."""
    believed, true = Machine(readers=1), Machine(readers=1, read=slower * 0.064)
    bench = Bench(true, range(60), believed=believed)
    spent = bench.prefill()
    loaded, computed = bench.seconds
    assert loaded > 2 * computed
    assert spent < 1.3 * computed


def test_a_read_that_has_begun_is_not_compared_with_computing() -> None:
    bench = Bench(Machine(readers=1, read=0.05), range(2))
    bench.manager.look_ahead([_Wanted(bench)])
    assert bench.io.order == [bench.keys[0]]
    bench.time.now += 0.04
    computing = bench.machine.forward(CHUNK, CHUNK + TAIL)
    assert bench.prefill() == pytest.approx(0.01 + computing)
    assert bench.tiers[0] == "ssd"


@pytest.mark.parametrize("readers", [1, 2])
@pytest.mark.parametrize("run", [range(20), range(5, 30)])
def test_what_is_read_ahead_and_comes_too_late_is_computed(
    readers: int, run: range
) -> None:
    """All but what the readers have begun, though they go on while it is decided."""
    bench = Bench(Machine(readers=readers, read=5.0), run)
    bench.manager.look_ahead([_Wanted(bench)])
    spent = bench.prefill()
    loaded, computed = bench.seconds
    assert spent < readers * 5.0 + 1.1 * computed < loaded / 2
    assert len(bench.tiers) - run.start == readers
    assert bench.manager.stats.recomputed == len(run) - readers


class _Wanted:
    def __init__(self, bench: Bench) -> None:
        self.keys, self.tokens = bench.keys, bench.tokens
        self.usable = len(bench.keys)


# --- when reads fail, or nobody wants them any more ---


@pytest.mark.parametrize("lost", [{0, 1, 2}, {5}, {17, 18, 19}, set(range(20))])
def test_reads_that_fail_are_computed(lost: set[int]) -> None:
    bench = Bench(Machine(), range(20), stop=StopPolicy(recompute=False))
    bench.store.unreadable = {bench.keys[index] for index in lost}
    spent = bench.prefill()
    assert bench.tiers == dict.fromkeys(set(range(20)) - lost, "ssd")
    assert bench.manager.stats.read_errors == len(lost)
    assert spent <= sum(bench.seconds) + len(lost) * bench.machine.fixed
    assert set(bench.states()) == {"dram"}


@pytest.mark.parametrize("chunks", [0, 3, 12])
def test_a_request_that_ends_early_leaves_nothing_behind(chunks: int) -> None:
    bench = Bench(Machine(), range(20))
    bench.prefill(give_up_at=chunks * CHUNK)
    assert len(bench.manager._reads._readings) <= bench.machine.readers
    bench.states()
    assert len(bench.manager._reads._readings) == 0
    assert bench.manager.check_memory() == []
    assert bench.prefill() <= 1.05 * min(bench.seconds)


def test_a_lease_that_has_ended_has_nothing_to_wait_for(kit) -> None:
    request = question(1, 2, 3)
    world = World(kit, [request])
    lease = world.manager.lease(request.keys, request.tokens, 3)
    lease.close()
    assert not lease.pending
    lease.wait()
    lease.close()
    assert world.manager.check().ok


# --- stop policies ---


def test_wait_complete_waits_although_computing_is_faster() -> None:
    bench = Bench(Machine(read=5.0), range(20), stop=stop_policy("wait_complete", 1.0))
    tail = bench.machine.forward(20 * CHUNK, TAIL)
    assert bench.prefill() == pytest.approx(bench.machine.load(20) + tail / LAYERS)
    assert bench.tiers == dict.fromkeys(range(20), "ssd")


@pytest.mark.parametrize("name", ["best_effort", "off"])
def test_best_effort_computes_where_that_is_faster(name: str) -> None:
    bench = Bench(Machine(read=5.0), range(20), stop=stop_policy(name, 1.0))
    written = bench.manager.stats.written
    assert bench.prefill() == pytest.approx(bench.seconds[1])
    assert bench.tiers == {}
    assert bench.manager.stats.recomputed == 20
    assert bench.manager.snapshot().ssd_chunks == 20  # still there,
    assert bench.manager.stats.written == written  # and not written again


def test_timeout_waits_for_so_long_and_computes_the_rest(kit) -> None:
    request = question(1, 2, 3, 4, 5)
    world = World(kit, [request], stop=stop_policy("timeout", 2.5))
    found = world.run(request)
    assert found.exposed == pytest.approx(2.5)
    assert found.tiers == {0: "ssd", 1: "ssd"}
    assert world.manager.stats.read_timeouts == 3
    # The read that had begun keeps its slot and ends for nobody.
    assert world.in_dram(request) == [True, True, False, True, True]
    world.time.now += 10
    assert world.in_dram(request) == [True] * 5
    assert world.manager.check().ok


def test_after_the_timeout_what_arrives_in_time_is_used_all_the_same(kit) -> None:
    request = question(1, 2, 3, 4)
    world = World(kit, [request], stop=stop_policy("timeout", 1.5))
    with world.manager.lease(request.keys, request.tokens, 4) as lease:
        lease.settle(0)
        lease.settle(1)
        assert world.time.now == pytest.approx(1.5)
        assert dict(lease.tiers) == {0: "ssd"}
        world.time.now += 1.6  # while chunk 1 is computed, chunk 2 is read
        lease.settle(2)
        lease.settle(3)
        assert world.time.now == pytest.approx(3.1)
        assert dict(lease.tiers) == {0: "ssd", 2: "ssd"}


def test_off_protects_but_reads_nothing_ahead(kit) -> None:
    request = question(1, 2, 3)
    world = World(kit, [request], slots=6, stop=stop_policy("off", 1.0))
    world.look(request)
    world.time.now += 10
    assert world.manager.snapshot().read == 0
    assert world.run(request).exposed == pytest.approx(3 * CHUNK_SECONDS)
    for number in range(20, 40, 2):
        world.look(request)
        world.run(question(number, number + 1))
    assert world.in_dram(request) == [True] * 3


def test_a_disk_that_hangs_costs_a_request_one_wait_only(kit) -> None:
    request = question(*range(1, 21))
    world = World(kit, [request], stop=stop_policy("wait_complete", 1.0))
    world.io.latency = 1e6
    world.look(request)
    found = world.run(request)
    assert found.tiers == {}
    assert found.exposed == pytest.approx(60.0)
    assert world.manager.stats.read_timeouts == 20
    assert world.in_dram(request) == [False] + [True] * 19
    world.io.latency = 0.0
    world.time.now += 1e7
    assert world.in_dram(request)[0]
    assert world.manager.check().ok


def test_a_convoy_that_hangs_costs_a_request_one_wait_only(kit) -> None:
    request = question(*range(1, 21))
    world = World(kit, [request], stop=stop_policy("wait_complete", 1.0))
    world.io.latency = 1e6
    found = world.run(request)
    assert found.tiers == {}
    assert found.exposed == pytest.approx(60.0)
    assert world.manager.stats.read_timeouts == 20
    # All reads have begun: they keep their slots, until they notice.
    assert world.in_dram(request) == [False] * 20
    assert world.manager.snapshot().dram_bytes == 20 * LAYOUT.nbytes
    world.io.latency = 0.0
    world.time.now += 1e8
    assert world.in_dram(request) == [False] * 20
    assert world.manager.snapshot().dram_bytes == 0
    assert world.manager.stats.read_errors == 0
    assert world.manager.check().ok
    assert world.run(request).tiers == dict.fromkeys(range(20), "ssd")


def test_a_slow_disk_is_not_a_hanging_one(kit) -> None:
    """It is the time without any progress that counts, not the whole."""
    request = question(*range(1, 21))
    world = World(kit, [request], stop=stop_policy("timeout", 1e9))
    world.io.latency = 59.0
    with world.manager.lease(request.keys, request.tokens, 20) as lease:
        lease.settle(19)
        assert set(lease.sources) == set(range(20))
    assert world.time.now == pytest.approx(20 * 60.0)


def test_nor_is_a_slow_convoy(kit) -> None:
    request = question(*range(1, 21))
    world = World(kit, [request], stop=stop_policy("wait_complete", 1.0))
    world.io.latency = 4.9
    with world.manager.lease(request.keys, request.tokens, 20) as lease:
        lease.wait()
        assert set(lease.sources) == set(range(20))
    assert world.time.now == pytest.approx(20 * 5.9)
    assert world.time.now / len(LAYOUT.layers) == pytest.approx(59.0)


def test_a_wait_is_shared_by_nobody(kit) -> None:
    """Two requests in turn, each with its own patience."""
    one, two = question(1, 2, 3), question(4, 5, 6)
    world = World(kit, [one, two], stop=stop_policy("timeout", 1.5))
    assert world.run(one).exposed == pytest.approx(1.5)
    assert world.run(two).exposed == pytest.approx(1.5)
    assert math.isinf(StopPolicy().patience)


def test_every_byte_that_is_lent_is_right(kit) -> None:
    request = question(1, 2, 3)
    world = World(kit, [request], stop=stop_policy("timeout", 1e9))
    with world.manager.lease(request.keys, request.tokens, 3) as lease:
        assert not lease.sources
        assert set(lease.pending) == {0, 1, 2}
        lease.settle(1)
        assert {0, 1} <= set(lease.sources)
        for index, slot in lease.sources.items():
            assert bytes(slot.view) == content(request.keys[index])
            assert len(slot.view) == LAYOUT.nbytes
