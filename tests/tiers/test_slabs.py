"""How a budget is cut, and that no view ever points at memory that has gone."""

from __future__ import annotations

import mmap
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pcr_core.errors import ConfigError
from pcr_core.tiers.slabs import PAGE, Slab, SlabPlan, check_obtainable


@given(
    budget=st.integers(1, 10**6),
    slot=st.integers(1, 3 * PAGE),
    slab=st.integers(1, 20 * PAGE),
)
def test_a_plan_is_the_most_that_fits_whole_pages_included(budget, slot, slab):
    try:
        plan = SlabPlan.within(budget, slot, slab)
    except ConfigError:
        assert budget < SlabPlan(1, slot, slab).nbytes
        return
    assert plan.nbytes <= budget < SlabPlan(plan.capacity + 1, slot, slab).nbytes
    sizes = [plan.size(number) for number in range(plan.slabs)]
    slots = [plan.slots(number) for number in range(plan.slabs)]
    assert (sum(sizes), sum(slots)) == (plan.nbytes, plan.capacity)
    assert slots[:-1] == [plan.per_slab] * (plan.slabs - 1)
    assert 0 < slots[-1] <= plan.per_slab
    for size, count in zip(sizes, slots, strict=True):
        assert size % PAGE == 0
        assert 0 <= size - count * slot < PAGE


def test_a_slot_larger_than_a_slab_is_a_slab():
    plan = SlabPlan.within(10 * PAGE, 2 * PAGE + 1, PAGE)
    assert (plan.capacity, plan.per_slab, plan.size(0)) == (3, 1, 3 * PAGE)


def test_a_huge_budget_is_planned_at_once():
    plan = SlabPlan.within(2**60, 3 * 2**20)
    assert 2**60 - 2**29 < plan.nbytes <= 2**60


def test_a_budget_that_no_machine_has_is_refused_before_anything_is_used():
    with pytest.raises(ConfigError, match=r"dram_bytes: .* cannot be had"):
        check_obtainable(2**60)
    with pytest.raises(ConfigError, match="smaller"):
        check_obtainable(2**100)
    check_obtainable(2**26)


def test_a_slab_is_zero_writable_and_whole_pages():
    slab = Slab(3 * PAGE)
    assert slab.address % PAGE == 0
    assert slab.tensor.shape == (3 * PAGE,)
    assert not slab.tensor.any()
    slab.tensor[5] = 7
    assert slab.bytes[5] == 7


@pytest.mark.parametrize(
    "view",
    [
        lambda slab: slab.tensor[PAGE:].view(torch.float32),
        lambda slab: slab.bytes[PAGE:].cast("f"),
        lambda slab: slab.tensor[PAGE:].numpy().view("float32"),
    ],
    ids=["tensor", "memoryview", "array"],
)
def test_memory_lives_exactly_as_long_as_its_last_view(view):
    slab = Slab(2 * PAGE)
    memory = weakref.ref(slab.bytes.obj)
    left = view(slab)
    left[3] = 1.5
    del slab
    assert left[3] == 1.5
    assert isinstance(memory(), mmap.mmap)
    del left
    assert memory() is None


def test_nobody_can_unmap_it_under_a_tensor():
    slab = Slab(PAGE)
    with pytest.raises(BufferError):
        slab.bytes.obj.close()


def test_the_system_s_refusal_is_an_os_error():
    with pytest.raises(OSError, match="allocate"):
        Slab(2**60)
