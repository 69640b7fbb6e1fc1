"""Policies and the lazy victim queue, without a cache."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pcr_core.index.eviction import Lru, VictimQueue


class Thing:
    def __init__(self, last_used: int) -> None:
        self.last_used = last_used
        self.evictable = True


def evictable(thing: Thing) -> bool:
    return thing.evictable


def drain(queue: VictimQueue[Thing]) -> list[Thing]:
    order = []
    while (thing := queue.peek()) is not None:
        thing.evictable = False
        order.append(thing)
    return order


def test_lru_ranks_by_last_use():
    assert Lru().rank(Thing(3)) < Lru().rank(Thing(4))


def test_peek_is_stable_and_corrects_late():
    old, new = Thing(1), Thing(2)
    queue = VictimQueue(Lru(), evictable)
    queue.offer(old)
    queue.offer(new)
    assert queue.peek() is old
    assert queue.peek() is old
    old.last_used = 3
    assert queue.peek() is new


def test_a_rank_that_falls_needs_an_offer():
    class Reserved:
        def rank(self, node: Thing) -> float:
            return node.last_used

    one, two = Thing(10), Thing(5)
    queue = VictimQueue(Reserved(), evictable)
    queue.offer(one)
    queue.offer(two)
    one.last_used = 1
    queue.offer(one)
    assert drain(queue) == [one, two]


def test_offering_again_does_not_grow_the_heap():
    thing = Thing(1)
    queue = VictimQueue(Lru(), evictable)
    for _ in range(100):
        thing.last_used += 1
        queue.offer(thing)
    assert len(queue) == 1


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.sampled_from(["use", "off", "on"])),
        max_size=60,
    )
)
def test_victims_come_in_the_order_of_a_full_sort(steps):
    things = [Thing(i) for i in range(10)]
    queue = VictimQueue(Lru(), evictable)
    for thing in things:
        queue.offer(thing)
    clock = 10
    for index, what in steps:
        thing = things[index]
        if what == "use":
            clock += 1
            thing.last_used = clock
        else:
            thing.evictable = what == "on"
            if thing.evictable:
                queue.offer(thing)
        expected = min(filter(evictable, things), key=Lru().rank, default=None)
        assert queue.peek() is expected
    rest = sorted(filter(evictable, things), key=Lru().rank)
    assert drain(queue) == rest
