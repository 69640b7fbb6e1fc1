"""The DRAM slab: slots, views, budget."""

from __future__ import annotations

import itertools

import pytest
import torch

from pcr_core.errors import ConfigError
from pcr_core.index.chunk import ChunkLayout, LayerShape
from pcr_core.tiers import HostPool


def test_capacity_is_the_whole_chunks_that_fit(kit):
    size = kit.layout.nbytes
    pool = HostPool(kit.layout, 3 * size + size - 1)
    assert (pool.capacity, pool.free_count, pool.nbytes) == (3, 3, 3 * size)


def test_a_budget_below_one_chunk_names_both_numbers(kit):
    size = kit.layout.nbytes
    with pytest.raises(ConfigError, match=rf"{size - 1} bytes .* {size}"):
        HostPool(kit.layout, size - 1)


def test_allocate_gives_every_slot_once_then_nothing(kit):
    pool = HostPool(kit.layout, 3 * kit.layout.nbytes)
    slots = [pool.allocate() for _ in range(3)]
    assert pool.allocate() is None
    assert {slot.index for slot in slots} == {0, 1, 2}
    pool.free(slots[1])
    assert pool.free_count == 1
    assert pool.allocate().index == slots[1].index


def test_freeing_twice_raises(kit):
    pool = HostPool(kit.layout, 2 * kit.layout.nbytes)
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
    pool = HostPool(layout, 3 * layout.nbytes)
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
    pool = HostPool(kit.layout, 2 * kit.layout.nbytes)
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
    pool = HostPool(layout, 2**30)
    slot = pool.allocate()
    slot.view[:] = bytes(layout.nbytes)
    assert resident() - before < 2**27
