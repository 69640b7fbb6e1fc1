"""PGDSF in a cache: the published trace, ageing, memory of what was evicted."""

from __future__ import annotations

from pcr_core.index.adaptive import ShadowCache
from pcr_core.index.chunk import ChunkKey
from pcr_core.index.eviction import Lru, Pgdsf, Rank
from pcr_core.index.node import Node


class Recording(Pgdsf):
    """Notes each victim and the clock after it."""

    def __init__(self) -> None:
        super().__init__()
        self.victims: list[str] = []
        self.clocks: list[float] = []

    def evicted(self, node: Node) -> None:
        super().evicted(node)
        self.victims.append(node.key.decode())
        self.clocks.append(self.clock)


class ClockBug(Recording):
    """Computes every priority with the clock of now, as a guide's sample code does."""

    def rank(self, node: Node) -> Rank:
        cost = node.cost_sum / max(node.misses, 1)
        return (self.clock + node.uses * cost, node.last_used)


def play(cache: ShadowCache, names: str, costs: dict[str, float]) -> list[str]:
    """Request one-chunk paths; return which of them hit, as name and occurrence."""
    hits, seen = [], dict.fromkeys(names, 0)
    for name in names:
        seen[name] += 1
        key = ChunkKey(name.encode())
        if cache.request([key], costs.get(name, 1.0)):
            hits.append(f"{name}{seen[name]}")
        assert cache.tree.audit() == []
    return hits


def test_the_published_trace():
    policy = Recording()
    hits = play(ShadowCache(policy, 3), "AABCDEEBDEC", {"C": 3.0})
    assert hits == ["A2", "E2", "E3"]
    assert policy.victims == ["B", "A", "D", "C", "B"]
    assert policy.clocks == [1, 2, 2, 3, 3]


def test_the_trace_tells_the_clock_bug_apart():
    policy = ClockBug()
    play(ShadowCache(policy, 3), "AABCDEEBDEC", {"C": 3.0})
    assert policy.victims[:2] == ["B", "D"]


def test_a_hot_chunk_ages():
    names = "H" * 40 + "".join(chr(200 + number) for number in range(100))
    policy, bug = Recording(), ClockBug()
    for each in (policy, bug):
        cache = ShadowCache(each, 3)
        for name in names:
            cache.request([ChunkKey(name.encode())], 1.0)
    assert "H" in policy.victims
    assert "H" not in bug.victims


def test_memory_keeps_what_returns_often():
    """Three hot chunks in turn, each before two that never return, in five slots."""
    names = []
    for number in range(120):
        names += [f"hot{number % 3}", f"once{number}", f"never{number}"]
    hits = {}
    for name, policy, remembered in (
        ("lru", Lru(), 0),
        ("pgdsf", Pgdsf(), 0),
        ("pgdsf with memory", Pgdsf(), 100),
    ):
        cache = ShadowCache(policy, 5, remembered=remembered)
        hits[name] = sum(cache.request([ChunkKey(n.encode())], 1.0) for n in names)
    assert hits["lru"] == hits["pgdsf"] == 0
    assert hits["pgdsf with memory"] > 60


def test_dear_chunks_stay_longer_than_cheap_ones():
    policy = Recording()
    play(ShadowCache(policy, 2), "DabcdeD", {"D": 4.5})
    assert policy.victims[:4] == ["a", "b", "c", "d"]


def test_leaves_go_before_their_parents_whatever_their_priority():
    policy = Recording()
    cache = ShadowCache(policy, 3)
    cache.request([ChunkKey(b"root"), ChunkKey(b"leaf")], 1.0)
    cache.request([ChunkKey(b"leaf2")], 0.5)
    for _ in range(5):
        cache.tree.commit([n for n in cache.tree.match([ChunkKey(b"leaf")]) if n], 0)
    cache.request([ChunkKey(b"n1"), ChunkKey(b"n2"), ChunkKey(b"n3")], 1.0)
    assert policy.victims == ["leaf2", "leaf", "root"]
