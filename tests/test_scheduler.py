"""The queue's order: promises that hold for any stream of requests."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcr_core.index.chunk import ChunkKey
from pcr_core.request import Request
from pcr_core.sampling_params import SamplingParams
from pcr_core.scheduler import Scheduler, Standing, sharers_together


def request(priority: int = 0, deadline: float | None = None) -> Request:
    return Request([1], [], SamplingParams(), priority=priority, deadline=deadline)


@dataclass
class World:
    """What the scheduler is told about requests."""

    standings: dict[Request, Standing] = field(default_factory=dict)

    def scheduler(self, order: str = "fcfs", bound: int = 3) -> Scheduler:
        return Scheduler(order, bound, lambda r: self.standings.get(r, Standing()))


def taken(scheduler: Scheduler) -> list[Request]:
    found = []
    while (one := scheduler.next()) is not None:
        found.append(one)
    return found


def test_first_come_first_served() -> None:
    scheduler, requests = World().scheduler(), [request() for _ in range(50)]
    for one in requests:
        scheduler.add(one)
    assert scheduler.upcoming(50) == scheduler.waiting() == requests
    assert scheduler.upcoming(0) == []
    assert taken(scheduler) == requests
    assert len(scheduler) == 0
    assert scheduler.peek() is None


def test_priority_then_deadline_then_arrival() -> None:
    scheduler = World().scheduler(bound=100)
    plain, soon, sooner = request(), request(deadline=9.0), request(deadline=3.0)
    high, low = request(priority=2), request(priority=-1, deadline=1.0)
    for one in (low, plain, soon, sooner, high):
        scheduler.add(one)
    assert taken(scheduler) == [high, sooner, soon, plain, low]


def test_a_ready_request_goes_before_one_that_is_still_being_read() -> None:
    world = World()
    scheduler, loading, ready = world.scheduler(), request(), request()
    world.standings[loading] = Standing(ready=False)
    scheduler.add(loading)
    scheduler.add(ready)
    assert scheduler.peek() is ready
    world.standings[loading] = Standing(ready=True)
    assert scheduler.peek() is loading, "it has arrived: asked anew"


def test_a_high_priority_does_not_wait_for_what_is_ready() -> None:
    world = World()
    scheduler, high = world.scheduler(), request(priority=1)
    world.standings[high] = Standing(ready=False)
    scheduler.add(request())
    scheduler.add(high)
    assert scheduler.peek() is high


@pytest.mark.parametrize("order", ["fcfs", "cache_aware"])
def test_what_is_cached_counts_only_if_asked_for(order: str) -> None:
    world = World()
    scheduler, cold, half, warm = world.scheduler(order), *(request() for _ in "123")
    world.standings[half] = Standing(True, 50, 50)
    world.standings[warm] = Standing(True, 90, 10)
    world.standings[cold] = Standing(True, 0, 100)
    for one in (cold, half, warm):
        scheduler.add(one)
    expected = [warm, half, cold] if order == "cache_aware" else [cold, half, warm]
    assert taken(scheduler) == expected


def test_alternating_documents_are_grouped() -> None:
    """RAGCache's example: with room for one document every second request hits."""
    world, last = World(), [""]
    names: dict[Request, str] = {}
    scheduler = Scheduler(
        "cache_aware",
        32,
        lambda r: Standing(True, 90 if names[r] == last[0] else 0, 10),
    )
    del world
    for number in range(12):
        one = request()
        names[one] = "AB"[number % 2]
        scheduler.add(one)
    hits = 0
    while (one := scheduler.next()) is not None:
        hits += names[one] == last[0]
        last[0] = names[one]
    assert hits == 10


def test_one_that_was_put_back_has_its_old_place() -> None:
    scheduler, requests = World().scheduler(), [request() for _ in range(4)]
    for one in requests[:3]:
        scheduler.add(one)
    first = scheduler.next()
    scheduler.add(requests[3])
    assert first is not None
    scheduler.put_back(first)
    assert taken(scheduler) == requests


def test_dropping_takes_out_only_what_is_unwanted() -> None:
    scheduler, requests = World().scheduler(), [request() for _ in range(5)]
    for one in requests:
        scheduler.add(one)
    version = scheduler.version
    assert scheduler.drop(lambda r: False) == []
    assert scheduler.version == version
    assert scheduler.drop(lambda r: r in requests[::2]) == requests[::2]
    assert scheduler.version != version
    assert scheduler.drain() == requests[1::2]


@given(
    st.integers(0, 5),
    st.sampled_from(["fcfs", "cache_aware"]),
    st.integers(0, 2**32),
)
def test_nobody_is_overtaken_beyond_the_bound(
    bound: int, order: str, seed: int
) -> None:
    """Whatever priorities, deadlines, reads and hits are thrown at it."""
    dice, world = random.Random(seed), World()
    scheduler = world.scheduler(order, bound)
    waiting: list[Request] = []  # in order of arrival
    overtaken: dict[Request, int] = {}
    running: list[Request] = []
    for _ in range(120):
        move = dice.random()
        if move < 0.5:
            one = request(dice.randint(0, 3), dice.choice([None, dice.random()]))
            world.standings[one] = Standing(
                dice.random() < 0.5, dice.randint(0, 9), dice.randint(1, 9)
            )
            scheduler.add(one)
            waiting.append(one)
            overtaken[one] = 0
        elif move < 0.9 and waiting:
            forecast = scheduler.upcoming(1)
            one = scheduler.next()
            assert one is not None
            assert forecast == [one]
            for earlier in waiting[: waiting.index(one)]:
                overtaken[earlier] += 1
                assert overtaken[earlier] <= bound
            waiting.remove(one)
            running.append(one)
        elif running and dice.random() < 0.3:
            scheduler.put_back(one := running.pop())
            waiting = scheduler.waiting()
            assert one in waiting
        assert sorted(map(id, scheduler.upcoming(500))) == sorted(map(id, waiting))


def test_nobody_starves_under_continuous_load() -> None:
    scheduler, poor = World().scheduler(bound=7), request()
    for _ in range(3):
        scheduler.add(request(priority=9))
    scheduler.add(poor)
    turns = 0
    while scheduler.next() is not poor:
        turns += 1
        scheduler.add(request(priority=9))
        assert turns <= 3 + 7, "those before it, and as many as may overtake it"


@given(st.lists(st.lists(st.integers(0, 2), max_size=4), max_size=12))
def test_sharers_come_together(paths: list[list[int]]) -> None:
    prompts = [
        [ChunkKey(bytes(path[: i + 1]).ljust(32, b"\xff")) for i in range(len(path))]
        for path in paths
    ]
    order = sharers_together(prompts)
    assert sorted(order) == list(range(len(paths)))
    for depth in range(1, 5):
        seen: list[tuple[int, ...]] = []
        for index in order:
            start = tuple(paths[index][:depth])
            if len(start) == depth and start != (seen[-1] if seen else None):
                assert start not in seen, "a beginning is left and taken up again"
                seen.append(start)
