"""Reads ahead of a queue: order, bounds, cancelling, and what they hide.

Times are virtual: a store of declared bandwidth and requests of declared compute time.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcr_core.index.node import Host
from pcr_core.tiers import stop_policy
from pcr_core.tiers.write_policy import OnEvict
from tests.tiers.conftest import FILE_BYTES
from tests.tiers.world import CHUNK_SECONDS, Waiting, World, question


def test_nearest_request_first_and_root_first(kit):
    near, far = question(1, 2, 3), question(7, 8)
    world = World(kit, [far, near])
    world.look(near, far)
    world.time.now += 10
    world.manager.poll()
    assert world.io.order == [*near.keys, *far.keys]
    assert world.in_dram(near) == [True] * 3
    assert world.in_dram(far) == [True] * 2


def test_only_what_is_missing_is_read(kit):
    request = question(1, 2, 3, 4)
    world = World(kit, [request])
    world.run(question(1, 2))
    before = world.manager.snapshot().read
    world.look(request)
    world.time.now += 10
    world.manager.poll()
    assert world.manager.snapshot().read - before == 2
    assert world.manager.snapshot().prefetch_issued == 2


def test_a_shared_prefix_is_read_once(kit):
    one, two = question(1, 2, 3), question(1, 2, 4)
    world = World(kit, [one, two])
    world.look(one, two)
    world.time.now += 10
    world.look(one, two)
    assert world.manager.snapshot().read == 4


def test_a_request_that_goes_takes_its_reads_with_it(kit):
    one, two = question(1, 2, 3), question(4, 5, 6)
    world = World(kit, [one, two])
    world.look(one, two)
    world.time.now += 1.5  # the first chunk is there, the second is being read
    world.look(two)
    world.time.now += 10
    world.look(two)
    assert world.in_dram(one) == [True, True, False]
    assert world.in_dram(two) == [True] * 3
    assert world.manager.snapshot().prefetch_cancelled == 1
    assert world.manager.check().ok


def test_a_cancelled_request_keeps_the_reads_that_another_needs(kit):
    one, two = question(1, 2, 3), question(1, 2, 3)
    world = World(kit, [one])
    world.look(one, two)
    world.look(two)
    world.time.now += 10
    assert world.in_dram(two) == [True] * 3
    assert world.manager.snapshot().prefetch_cancelled == 0


def test_three_chunks_wanted_and_two_slots_free_cost_one_victim(kit):
    request = question(1, 2, 3)
    world = World(kit, [request, question(9, 8, 7, 6)], slots=6)
    world.run(question(9, 8, 7, 6))
    world.look(request)
    world.time.now += 10
    assert world.in_dram(request) == [True] * 3
    assert world.manager.snapshot().dram_evictions == 1


def test_far_requests_do_not_evict_what_near_ones_need(kit):
    near, far = question(1, 2, 3), question(4, 5, 6)
    world = World(kit, [near, far], slots=4)
    for _ in range(8):
        world.look(near, far)
        world.time.now += 3
    assert world.in_dram(near) == [True] * 3
    assert world.run(near).tiers == {0: "ssd", 1: "ssd", 2: "ssd"}


def test_what_waits_is_not_evicted_by_what_runs(kit):
    waiting = question(1, 2, 3)
    world = World(kit, [waiting], slots=6)
    world.look(waiting)
    world.time.now += 10
    for number in range(20, 50, 3):  # ten others run first
        world.look(waiting)
        world.run(question(number, number + 1, number + 2))
    assert world.run(waiting).exposed == 0.0
    assert world.manager.snapshot().prefetch_wasted == 0


def test_a_chunk_evicted_while_its_request_waits_is_fetched_again(kit):
    waiting = question(1, 2, 3)
    world = World(kit, [waiting, question(4, 5, 6, 7)], slots=4)
    world.look(waiting)
    world.time.now += 10
    world.run(question(4, 5, 6, 7))  # takes every slot
    assert not all(world.in_dram(waiting))
    for _ in range(3):
        world.look(waiting)
        world.time.now += 10
    assert all(world.in_dram(waiting))


def test_a_prefetched_chunk_counts_as_found_on_ssd_once(kit):
    request = question(1, 2)
    world = World(kit, [request])
    world.look(request)
    world.time.now += 10
    assert set(world.run(request).tiers.values()) == {"ssd"}
    assert set(world.run(request).tiers.values()) == {"dram"}
    stats = world.manager.snapshot()
    assert (stats.prefetch_issued, stats.prefetch_used) == (2, 2)


def test_off_reads_nothing_ahead(kit):
    request = question(1, 2, 3)
    world = World(kit, [request], stop=stop_policy("off", 1.0))
    world.look(request)
    world.time.now += 10
    assert world.manager.snapshot().read == 0
    assert world.run(request).exposed == pytest.approx(3 * CHUNK_SECONDS)


def test_a_running_request_overtakes_reads_made_ahead(kit):
    waiting, running = question(1, 2, 3), question(4, 5)
    world = World(kit, [waiting, running])
    world.look(waiting)
    assert world.run(running).exposed == pytest.approx(3 * CHUNK_SECONDS)  # 1 had begun
    assert world.io.order[:3] == [waiting.keys[0], *running.keys]


def test_a_hint_is_fetched_protected_and_used_up(kit):
    hinted = question(1, 2, 3)
    world = World(kit, [hinted], slots=6)
    world.manager.hint(hinted)
    world.look()
    world.time.now += 10
    for number in range(20, 40, 2):
        world.look()
        world.run(question(number, number + 1))
    assert all(world.in_dram(hinted))
    world.run(question(1, 2, 3, 4))
    for number in range(50, 70, 2):
        world.look()
        world.run(question(number, number + 1))
    assert not any(world.in_dram(hinted))


def test_newer_hints_push_old_ones_out(kit):
    hints = [question(number) for number in range(17)]
    world = World(kit, hints, slots=64)
    for hint in hints:
        world.manager.hint(hint)
    assert len(world.manager._hints) == 16
    assert hints[0] not in list(world.manager._hints)


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=8),
    compute=st.lists(st.floats(0.1, 8.0), min_size=8, max_size=8),
    window=st.integers(1, 8),
)
def test_reading_is_hidden_for_every_request_that_waited_long_enough(
    tmp_path_factory, sizes, compute, window
):
    with _fresh_kit(tmp_path_factory) as kit:
        requests = [
            question(*range(100 * n, 100 * n + size)) for n, size in enumerate(sizes)
        ]
        world = World(kit, requests)
        queue = list(requests)
        entered: dict[Waiting, tuple[float, float]] = {}
        outstanding = 0.0  # when the reader will have done all that was asked for
        while queue:
            for request in queue[:window]:
                if request not in entered:
                    start = max(outstanding, world.time.now)
                    outstanding = start + len(request.keys) * CHUNK_SECONDS
                    entered[request] = (world.time.now, outstanding)
            world.look(*queue[:window])
            request = queue.pop(0)
            _, ready = entered[request]
            late = max(0.0, ready - world.time.now)
            assert world.run(request, compute[len(queue)]).exposed <= late + 1e-9


@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_with_an_empty_queue_prefetch_costs_nothing(tmp_path_factory, sizes):
    exposed = []
    for name in ("off", "best_effort"):
        with _fresh_kit(tmp_path_factory) as kit:
            requests = [
                question(*range(100 * n, 100 * n + size))
                for n, size in enumerate(sizes)
            ]
            world = World(kit, requests, stop=stop_policy(name, 1.0))
            for request in requests:
                world.look(request)
                exposed.append(world.run(request, 1.0).exposed)
    on_demand, ahead = exposed[: len(sizes)], exposed[len(sizes) :]
    assert sum(ahead) <= sum(on_demand) * 1.05


def _fresh_kit(tmp_path_factory):
    from tests.tiers.conftest import open_kit

    return open_kit(tmp_path_factory.mktemp("prefetch"))


def test_a_chunk_that_goes_while_room_is_made_for_it(kit):
    """Making room may bring news of another process: the chunk has been removed."""
    wanted, old = question(1, 2), question(7, 8)
    world = World(kit, [wanted], slots=2, write_policy=OnEvict())
    world.run(old)
    folder = world.manager._store.folder
    world.manager._store.budget_bytes = FILE_BYTES  # so that room is short
    real = world.manager._dram.save

    def save(victim):
        for key in list(folder.records):
            folder.remove(key)
        world.manager._catalogue.resync()
        return real(victim)

    world.manager._dram.save = save
    world.look(wanted)
    assert world.manager.check_memory() == []
    world.time.now += 10
    world.look(wanted)
    assert world.in_dram(wanted) == [False, False]
    assert world.manager.check_memory() == []


def test_filling_chunks_are_never_victims(kit):
    one, two = question(1, 2), question(3, 4)
    world = World(kit, [one, two], slots=3)
    world.look(one, two)
    filling = [n for n in world.manager._tree.nodes() if n.host is Host.FILLING]
    assert 1 <= len(filling) <= 3
    world.run(question(50, 51, 52))
    assert world.manager.check().ok
