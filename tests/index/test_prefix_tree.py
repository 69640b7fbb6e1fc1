"""The prefix tree: transitions, residency, pins, history, reservations, tenants."""

from __future__ import annotations

import hashlib

import pytest

from pcr_core.index.chunk import ChunkKey
from pcr_core.index.eviction import LookAheadLru, Lru, Pgdsf
from pcr_core.index.ghosts import Ghosts
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


# --- history ---


def test_commit_counts_uses_and_the_cost_of_misses_once():
    tree = PrefixTree(Lru())
    path = fill(tree, "a", "b", "c")
    tree.commit(path, 0, missed=[1, 2], cost=0.5)
    tree.commit(path, 0, missed={2}, cost=1.5)
    assert [node.uses for node in path] == [3, 3, 3]
    assert [node.misses for node in path] == [0, 1, 2]
    assert [node.cost_sum for node in path] == [0.0, 0.5, 2.0]


def test_match_counts_nothing():
    tree = PrefixTree(Pgdsf(), remembered=9)
    path = fill(tree, "a", "b")
    before = [(n.uses, n.misses, n.cost_sum, n.last_used) for n in path]
    size = len(tree)
    for _ in range(10):
        tree.match(keys("a", "b", "unknown"))
    assert [(n.uses, n.misses, n.cost_sum, n.last_used) for n in path] == before
    assert len(tree) == size


def drop(tree: PrefixTree, *names: str) -> None:
    path = [node for node in tree.match(keys(*names)) if node is not None]
    for node in reversed(path):
        tree.advance_host(node, Event.EVICT)


def test_a_chunk_that_comes_back_has_its_counts_again():
    tree = PrefixTree(Lru(), remembered=8)
    path = fill(tree, "a", "b")
    tree.commit(path, 0, missed=[1], cost=2.0)
    drop(tree, "a", "b")
    assert len(tree) == 0
    a, b = tree.grow(ROOT, keys("a", "b"))
    assert (a.uses, a.misses, a.cost_sum) == (2, 0, 0.0)
    assert (b.uses, b.misses, b.cost_sum) == (2, 1, 2.0)
    assert a.last_used == 0


def test_without_memory_a_chunk_starts_anew():
    tree = PrefixTree(Lru(), remembered=0)
    fill(tree, "a")
    drop(tree, "a")
    assert tree.grow(ROOT, keys("a"))[0].uses == 0


def test_of_many_dropped_chunks_the_latest_are_remembered():
    tree = PrefixTree(Lru(), remembered=2)
    for name in "abc":
        fill(tree, name)
        drop(tree, name)
        assert tree.audit() == []
    known = [tree.grow(ROOT, keys(name))[0].uses for name in "cba"]
    assert known == [1, 1, 0]


def test_the_table_of_dropped_chunks_is_bounded():
    ghosts = Ghosts(3)
    for number in range(100):
        ghosts.remember(ChunkKey(bytes([number])), (number, 0.0, 0))
        assert len(ghosts) <= 3
    ghosts.remember(ChunkKey(bytes([97])), (1, 0.0, 0))
    ghosts.remember(ChunkKey(bytes([1])), (2, 0.0, 0))
    assert ghosts.recall(ChunkKey(bytes([98]))) is None
    assert ghosts.recall(ChunkKey(bytes([97]))) == (1, 0.0, 0)
    assert ghosts.recall(ChunkKey(bytes([97]))) is None


# --- reservations ---


def test_reservations_replace_each_other():
    tree = PrefixTree(LookAheadLru())
    a, b, c = fill(tree, "a", "b", "c")
    tree.reserve({a.key: 0, b.key: 3})
    assert [n.reserved for n in (a, b, c)] == [0, 3, None]
    tree.reserve({b.key: 1, c.key: 2})
    assert [n.reserved for n in (a, b, c)] == [None, 1, 2]
    assert tree.audit() == []
    tree.reserve({})
    assert [n.reserved for n in (a, b, c)] == [None, None, None]


def test_a_chunk_that_comes_later_is_reserved_from_birth():
    tree = PrefixTree(LookAheadLru())
    tree.reserve({keys("a")[0]: 4})
    (a,) = tree.grow(ROOT, keys("a"))
    assert a.reserved == 4


@pytest.mark.parametrize("later", [{}, {"old": 9}])
def test_a_reservation_that_ends_or_moves_back_gives_the_chunk_its_turn(later):
    tree = PrefixTree(LookAheadLru())
    (old,), (new,) = fill(tree, "old"), fill(tree, "new")
    tree.reserve({old.key: 0, new.key: 1})
    assert tree.host_victim() is new
    tree.reserve({new.key: 1, **{keys(name)[0]: at for name, at in later.items()}})
    assert tree.host_victim() is old


# --- the SSD tier ---


def store(tree: PrefixTree, name: str, nbytes: int, tenant: bytes = b""):
    (key,) = keys(name)
    tree.add_stored(key, ROOT + tenant, nbytes, 1, tenant)
    (node,) = tree.match([key])
    assert node is not None
    return node


def test_tenants_have_their_own_bytes_and_victims():
    tree = PrefixTree(Lru())
    x1, y1 = store(tree, "x1", 10, b"x"), store(tree, "y1", 5, b"y")
    x2 = store(tree, "x2", 7, b"x")
    tree.commit([x1], 100)
    assert (tree.tenant_bytes(b"x"), tree.tenant_bytes(b"y")) == (17, 5)
    assert tree.tenant_bytes(b"z") == 0
    assert tree.disk_bytes == 22
    assert tree.disk_victim(b"x") is x2
    assert tree.disk_victim(b"y") is y1
    assert tree.disk_victim(b"z") is None
    assert tree.disk_victim() in (x2, y1)
    for node in (x2, y1):
        tree.advance_disk(node, Event.EVICT)
    assert tree.disk_victim() is x1
    assert (tree.tenant_bytes(b"x"), tree.tenant_bytes(b"y")) == (10, 0)
    assert tree.audit() == []


def test_a_path_keeps_its_tenant():
    tree = PrefixTree(Lru())
    path = tree.grow(ROOT, keys("a", "b"), b"x")
    assert [node.tenant for node in path] == [b"x", b"x"]
    assert tree.grow(ROOT, keys("a"), b"other")[0].tenant == b"x"


def test_each_tier_tells_its_own_policy():
    host, disk = Pgdsf(), Pgdsf()
    tree = PrefixTree(host, disk)
    (a,) = path = fill(tree, "a")
    tree.advance_disk(a, Event.WRITE)
    tree.advance_disk(a, Event.STORE, 1)
    tree.commit(path, 0, missed=[0], cost=3.0)
    tree.advance_host(a, Event.EVICT)
    assert (host.clock, disk.clock) == (6.0, 0.0)
    tree.commit(path, 0)
    tree.advance_disk(a, Event.EVICT)
    assert (host.clock, disk.clock) == (6.0, 9.0)
    assert host._stamps == disk._stamps == {}


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_copy_lost_for_another_reason_moves_no_clock(tier):
    host, disk = Pgdsf(), Pgdsf()
    tree = PrefixTree(host, disk)
    (a,) = fill(tree, "a")
    tree.advance_disk(a, Event.WRITE)
    tree.advance_disk(a, Event.STORE, 1)
    tree.commit([a], 0, missed=[0], cost=3.0)
    advance = tree.advance_host if tier == "host" else tree.advance_disk
    advance(a, Event.REMOVE)
    assert (host.clock, disk.clock) == (0.0, 0.0)


def test_a_known_chunk_links_what_is_below_it_in_any_order():
    tree = PrefixTree(Lru())
    a, b, c, d = keys("a", "b", "c", "d")
    tree.add_known(c, b)
    tree.add_stored(d, c, 1, 1)
    tree.add_known(b, a)
    tree.add_stored(a, ROOT, 1, 1)
    assert tree.audit() == []
    assert [n.key for n in tree.subtree([a])] == [d, c, b, a]
    (low,) = tree.match([d])
    assert low is not None
    tree.advance_disk(low, Event.REMOVE)
    assert tree.match([b, c, d]) == [None, None, None]


def test_a_known_chunk_that_nothing_follows_is_pruned():
    tree = PrefixTree(Lru())
    a, b = keys("a", "b")
    tree.add_known(b, a)
    assert len(tree) == 2
    tree.prune()
    assert len(tree) == 0


def test_an_unknown_parent_is_not_taken_for_the_root():
    tree = PrefixTree(Lru())
    a, b = keys("a", "b")
    tree.add_stored(b, a, 1, 1)
    node = tree.match([b])[0]
    assert node is not None
    assert node.parent is not None
    assert (node.parent.key, node.parent.parent) == (a, None)


def test_subtree_is_everything_below_leaves_first():
    tree = PrefixTree(Lru())
    fill(tree, "a", "b", "c")
    fill(tree, "a", "b", "d", "e")
    fill(tree, "a", "x")
    fill(tree, "y")
    _, b, c = keys("a", "b", "c")
    below = tree.subtree([b, keys("unknown")[0], c])
    assert {node.key for node in below} == {b, c, *keys("a", "b", "d", "e")[2:]}
    order = {node: at for at, node in enumerate(below)}
    assert all(order[n] < order[n.parent] for n in below if n.key != b)
    assert tree.subtree([]) == []
    assert len(tree.subtree([ROOT])) == len(tree)


def test_nested_heads_come_in_one_order():
    tree = PrefixTree(Lru())
    names = [str(number) for number in range(8)]
    fill(tree, *names)
    path = keys(*names)
    below = tree.subtree([path[6], path[0], path[3]])
    assert [node.key for node in below] == path[::-1]
