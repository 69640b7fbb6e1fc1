"""When chunks reach the SSD under each policy, and what a slow or full disk drops."""

from __future__ import annotations

import errno

import pytest

from pcr_core.tiers import IoPool
from pcr_core.tiers.write_policy import OnEvict, SecondTouch, WriteThrough


def stored(manager, kit, tokens) -> list[bool]:
    found = manager._catalogue.find(kit.keys_of(tokens))
    return [key in found for key in kit.keys_of(tokens)]


def test_write_through_writes_at_once_and_once(kit):
    manager = kit.manager(write_policy=WriteThrough())
    tokens = [*kit.prompt(1, 2), 9]
    kit.serve(manager, tokens)
    assert stored(manager, kit, tokens) == [True, True]
    kit.serve(manager, tokens)
    assert manager.snapshot().written == 2


def test_second_touch_writes_what_is_used_again(kit):
    manager = kit.manager(write_policy=SecondTouch())
    kit.serve(manager, [*kit.prompt(1, 2), 9])
    assert manager.snapshot().written == 0
    kit.serve(manager, [*kit.prompt(1, 3), 9])
    assert stored(manager, kit, kit.prompt(1, 2)) == [True, False]
    assert stored(manager, kit, kit.prompt(1, 3)) == [True, False]


def test_second_touch_remembers_chunks_that_were_evicted_in_between(kit):
    manager = kit.manager(slots=2, write_policy=SecondTouch())
    for numbers in ((1, 2), (3, 4), (5, 6), (1, 2)):
        kit.serve(manager, [*kit.prompt(*numbers), 9])
    assert stored(manager, kit, kit.prompt(1, 2)) == [True, True]
    assert stored(manager, kit, kit.prompt(3, 4)) == [False, False]


def test_a_scan_of_one_off_prompts_writes_nothing(kit):
    manager = kit.manager(slots=4, ssd_chunks=50, write_policy=SecondTouch())
    for number in range(100, 300, 2):
        kit.serve(manager, [*kit.prompt(number, number + 1), 9])
    assert manager.snapshot().written == 0
    assert manager.check().ok


def test_on_evict_writes_what_leaves(kit):
    manager = kit.manager(slots=40, ssd_chunks=100, write_policy=OnEvict())
    kit.serve(manager, [*kit.prompt(1, 2), 9])
    assert manager.snapshot().written == 0
    for number in range(100, 200, 2):
        kit.serve(manager, [*kit.prompt(number, number + 1), 9])
    assert stored(manager, kit, kit.prompt(1, 2)) == [True, True]
    assert manager.snapshot().write_drops == 0
    assert kit.serve(manager, [*kit.prompt(1, 2), 9]).tiers == {0: "ssd", 1: "ssd"}
    assert manager.check().ok


@pytest.mark.parametrize("policy", [WriteThrough, OnEvict])
def test_close_leaves_everything_on_ssd(kit, policy):
    manager = kit.manager(write_policy=policy())
    tokens = [*kit.prompt(1, 2, 3), 9]
    kit.serve(manager, tokens)
    manager.close()
    again = kit.manager()
    assert kit.serve(again, tokens).tiers == dict.fromkeys(range(3), "ssd")


def test_flush_writes_what_the_policy_has_not(kit):
    manager = kit.manager(write_policy=SecondTouch())
    tokens = [*kit.prompt(1, 2, 3), 9]
    kit.serve(manager, tokens)
    assert manager.flush()
    assert stored(manager, kit, tokens) == [True] * 3


def test_a_clean_chunk_is_not_written_again_when_it_leaves(kit):
    manager = kit.manager(slots=4, ssd_chunks=100, write_policy=OnEvict())
    tokens = [*kit.prompt(1, 2), 9]
    for _ in range(3):
        kit.serve(manager, tokens)
        for number in range(100, 120, 2):
            kit.serve(manager, [*kit.prompt(number, number + 1), 9])
    files = len(kit.chunk_files(kit.folder))
    assert manager.snapshot().written == files


class _Stuck:
    """A writer that does nothing until it is let go."""

    def __init__(self, store):
        import threading

        self.store = store
        self.gate = threading.Event()

    def read(self, job):
        self.store.read(job)

    def commit(self, jobs):
        self.gate.wait(60)
        self.store.commit(jobs)


def test_a_stuck_disk_never_blocks_and_never_grows(kit):
    stuck = []

    def io(store):
        stuck.append(_Stuck(store))
        return IoPool(stuck[0])

    manager = kit.manager(slots=16, ssd_chunks=500, write_policy=OnEvict(), io=io)
    for number in range(100, 400, 2):
        kit.serve(manager, [*kit.prompt(number, number + 1), 9])
    stats = manager.snapshot()
    assert stats.write_drops > 0
    assert stats.dram_chunks <= 16
    assert len(manager._writes.unsaved()) <= 16
    stuck[0].gate.set()
    assert manager.flush(60)
    assert manager.check().ok


def test_a_full_disk_drops_and_counts(kit):
    files = kit.FaultyFiles()
    manager = kit.manager(slots=4, write_policy=OnEvict(), files=files)
    files.broken["writev"] = errno.ENOSPC
    for number in range(100, 140, 2):
        kit.serve(manager, [*kit.prompt(number, number + 1), 9])
    assert manager.snapshot().write_errors > 0
    assert manager.snapshot().dram_chunks <= 4
    files.broken.clear()
    assert manager.flush()
    assert manager.check().ok
