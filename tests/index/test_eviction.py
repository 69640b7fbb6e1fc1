"""Policies and the lazy victim queue, without a cache."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcr_core.errors import ConfigError
from pcr_core.index.chunk import ChunkKey
from pcr_core.index.eviction import (
    POLICIES,
    LookAheadLru,
    Lru,
    Pgdsf,
    StatefulPolicy,
    make_policy,
)
from pcr_core.index.node import Host, Node, host_evictable
from pcr_core.index.victim_queue import VictimQueue


def thing(last_used: int, reserved: int | None = None) -> Node:
    node = Node(ChunkKey(last_used.to_bytes(32, "big")))
    node.host = Host.READY
    node.last_used = last_used
    node.reserved = reserved
    return node


def drain(queue: VictimQueue) -> list[Node]:
    order = []
    while (node := queue.peek()) is not None:
        node.host = Host.NONE
        queue.discard(node)
        order.append(node)
    return order


def queue_of(policy, *nodes: Node) -> VictimQueue:
    queue = VictimQueue(policy, host_evictable)
    for node in nodes:
        queue.offer(node)
    return queue


# --- policies ---


def test_lru_ranks_by_last_use():
    assert Lru().rank(thing(3)) < Lru().rank(thing(4, reserved=0))
    assert Lru().rank(thing(3, reserved=0)) < Lru().rank(thing(4))


def test_look_ahead_ranks_reserved_chunks_last_and_the_latest_first():
    nearest, later, latest = thing(1, 0), thing(2, 1), thing(3, 7)
    old, new = thing(4), thing(5)
    queue = queue_of(LookAheadLru(), nearest, later, latest, old, new)
    assert drain(queue) == [old, new, latest, later, nearest]


def test_look_ahead_takes_the_oldest_chunk_of_one_request_first():
    root, leaf = thing(9, reserved=2), thing(8, reserved=2)
    assert drain(queue_of(LookAheadLru(), root, leaf)) == [leaf, root]


def use(policy: Pgdsf, node: Node, cost: float | None = None) -> None:
    node.uses += 1
    if cost is not None:
        node.misses += 1
        node.cost_sum += cost
    policy.used(node)


def test_pgdsf_weighs_uses_with_the_mean_cost_of_the_misses():
    policy, node = Pgdsf(), thing(5)
    use(policy, node, cost=1.0)
    assert policy.rank(node) == (1.0, 5)
    use(policy, node)
    assert policy.rank(node) == (2.0, 5)
    use(policy, node, cost=4.0)
    assert policy.rank(node) == (3 * 2.5, 5)


def test_pgdsf_stamps_with_the_clock_of_the_moment():
    policy, early, late, victim = Pgdsf(), thing(1), thing(2), thing(3)
    use(policy, early, cost=1.0)
    use(policy, victim, cost=5.0)
    policy.evicted(victim)
    assert policy.clock == 5.0
    use(policy, late, cost=1.0)
    assert policy.rank(early) == (1.0, 1)
    assert policy.rank(late) == (6.0, 2)


def test_the_clock_of_pgdsf_never_runs_backwards():
    policy, dear, cheap = Pgdsf(), thing(1), thing(2)
    use(policy, dear, cost=9.0)
    use(policy, cheap, cost=1.0)
    policy.evicted(dear)
    policy.evicted(cheap)
    assert policy.clock == 9.0


def test_pgdsf_stamps_a_copy_that_came_without_a_use_once():
    policy, victim, found = Pgdsf(), thing(1), thing(2)
    use(policy, victim, cost=2.0)
    policy.evicted(victim)
    assert policy.rank(found) == (2.0, 2)
    use(policy, victim, cost=9.0)
    policy.evicted(victim)
    assert policy.rank(found) == (2.0, 2)


def test_pgdsf_takes_a_chunk_it_never_saw_computed_for_average():
    policy, computed, found = Pgdsf(), thing(1), thing(2)
    use(policy, computed, cost=3.0)
    use(policy, found)
    use(policy, found)
    assert policy.rank(found) == (6.0, 2)


def test_pgdsf_keeps_nothing_of_chunks_that_are_gone():
    policy = Pgdsf()
    nodes = [thing(i) for i in range(3)]
    for node in nodes:
        use(policy, node, cost=1.0)
    policy.evicted(nodes[0])
    policy.dropped(nodes[0])
    policy.dropped(nodes[1])
    assert list(policy._stamps) == [nodes[2]]


def test_every_name_makes_a_policy_of_its_own():
    for name in POLICIES:
        assert make_policy(name, capacity=4) is not make_policy(name, capacity=4)
    assert isinstance(make_policy("pgdsf"), StatefulPolicy)
    assert not isinstance(make_policy("lookahead-lru"), StatefulPolicy)


def test_wrong_names_and_capacities_say_what_to_do():
    with pytest.raises(ConfigError, match=r"'random'.*'lookahead-lru'"):
        make_policy("random")
    with pytest.raises(ConfigError, match="capacity"):
        make_policy("adaptive")


# --- the queue ---


def test_peek_is_stable_and_corrects_late():
    old, new = thing(1), thing(2)
    queue = queue_of(Lru(), old, new)
    assert queue.peek() is old
    assert queue.peek() is old
    old.last_used = 3
    assert queue.peek() is new


def test_a_rank_that_falls_needs_an_offer():
    one, two = thing(10), thing(5)
    queue = queue_of(Lru(), one, two)
    one.last_used = 1
    assert queue.misplaced(one)
    queue.offer(one)
    assert not queue.misplaced(one)
    assert drain(queue) == [one, two]


def test_offering_again_does_not_grow_the_heap():
    node = thing(1)
    queue = queue_of(Lru(), node)
    for _ in range(100):
        node.last_used += 1
        queue.offer(node)
    assert len(queue) == 1


def test_reservations_that_come_and_go_do_not_grow_the_heap():
    nodes = [thing(i) for i in range(50)]
    queue = queue_of(LookAheadLru(), *nodes)
    for _ in range(100):
        for node in nodes:
            node.reserved = 1
        assert queue.peek() is nodes[0]
        for node in nodes:
            node.reserved = None
            queue.offer(node)
    assert len(queue) <= 2 * len(nodes) + 64
    assert drain(queue) == nodes


def test_chunks_that_lose_their_copy_are_let_go():
    queue = queue_of(Lru(), *(thing(i) for i in range(1000)))
    for number in range(1000):
        node = thing(number)
        queue.offer(node)
        queue.discard(node)
    assert len(queue) <= 2 * 1000 + 64


def test_a_new_epoch_ranks_everything_again():
    class Turning:
        epoch = 0

        def rank(self, node: Node) -> tuple[float, ...]:
            return (-node.last_used if self.epoch else node.last_used,)

        used = evicted = lambda self, node: None

    policy = Turning()
    nodes = [thing(i) for i in range(5)]
    queue = queue_of(policy, *nodes)
    assert queue.peek() is nodes[0]
    policy.epoch = 1
    assert drain(queue) == nodes[::-1]


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.sampled_from(["use", "off", "on"])),
        max_size=60,
    )
)
def test_victims_come_in_the_order_of_a_full_sort(steps):
    nodes = [thing(i) for i in range(10)]
    queue = queue_of(Lru(), *nodes)
    clock = 10
    for index, what in steps:
        node = nodes[index]
        if what == "use":
            clock += 1
            node.last_used = clock
        else:
            node.pins = what == "off"
            if not node.pins:
                queue.offer(node)
        expected = min(filter(host_evictable, nodes), key=Lru().rank, default=None)
        assert queue.peek() is expected
    rest = sorted(filter(host_evictable, nodes), key=Lru().rank)
    assert drain(queue) == rest
