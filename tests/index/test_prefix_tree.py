"""The prefix tree: transitions, residency counts, pins, recency, eviction order."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pcr_core.index.chunk import ChunkKey
from pcr_core.index.eviction import Lru
from pcr_core.index.prefix_tree import (
    DISK_TRANSITIONS,
    HOST_TRANSITIONS,
    Disk,
    Event,
    Host,
    IllegalTransitionError,
    PrefixTree,
    disk_evictable,
    host_evictable,
)

ROOT = bytes(32)


def keys(*names: str) -> list[ChunkKey]:
    """Keys of a path; equal leading names give equal leading keys."""
    path, parent = [], ROOT
    for name in names:
        parent = hashlib.sha256(parent + name.encode()).digest()
        path.append(ChunkKey(parent))
    return path


def fill(tree: PrefixTree, *names: str):
    path = tree.grow(ROOT, keys(*names))
    tree.pin(path)
    for node in path:
        if node.host is Host.NONE:
            tree.advance_host(node, Event.RESERVE)
            tree.advance_host(node, Event.FILL)
    tree.commit(path, 0)
    tree.unpin(path)
    return path


def evict_all(tree: PrefixTree) -> list[ChunkKey]:
    order = []
    while (node := tree.host_victim()) is not None:
        order.append(node.key)
        tree.advance_host(node, Event.EVICT)
    return order


@pytest.mark.parametrize("state", Host)
@pytest.mark.parametrize("event", Event)
def test_host_pairs_outside_the_table_raise(state, event):
    tree = PrefixTree(Lru())
    (node,) = tree.grow(ROOT, keys("a"))
    tree.pin([node])
    ways = {Host.NONE: [], Host.FILLING: ["RESERVE"], Host.READY: ["RESERVE", "FILL"]}
    for name in ways[state]:
        tree.advance_host(node, Event[name])
    if (state, event) in HOST_TRANSITIONS:
        tree.advance_host(node, event)
        assert node.host is HOST_TRANSITIONS[state, event]
    else:
        with pytest.raises(IllegalTransitionError, match=event.name):
            tree.advance_host(node, event)
        assert node.host is state


@pytest.mark.parametrize("state", Disk)
@pytest.mark.parametrize("event", Event)
def test_disk_pairs_outside_the_table_raise(state, event):
    tree = PrefixTree(Lru())
    (node,) = tree.grow(ROOT, keys("a"))
    tree.pin([node])
    ways = {Disk.NONE: [], Disk.WRITING: ["WRITE"], Disk.STORED: ["FIND"]}
    for name in ways[state]:
        tree.advance_disk(node, Event[name])
    if (state, event) in DISK_TRANSITIONS:
        tree.advance_disk(node, event)
        assert node.disk is DISK_TRANSITIONS[state, event]
    else:
        with pytest.raises(IllegalTransitionError, match=event.name):
            tree.advance_disk(node, event)
        assert node.disk is state


def test_match_reports_every_key_beyond_a_hole():
    tree = PrefixTree(Lru())
    path = keys("a", "b", "c")
    for index in (0, 2):
        tree.add_stored(path[index], path[index - 1] if index else ROOT, 100, 1)
    known = tree.match(path)
    assert [node is not None and node.disk is Disk.STORED for node in known] == [
        True,
        False,
        True,
    ]


def test_an_orphan_is_attached_when_its_path_is_used():
    tree = PrefixTree(Lru())
    a, b, c = keys("a", "b", "c")
    tree.add_stored(c, b, 100, 5)
    path = fill(tree, "a", "b")
    assert tree.audit() == []
    assert path[1].disk_children == 1
    orphan = tree.match([c])[0]
    assert orphan is not None
    assert orphan.parent is path[1]
    assert path[1].parent is path[0]
    assert path[0].key == a


def test_eviction_is_leaf_first_and_exposes_the_parent():
    tree = PrefixTree(Lru())
    fill(tree, "a", "b", "c")
    fill(tree, "x")
    fill(tree, "a", "y")
    a, b, c = keys("a", "b", "c")
    assert evict_all(tree) == [c, b, *keys("x"), *keys("a", "y")[1:], a]
    assert len(tree) == 0


def test_match_does_not_touch_the_order():
    tree = PrefixTree(Lru())
    for name in "abc":
        fill(tree, name)
    for _ in range(10):
        tree.match(keys("a"))
    assert evict_all(tree) == [keys(name)[0] for name in "abc"]


def test_one_commit_makes_parents_newer_than_children():
    tree = PrefixTree(Lru())
    path = fill(tree, "a", "b", "c")
    stamps = [node.last_used for node in path]
    assert stamps == sorted(stamps, reverse=True)
    assert len(set(stamps)) == 3


def test_stamps_never_run_backwards():
    tree = PrefixTree(Lru())
    tree.add_stored(keys("z")[0], ROOT, 1, stamp=10**6)
    path = fill(tree, "a")
    assert path[0].last_used > 10**6


def test_pinned_and_written_chunks_stay():
    tree = PrefixTree(Lru())
    (node,) = fill(tree, "a")
    tree.pin([node])
    assert tree.host_victim() is None
    tree.unpin([node])
    tree.advance_disk(node, Event.WRITE)
    assert tree.host_victim() is None
    tree.advance_disk(node, Event.STORE, 7)
    assert tree.host_victim() is node
    assert tree.disk_victim() is node
    assert node.disk_bytes == 7


def test_a_leaf_of_one_tier_may_have_children_in_the_other():
    tree = PrefixTree(Lru())
    a, b = fill(tree, "a", "b")
    tree.advance_disk(a, Event.WRITE)
    tree.advance_disk(a, Event.STORE, 1)
    assert not host_evictable(a)
    assert disk_evictable(a)
    assert tree.host_victim() is b


def test_unpinning_twice_is_an_error():
    tree = PrefixTree(Lru())
    path = fill(tree, "a")
    with pytest.raises(IllegalTransitionError, match="twice"):
        tree.unpin(path)


def test_bare_nodes_are_dropped_with_their_ancestors():
    tree = PrefixTree(Lru())
    path = tree.grow(ROOT, keys("a", "b", "c"))
    tree.pin(path)
    assert len(tree) == 4
    tree.unpin(path)
    assert len(tree) == 0
    assert tree.grow(ROOT, []) == []


class TreeMachine(RuleBasedStateMachine):
    """Random leases, copies and evictions; the tree's own audit after every step."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = PrefixTree(Lru())
        self.leases: list[list] = []

    @rule(names=st.lists(st.sampled_from("ab"), min_size=1, max_size=4))
    def lease(self, names):
        path = self.tree.grow(ROOT, keys(*names))
        self.tree.pin(path)
        self.leases.append(path)

    @rule(data=st.data())
    def advance(self, data):
        if not self.leases:
            return
        node = data.draw(st.sampled_from(data.draw(st.sampled_from(self.leases))))
        host = [event for state, event in HOST_TRANSITIONS if state is node.host]
        disk = [event for state, event in DISK_TRANSITIONS if state is node.disk]
        if node.disk is Disk.WRITING:
            host = []
        if node.host is not Host.READY:
            disk = [event for event in disk if event is not Event.WRITE]
        event = data.draw(st.sampled_from(host + disk))
        if event in host:
            self.tree.advance_host(node, event)
        else:
            self.tree.advance_disk(node, event, 1)

    @rule(data=st.data())
    def release(self, data):
        if self.leases:
            path = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
            self.tree.commit(path, 0)
            self.tree.unpin(path)

    @rule()
    def evict(self):
        node = self.tree.host_victim()
        if node is not None:
            self.tree.advance_host(node, Event.EVICT)

    @rule()
    def forget(self):
        node = self.tree.disk_victim()
        if node is not None:
            self.tree.advance_disk(node, Event.REMOVE)

    @invariant()
    def consistent(self):
        assert self.tree.audit() == []

    @invariant()
    def victims_are_the_oldest_leaves(self):
        for victim, evictable in (
            (self.tree.host_victim(), host_evictable),
            (self.tree.disk_victim(), disk_evictable),
        ):
            candidates = list(filter(evictable, self.tree.nodes()))
            if not candidates:
                assert victim is None
            else:
                oldest = min(node.last_used for node in candidates)
                assert victim is not None
                assert evictable(victim)
                assert victim.last_used == oldest


TestTreeMachine = TreeMachine.TestCase
TestTreeMachine.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)
