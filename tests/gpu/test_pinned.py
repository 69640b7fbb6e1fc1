"""Slabs are pinned by a real driver, and copied from while that happens."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pcr_core.index.chunk import ChunkLayout, LayerShape
from pcr_core.tiers import CudaRegistrar, HostPool, SlabPlan
from pcr_core.tiers.pinning import BackgroundPinning
from pcr_core.tiers.slabs import PAGE, Slab
from tests.tiers.registrars import until

pytestmark = pytest.mark.gpu

LAYOUT = ChunkLayout((LayerShape(8, 128, 128),) * 2, 128, "BF16", 2)  # 1 MiB
SLOTS = 10
PLAN = SlabPlan(SLOTS, LAYOUT.nbytes, 4 * LAYOUT.nbytes)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def pool(device: torch.device) -> Iterator[HostPool]:
    made = HostPool(LAYOUT, PLAN, pinning=BackgroundPinning(CudaRegistrar(device)))
    yield made
    made.close()


def filled(pool: HostPool) -> list:
    slots = [pool.allocate() for _ in range(SLOTS)]
    for number, slot in enumerate(slots):
        for layer in range(len(LAYOUT.layers)):
            keys, values = slot.layer(layer)
            keys.fill_(number + layer / 2)
            values.fill_(-number - layer / 2)
    return slots


def copied(slots, device: torch.device) -> bool:
    """Whether every layer of every slot arrives on the device and comes back."""
    right = True
    for number, slot in enumerate(slots):
        for layer in range(len(LAYOUT.layers)):
            for part, sign in zip(slot.layer(layer), (1, -1), strict=True):
                there = part.to(device, non_blocking=True)
                right &= bool((there == sign * (number + layer / 2)).all())
                part.copy_(there * 2, non_blocking=True)
                torch.cuda.synchronize(device)
                right &= bool((part == there.cpu() * 2).all())
                part.copy_(there, non_blocking=True)
    torch.cuda.synchronize(device)
    return right


def test_views_are_pinned_and_copies_are_right(pool, device):
    slots = filled(pool)
    until(lambda: pool.pinned_bytes == pool.allocated_bytes)
    assert pool.allocated_bytes == PLAN.nbytes
    assert pool.pin_errors == 0
    for slot in slots:
        assert all(part.is_pinned() for part in slot.layer(1))
    assert slots[0].span(4, 0)[0].is_pinned(), "a run of a whole slab"
    assert copied(slots, device)


def test_copies_are_right_while_slabs_are_being_pinned(pool, device):
    slots = filled(pool)
    assert copied(slots, device)
    until(lambda: pool.pinned_bytes == pool.allocated_bytes)
    assert copied(slots, device)


def test_after_the_end_memory_is_ordinary_and_intact(pool, device):
    slots = filled(pool)
    until(lambda: pool.pinned_bytes == pool.allocated_bytes)
    pool.close()
    assert pool.pinned_bytes == 0
    assert not slots[3].layer(0)[0].is_pinned()
    assert copied(slots, device)


def test_a_size_that_no_machine_can_lock_stays_pageable(device, caplog):
    class Absurd(CudaRegistrar):
        def register(self, address: int, nbytes: int) -> None:
            super().register(address, 2**50)

    pool = HostPool(LAYOUT, PLAN, pinning=BackgroundPinning(Absurd(device)))
    try:
        with caplog.at_level(logging.WARNING):
            slots = filled(pool)
            until(lambda: pool.pin_errors == 3)
        assert pool.pinned_bytes == 0
        assert not slots[0].layer(0)[0].is_pinned()
        assert caplog.text.count("cannot be page-locked") == 1
        assert copied(slots, device), "nor does the error show up in later calls"
    finally:
        pool.close()


def test_the_driver_gives_a_reason(device):
    slab, driver = Slab(PAGE), CudaRegistrar(device)

    def refused(call, *args) -> str:
        with pytest.raises(RuntimeError) as caught:
            call(*args)
        return str(caught.value)

    def reasons() -> tuple[str, str]:
        first = refused(driver.unregister, slab.address)
        driver.register(slab.address, PAGE)
        second = refused(driver.register, slab.address, PAGE)
        driver.unregister(slab.address)
        return first, second

    # CUDA keeps the last error of a thread for the next launch there: not on this one.
    with ThreadPoolExecutor(1) as other:
        not_registered, twice = other.submit(reasons).result()
    assert "not" in not_registered
    assert "already" in twice
