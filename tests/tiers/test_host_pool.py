"""The DRAM pool: slots, views, slabs, budget, and where its memory goes at the end."""

from __future__ import annotations

import itertools
import logging
import random
import threading
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pcr_core.errors import ConfigError
from pcr_core.index.chunk import ChunkLayout, LayerShape
from pcr_core.model.transfers import in_runs
from pcr_core.tiers import HostPool, SlabPlan
from pcr_core.tiers.pinning import BackgroundPinning
from pcr_core.tiers.slabs import PAGE, Slab
from tests.tiers.conftest import LAYOUT
from tests.tiers.registrars import FakeRegistrar, until

SIZE = LAYOUT.nbytes
LAYERS = range(len(LAYOUT.layers))


def test_capacity_is_the_whole_chunks_that_fit_into_whole_pages(kit):
    size = kit.layout.nbytes
    fit = 2 * PAGE // size
    pool = HostPool(kit.layout, SlabPlan.within(3 * PAGE - 1, size))
    assert (pool.capacity, pool.free_count, pool.nbytes) == (fit, fit, fit * size)


def test_a_budget_below_one_chunk_names_both_numbers(kit):
    with pytest.raises(ConfigError, match=rf"{PAGE - 1} bytes .* least {PAGE}"):
        SlabPlan.within(PAGE - 1, kit.layout.nbytes)


def test_allocate_gives_every_slot_once_then_nothing(kit):
    pool = HostPool(kit.layout, SlabPlan(3, kit.layout.nbytes))
    slots = [pool.allocate() for _ in range(3)]
    assert pool.allocate() is None
    assert {slot.index for slot in slots} == {0, 1, 2}
    pool.free(slots[1])
    assert pool.free_count == 1
    assert pool.allocate().index == slots[1].index


def test_freeing_twice_raises(kit):
    pool = HostPool(kit.layout, SlabPlan(2, kit.layout.nbytes))
    slot = pool.allocate()
    pool.free(slot)
    with pytest.raises(RuntimeError, match="twice"):
        pool.free(slot)
    assert pool.free_count == 2


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("F32", torch.float32), ("BF16", torch.bfloat16), ("F16", torch.float16)],
)
def test_layer_views_are_the_slot_s_bytes_in_the_layout_s_order(name, dtype):
    shapes = (LayerShape(1, 4, 2), LayerShape(2, 2, 4), LayerShape(1, 8, 0))
    layout = ChunkLayout(shapes, 4, name, dtype.itemsize)
    pool = HostPool(layout, SlabPlan(3, layout.nbytes))
    slots = [pool.allocate() for _ in range(3)]
    numbers = itertools.count(1)
    expected = {}
    for slot in slots:
        parts = []
        for index, shape in enumerate(shapes):
            keys, values = slot.layer(index)
            assert keys.shape == (shape.kv_heads, 4, shape.k_dim)
            assert values.shape == (shape.kv_heads, 4, shape.v_dim)
            assert keys.dtype == dtype
            assert keys.is_contiguous()
            for tensor in (keys, values):
                tensor.fill_(next(numbers))
                parts.append(tensor.clone().view(torch.uint8).flatten())
        expected[slot.index] = bytes(torch.cat(parts).numpy())
    for slot in slots:
        assert bytes(slot.view) == expected[slot.index]


def test_views_are_writable_and_start_on_a_page(kit):
    pool = HostPool(kit.layout, SlabPlan(2, kit.layout.nbytes))
    slot = pool.allocate()
    assert len(slot.view) == kit.layout.nbytes
    assert slot.layer(0)[0].data_ptr() % 4096 == 0
    slot.view[:] = b"\x00" * kit.layout.nbytes
    slot.view[:4] = b"\x00\x00\x80\x3f"
    assert slot.layer(0)[0].flatten()[0].item() == 1.0
    assert repr(slot) == "Slot(0)"


def test_memory_is_taken_only_when_used():
    layout = ChunkLayout((LayerShape(1, 64, 64),), 128, "F32", 4)

    def resident() -> int:
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * 4096

    before = resident()
    pool = HostPool(layout, SlabPlan.within(2**30, layout.nbytes))
    slot = pool.allocate()
    slot.view[:] = bytes(layout.nbytes)
    assert resident() - before < 2**27


# --- several slabs ---


class Source:
    """Gives slabs, remembers which are still mapped, and runs out after ``limit``."""

    def __init__(self, limit: int = 2**60) -> None:
        self.limit = limit
        self.given: list[tuple[weakref.ref, int]] = []

    def __call__(self, nbytes: int) -> Slab:
        if self.mapped + nbytes > self.limit:
            raise OSError(12, "Cannot allocate memory")
        slab = Slab(nbytes)
        self.given.append((weakref.ref(slab.bytes.obj), nbytes))
        return slab

    @property
    def mapped(self) -> int:
        return sum(nbytes for memory, nbytes in self.given if memory() is not None)


def pool_of(slots: int, per_slab: int, **options) -> HostPool:
    return HostPool(LAYOUT, SlabPlan(slots, SIZE, per_slab * SIZE), **options)


def address(slot) -> int:
    return slot.layer(0)[0].data_ptr()


def check_neighbours(slots) -> None:
    """Runs of following indices are runs in memory, and spans are their layers."""
    by_index = {slot.index: slot for slot in slots}
    for run in in_runs(by_index, sorted(by_index), LAYOUT.chunk_tokens):
        found = [by_index[run.first.index + i] for i in range(run.count)]
        for layer, part in itertools.product(LAYERS, (0, 1)):
            span = run.first.span(run.count, layer)[part]
            for joined, slot in zip(span, found, strict=True):
                alone = slot.layer(layer)[part]
                assert joined.data_ptr() == alone.data_ptr()
                assert joined.shape == alone.shape
                assert joined.is_contiguous()


@settings(max_examples=60)
@given(
    slots=st.integers(1, 40),
    per_slab=st.integers(1, 20),
    seed=st.integers(0, 2**32),
)
def test_any_sequence_of_lending_and_taking_back(slots, per_slab, seed):
    draw, source = random.Random(seed), Source()
    pool = pool_of(slots, per_slab, new_slab=source)
    lent: dict[int, tuple] = {}
    for step in range(120):
        act = draw.choice(["allocate", "allocate", "free", "populate"])
        if act == "populate":
            pool.populate_next(draw.randrange(4) * SIZE)
        elif act == "free" and lent:
            slot, data = lent.pop(draw.choice(list(lent)))
            assert bytes(slot.view) == data
            pool.free(slot)
        elif act == "allocate":
            slot = pool.allocate()
            assert (slot is None) == (len(lent) == slots)
            if slot is not None:
                data = draw.randbytes(SIZE)
                slot.view[:] = data
                assert slot.index not in lent
                lent[slot.index] = slot, data
        assert pool.free_count == slots - len(lent)
        assert source.mapped == pool.allocated_bytes <= pool._plan.nbytes
        if step % 10 == 0:
            check_neighbours([slot for slot, _ in lent.values()])
    starts = sorted(address(slot) for slot, _ in lent.values())
    assert all(b - a >= SIZE for a, b in itertools.pairwise(starts))
    assert all(bytes(slot.view) == data for slot, data in lent.values())


@given(
    budget=st.integers(PAGE, 12 * PAGE),
    slab=st.integers(1, 5 * PAGE),
    ahead=st.integers(0, 2**20),
)
def test_real_bytes_never_pass_the_budget(budget, slab, ahead):
    source = Source()
    pool = HostPool(LAYOUT, SlabPlan.within(budget, SIZE, slab), new_slab=source)
    assert source.mapped == 0
    count = 0
    while pool.allocate():
        pool.populate_next(ahead)
        count += 1
        assert source.mapped == pool.allocated_bytes <= budget
    assert count == pool.capacity
    assert source.mapped > budget - PAGE - max(SIZE, slab % PAGE + SIZE)


def test_a_slab_is_mapped_for_its_first_slot_only():
    source = Source()
    pool = pool_of(7, 3, new_slab=source)
    mapped = []
    for _ in range(7):
        pool.allocate()
        mapped.append(len(source.given))
    assert mapped == [1, 1, 1, 2, 2, 2, 3]
    assert not pool.populate_next(2**20)


def test_the_border_of_two_slabs_is_no_neighbourhood():
    pool = pool_of(5, 2)
    assert [pool.allocate().index for _ in range(5)] == [0, 1, 3, 4, 6]
    assert pool.allocate() is None


def test_idle_moments_map_the_next_slab_ahead_of_its_need():
    source = Source()
    pool = pool_of(6, 2, new_slab=source)
    assert pool.populate_next(3 * SIZE)
    assert pool.populate_next(3 * SIZE)
    assert pool.populate_next(3 * SIZE)
    assert not pool.populate_next(3 * SIZE)
    assert len(source.given) == 2
    assert [pool.allocate().index for _ in range(3)] == [0, 1, 3]


@pytest.mark.parametrize("ahead", [0, 2**20])
def test_a_system_without_more_memory_leaves_the_pool_smaller(caplog, ahead):
    pool = pool_of(10, 3, new_slab=Source(limit=2 * PAGE))
    slots = []
    with caplog.at_level(logging.WARNING):
        while (slot := pool.allocate()) is not None:
            slots.append(slot)
            pool.populate_next(ahead)
        assert pool.allocate() is None
    assert (len(slots), pool.capacity, pool.free_count) == (6, 6, 0)
    assert len(caplog.records) == 1
    assert "it stays at 6 chunks" in caplog.text
    pool.free(slots[0])
    assert pool.allocate().index == slots[0].index


# --- pinned ---


def test_a_slab_is_of_use_while_it_is_being_pinned():
    driver = FakeRegistrar()
    driver.gate.clear()
    pool = pool_of(4, 2, pinning=BackgroundPinning(driver))
    slots = [pool.allocate() for _ in range(4)]
    assert driver.entered.acquire(timeout=60)
    for slot in slots:
        slot.view[:] = bytes([slot.index]) * SIZE
    before = [address(slot) for slot in slots]
    assert pool.pinned_bytes == 0
    driver.gate.set()
    until(lambda: pool.pinned_bytes == pool.allocated_bytes == 2 * PAGE)
    assert [address(slot) for slot in slots] == before
    assert all(bytes(slot.view) == bytes([slot.index]) * SIZE for slot in slots)
    pool.close()
    assert driver.count("register") == driver.count("unregister") == 2
    assert not driver.locked
    assert not driver.mistakes


def test_slabs_that_cannot_be_pinned_are_lent_like_others():
    driver = FakeRegistrar(limit=PAGE)
    pool = pool_of(6, 2, pinning=BackgroundPinning(driver))
    slots = [pool.allocate() for _ in range(6)]
    until(lambda: pool.pin_errors == 2)
    assert all(slots)
    assert pool.pinned_bytes == PAGE
    pool.close()
    assert driver.count("unregister") == 1
    assert not driver.mistakes


# --- the end ---


def test_closing_gives_all_memory_back_although_the_pool_is_held():
    driver, source = FakeRegistrar(), Source()
    pool = pool_of(6, 2, pinning=BackgroundPinning(driver), new_slab=source)
    slots = [pool.allocate() for _ in range(6)]
    until(lambda: driver.count("register") == 3)
    del slots
    assert source.mapped == 3 * PAGE
    pool.close()
    assert source.mapped == pool.allocated_bytes == pool.pinned_bytes == 0
    assert pool.allocate() is None
    assert not pool.populate_next(2**20)
    assert pool.free_count == 0
    assert not driver.mistakes
    pool.close()


@pytest.mark.parametrize(
    "take",
    [
        lambda slot: slot.view,
        lambda slot: slot.layer(1)[1].view(torch.uint8).numpy(),
        lambda slot: slot.span(1, 0)[0].view(torch.uint8).numpy(),
    ],
    ids=["view", "layer", "span"],
)
def test_a_view_that_outlives_the_pool_keeps_its_slab_and_no_other(take):
    source = Source()
    pool = pool_of(6, 2, new_slab=source)
    slots = [pool.allocate() for _ in range(6)]
    slots[3].view[:] = bytes([7]) * SIZE
    left = take(slots[3])
    del slots
    pool.close()
    assert [memory() is not None for memory, _ in source.given] == [False, True, False]
    assert set(memoryview(left).tobytes()) == {7}
    del left
    assert source.mapped == 0


def test_a_thread_that_hangs_keeps_the_slab_it_writes_to():
    driver, source = FakeRegistrar(), Source()
    pool = pool_of(4, 2, pinning=BackgroundPinning(driver), new_slab=source)
    first, _, third, _ = (pool.allocate() for _ in range(4))
    del first, _
    until(lambda: driver.count("register") == 2)
    wakes = threading.Event()
    written = []

    def hang(view: memoryview) -> None:
        wakes.wait(60)
        view[:] = bytes([9]) * SIZE
        written.append(bytes(view))

    thread = threading.Thread(target=hang, args=(third.view,))
    del third
    thread.start()
    pool.close()
    assert source.mapped == PAGE
    assert not driver.locked
    wakes.set()
    thread.join(60)
    assert written == [bytes([9]) * SIZE]
    del thread
    assert source.mapped == 0
