"""The queue protects what it will need: the paper's example and its edge cases."""

from __future__ import annotations

import hashlib

import pytest

from pcr_core.index.chunk import ChunkKey
from pcr_core.index.eviction import EvictionPolicy, LookAheadLru, Lru
from pcr_core.index.look_ahead import MAX_WINDOW, LookAhead, window_size
from pcr_core.index.prefix_tree import Event, Host, Node, PrefixTree

ROOT = bytes(32)


def key(name: str) -> ChunkKey:
    return ChunkKey(hashlib.sha256(name.encode()).digest())


class Dram:
    """A DRAM tier of so many chunks; chunks have names, paths list them root first."""

    def __init__(self, policy: EvictionPolicy, capacity: int) -> None:
        self.tree = PrefixTree(policy)
        self.look_ahead = LookAhead(self.tree)
        self.capacity = capacity
        self.evicted: list[str] = []
        self.bypassed = 0
        self._names: dict[ChunkKey, str] = {}

    def keys(self, path: str) -> list[ChunkKey]:
        names = path.split()
        self._names.update({key(name): name for name in names})
        return [key(name) for name in names]

    def wait(self, *paths: str) -> None:
        """These requests wait, the nearest first."""
        self.look_ahead.update([self.keys(path) for path in paths])

    def use(self, path: str) -> int:
        """Run one request; return how many chunks hit."""
        nodes = self.tree.grow(ROOT, self.keys(path))
        self.tree.pin(nodes)
        missed = [i for i, node in enumerate(nodes) if node.host is Host.NONE]
        for index in missed:
            if self._make_room():
                self.tree.advance_host(nodes[index], Event.RESERVE)
                self.tree.advance_host(nodes[index], Event.FILL)
        self.tree.commit(nodes, 0, missed=missed)
        self.tree.unpin(nodes)
        assert self.tree.audit() == []
        return len(nodes) - len(missed)

    @property
    def ready(self) -> dict[str, Node]:
        ready = [node for node in self.tree.nodes() if node.host is Host.READY]
        return {self._names[node.key]: node for node in ready}

    @property
    def leaves(self) -> set[str]:
        return {name for name, node in self.ready.items() if not node.host_children}

    def _make_room(self) -> bool:
        if len(self.ready) < self.capacity:
            return True
        victim = self.tree.host_victim()
        if victim is None:
            self.bypassed += 1
            return False
        self.evicted.append(self._names[victim.key])
        self.tree.advance_host(victim, Event.EVICT)
        return True


def figure_7(policy: EvictionPolicy) -> Dram:
    """The tree before C9 comes: leaves C2, C4, C6, C8 from oldest to newest."""
    dram = Dram(policy, capacity=8)
    for path in ("C1 C2", "C1 C3 C4", "C5 C6", "C7 C8"):
        dram.use(path)
    assert dram.leaves == {"C2", "C4", "C6", "C8"}
    return dram


def test_figure_7_with_look_ahead():
    dram = figure_7(LookAheadLru())
    dram.wait("C1 C2")
    dram.use("C7 C8 C9")
    assert dram.evicted == ["C4"]
    assert dram.leaves == {"C6", "C2", "C3", "C9"}
    dram.look_ahead.clear()
    assert dram.use("C1 C2") == 2


def test_figure_7_with_plain_lru():
    dram = figure_7(Lru())
    dram.wait("C1 C2")
    dram.use("C7 C8 C9")
    assert dram.evicted == ["C2"]
    assert dram.leaves == {"C4", "C6", "C9"}


def test_the_whole_path_of_a_waiting_request_stays():
    dram = Dram(LookAheadLru(), capacity=6)
    dram.use("A B")
    dram.wait("A B")
    for number in range(8):
        dram.use(f"fill{number} more{number}")
    assert {"A", "B"} <= dram.ready.keys()
    assert set(dram.evicted).isdisjoint({"A", "B"})
    assert dram.use("A B") == 2


def test_a_needed_inner_chunk_stays_after_its_children_have_gone():
    dram = Dram(LookAheadLru(), capacity=4)
    dram.use("A B C")
    dram.wait("A B")
    for number in range(4):
        dram.use(f"fill{number} more{number}")
    assert "C" in dram.evicted
    assert dram.leaves >= {"B"}
    assert dram.use("A B") == 2


def test_when_all_leaves_are_reserved_the_latest_gives_way():
    dram = Dram(LookAheadLru(), capacity=6)
    for path in ("A1 A2", "B1 B2", "C1 C2"):
        dram.use(path)
    dram.wait("A1 A2", "B1 B2", "C1 C2")
    dram.use("new1 new2")
    assert dram.evicted == ["C2", "C1"]
    dram.use("new1 new2 new3")
    assert dram.evicted == ["C2", "C1", "B2"]
    assert dram.use("A1 A2") == 2


def test_when_all_are_pinned_the_insertion_is_skipped():
    dram = Dram(LookAheadLru(), capacity=2)
    assert dram.use("A1 A2 A3 A4") == 0
    assert (dram.bypassed, dram.evicted) == (2, [])
    assert dram.ready.keys() == {"A1", "A2"}
    assert dram.use("A1 A2 A3 A4") == 2


def test_the_nearest_of_several_requests_counts():
    dram = Dram(LookAheadLru(), capacity=3)
    dram.use("S A")
    dram.wait("X", "S A", "S B", "S A")
    found = dram.ready
    assert (found["S"].reserved, found["A"].reserved) == (1, 1)
    dram.wait("S B", "S A")
    assert (found["S"].reserved, found["A"].reserved) == (0, 1)


def test_arrival_changes_no_recency():
    dram = Dram(LookAheadLru(), capacity=3)
    for path in ("A", "B", "C"):
        dram.use(path)
    dram.wait("A")
    dram.look_ahead.clear()
    dram.use("D")
    assert dram.evicted == ["A"]


def test_a_new_window_replaces_the_old_one():
    dram = Dram(LookAheadLru(), capacity=2)
    dram.use("A")
    dram.use("B")
    dram.wait("A")
    dram.wait("B")
    dram.use("C")
    assert dram.evicted == ["A"]


@pytest.mark.parametrize(
    ("budget", "mean", "window"),
    [
        (100, 26, 3),
        (100, 25, 4),
        (100.0, 33.4, 2),
        (10, 26, 1),
        (0, 26, 1),
        (10**6, 26, MAX_WINDOW),
        (100, 0, MAX_WINDOW),
    ],
)
def test_the_window_holds_as_many_requests_as_the_tier(budget, mean, window):
    assert window_size(budget, mean) == window
