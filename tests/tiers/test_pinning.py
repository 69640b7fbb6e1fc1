"""Pages are locked behind the pool's back, and unlocked once, before they are gone."""

from __future__ import annotations

import logging
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch

from pcr_core.tiers import pinning
from pcr_core.tiers.cuda_registrar import CudaRegistrar
from pcr_core.tiers.pinning import BackgroundPinning
from pcr_core.tiers.slabs import PAGE, Slab
from tests.tiers.registrars import FakeRegistrar, until


def new_slabs(*pages: int) -> list[Slab]:
    return [Slab(count * PAGE) for count in pages]


def test_slabs_are_locked_in_order_on_a_thread_of_its_own():
    driver, slabs = FakeRegistrar(), new_slabs(1, 2, 3)
    one = BackgroundPinning(driver)
    for slab in slabs:
        one.add(slab)
    until(lambda: one.nbytes == 6 * PAGE)
    one.close(60)
    expected = [("register", slab.address) for slab in slabs]
    expected += [("unregister", slab.address) for slab in reversed(slabs)]
    assert driver.calls == expected
    assert driver.threads == {"pcr-pin"}
    assert (one.nbytes, one.errors, driver.mistakes) == (0, 0, [])
    one.close(60)
    assert driver.calls == expected


def test_without_slabs_there_is_no_thread():
    threads = threading.active_count()
    one = BackgroundPinning(FakeRegistrar())
    assert threading.active_count() == threads
    one.close(60)


def test_what_the_system_refuses_stays_as_it_is(caplog):
    driver = FakeRegistrar(limit=3 * PAGE)
    one = BackgroundPinning(driver)
    with caplog.at_level(logging.WARNING):
        for slab in new_slabs(2, 2, 1, 5):
            one.add(slab)
        until(lambda: driver.count("register") == 4 and one.errors == 2)
    assert one.nbytes == 3 * PAGE, "what fits is locked although others were refused"
    assert [record.message for record in caplog.records] == [
        f"{2 * PAGE} bytes of the DRAM tier cannot be page-locked: no more pages may "
        "be locked; copies from there are slower (further ones are only counted)"
    ]
    one.close(60)
    assert driver.count("unregister") == 2
    assert not driver.mistakes


def test_closing_drops_what_has_not_begun():
    driver, slabs = FakeRegistrar(), new_slabs(1, 1, 1)
    memory = [weakref.ref(slab.bytes.obj) for slab in slabs]
    driver.gate.clear()
    one = BackgroundPinning(driver)
    while slabs:
        one.add(slabs.pop())
    assert driver.entered.acquire(timeout=60)
    closer = threading.Thread(target=one.close, args=(60,))
    closer.start()
    until(lambda: one._closing)
    driver.gate.set()
    closer.join(60)
    assert [what for what, _ in driver.calls] == ["register", "unregister"]
    assert [piece() for piece in memory] == [None] * 3
    one.add(*new_slabs(1))
    assert driver.count("register") == 1
    assert not driver.mistakes


def test_a_driver_that_hangs_is_left_behind_and_cleans_up_later(caplog):
    driver, [slab] = FakeRegistrar(), new_slabs(1)
    memory = weakref.ref(slab.bytes.obj)
    driver.gate.clear()
    one = BackgroundPinning(driver)
    one.add(slab)
    del slab
    assert driver.entered.acquire(timeout=60)
    one.close(0.001)
    assert "pcr-pin hangs in the driver" in caplog.text
    assert memory() is not None, "it is being locked"
    driver.gate.set()
    one.close(60)
    assert [what for what, _ in driver.calls] == ["register", "unregister"]
    assert memory() is None
    assert not driver.mistakes


def test_what_cannot_be_unlocked_is_never_unmapped(caplog, monkeypatch):
    monkeypatch.setattr(pinning, "_stranded", [])
    driver, slabs = FakeRegistrar(stuck=True), new_slabs(1, 2)
    memory = [weakref.ref(slab.bytes.obj) for slab in slabs]
    one = BackgroundPinning(driver)
    while slabs:
        one.add(slabs.pop())
    until(lambda: one.nbytes == 3 * PAGE)
    one.close(60)
    assert driver.count("unregister") == 2, "the second was tried, too"
    assert one.nbytes == 0
    assert "cannot be unlocked: the device is gone" in caplog.text
    assert all(piece() is not None for piece in memory)
    assert len(pinning._stranded) == 2


class FakeRuntime:
    """What ``torch.cuda`` is asked for, without a GPU. Any call may be told to fail."""

    def __init__(self, monkeypatch, code: int = 0) -> None:
        self.calls: list[tuple] = []
        self.code = code
        here = SimpleNamespace(
            cudaHostRegister=lambda *args: self._called("register", *args),
            cudaHostUnregister=lambda *args: self._called("unregister", *args),
        )
        monkeypatch.setattr(torch.cuda, "cudart", lambda: here)
        monkeypatch.setattr(torch.cuda, "device", self.device)
        monkeypatch.setattr(
            torch.cuda, "synchronize", lambda: self.calls.append(("synchronize",))
        )
        monkeypatch.setattr(torch.cuda, "CudaError", RuntimeError)

    def _called(self, *call) -> int:
        self.calls.append(call)
        return self.code

    def device(self, device):
        runtime = self

        class Current:
            def __enter__(self):
                runtime.calls.append(("device", device))

            def __exit__(self, *_):
                runtime.calls.append(("device", None))

        return Current()


def test_the_cuda_driver_is_asked_for_its_device_and_after_its_copies(monkeypatch):
    runtime, device = FakeRuntime(monkeypatch), torch.device("cuda", 1)
    driver = CudaRegistrar(device)
    driver.register(4096, 8192)
    driver.unregister(4096)
    assert runtime.calls == [
        ("device", device),
        ("register", 4096, 8192, 1),
        ("device", None),
        ("device", device),
        ("synchronize",),
        ("unregister", 4096),
        ("device", None),
    ]


def test_an_error_code_of_the_cuda_driver_is_raised(monkeypatch):
    FakeRuntime(monkeypatch, code=304)
    driver = CudaRegistrar(torch.device("cuda"))
    with pytest.raises(RuntimeError, match="304"):
        driver.register(4096, 8192)
    with pytest.raises(RuntimeError, match="304"):
        driver.unregister(4096)
