"""What the index costs per chunk, from ten thousand to a million nodes.

    python -m examples.benchmarks.index_scale

Paths of 50 chunks that share prefixes; every chunk has a copy in both tiers. Figures
are microseconds of CPU time per chunk, the best of three rounds: other work on the
machine can only add to them. Memory is what Python allocated for a tree of at most
100,000 nodes, keys included.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
import tracemalloc
from collections.abc import Callable

from examples.benchmarks.common import output_arguments
from examples.benchmarks.report import Run
from pcr_core.index.chunk import ChunkKey
from pcr_core.index.eviction import Adaptive, make_policy
from pcr_core.index.look_ahead import LookAhead
from pcr_core.index.prefix_tree import Event, PrefixTree

ROOT = bytes(32)
LENGTH = 50
ROUNDS = 3
Keys = list[ChunkKey]


class Traffic:
    """Random paths that branch off earlier ones, as documents behind others do."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.paths: list[Keys] = []

    def key(self) -> ChunkKey:
        return ChunkKey(self._random.randbytes(32))

    def new_path(self) -> Keys:
        shared: Keys = []
        if self.paths:
            parent = self._random.choice(self.paths)
            shared = parent[: self._random.choice((0, 1, 1, 10, 25, 40))]
        path = shared + [self.key() for _ in range(LENGTH - len(shared))]
        self.paths.append(path)
        return path

    def some_paths(self, count: int) -> list[Keys]:
        return self._random.choices(self.paths, k=count)


def insert(tree: PrefixTree, keys: Keys, now: int) -> None:
    """What a request leaves behind: copies in both tiers, one use."""
    path = tree.grow(ROOT, keys)
    tree.pin(path)
    missed = []
    for index, node in enumerate(path):
        if not node.uses:
            missed.append(index)
            tree.advance_host(node, Event.RESERVE)
            tree.advance_host(node, Event.FILL)
            tree.advance_disk(node, Event.WRITE)
            tree.advance_disk(node, Event.STORE, 2**20)
    tree.commit(path, now, missed=missed, cost=1e-3)
    tree.unpin(path)


def build(policy: str, size: int) -> tuple[PrefixTree, Traffic]:
    traffic = Traffic(seed=7)
    tree = PrefixTree(make_policy(policy, capacity=1), make_policy(policy, capacity=1))
    while len(tree) < size:
        insert(tree, traffic.new_path(), 0)
    return tree, traffic


def use_paths(tree: PrefixTree, traffic: Traffic) -> tuple[float, int]:
    paths = traffic.some_paths(400)
    start = time.process_time()
    for keys in paths:
        path = [node for node in tree.match(keys) if node is not None]
        tree.commit(path, 0)
    return time.process_time() - start, sum(map(len, paths))


def look_ahead(tree: PrefixTree, traffic: Traffic) -> tuple[float, int]:
    """The head of a queue of eight leaves it, another request joins."""
    queue = traffic.some_paths(108)
    view = LookAhead(tree)
    start = time.process_time()
    for first in range(100):
        view.update(queue[first : first + 8])
    return time.process_time() - start, 100 * 8 * LENGTH


def evict(tree: PrefixTree, traffic: Traffic) -> tuple[float, int]:
    """Evict from DRAM and insert, between uses of other paths; only evicting counts."""
    spent, count = 0.0, 0
    for _ in range(100):
        for keys in traffic.some_paths(2):
            tree.commit([node for node in tree.match(keys) if node is not None], 0)
        start = time.process_time()
        for _ in range(LENGTH):
            victim = tree.host_victim()
            if victim is None:
                raise SystemExit("nothing to evict")
            tree.advance_host(victim, Event.EVICT)
        spent += time.process_time() - start
        count += LENGTH
        insert(tree, [traffic.key() for _ in range(LENGTH)], 0)
    return spent, count


def cycle(tree: PrefixTree, traffic: Traffic) -> tuple[float, int]:
    """Evict one chunk from each tier, insert one new leaf: the whole round trip."""
    leaves = [[*keys, traffic.key()] for keys in traffic.some_paths(2000)]
    start = time.process_time()
    for keys in leaves:
        for victim, advance in (
            (tree.host_victim(), tree.advance_host),
            (tree.disk_victim(), tree.advance_disk),
        ):
            if victim is None:
                raise SystemExit("nothing to evict")
            advance(victim, Event.EVICT)
        (node,) = tree.grow(keys[-2], keys[-1:])
        tree.pin([node])
        tree.advance_host(node, Event.RESERVE)
        tree.advance_host(node, Event.FILL)
        tree.advance_disk(node, Event.WRITE)
        tree.advance_disk(node, Event.STORE, 2**20)
        tree.commit([node], 0, missed=[0], cost=1e-3)
        tree.unpin([node])
    return time.process_time() - start, len(leaves)


WORK: dict[str, Callable[[PrefixTree, Traffic], tuple[float, int]]] = {
    "match + commit": use_paths,
    "reserve": look_ahead,
    "evict": evict,
    "evict both + insert": cycle,
}


def bytes_per_node(policy: str, size: int) -> float:
    tracemalloc.start()
    tree, traffic = build(policy, size)
    traffic.paths.clear()
    tree.host_victim(), tree.disk_victim()  # candidates are ranked when first asked for
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return held / len(tree)


def measure(policy: str, size: int) -> dict[str, float]:
    tree, traffic = build(policy, size)
    found = {}
    for name, work in WORK.items():
        rounds = [work(tree, traffic) for _ in range(ROUNDS)]
        found[name] = min(1e6 * seconds / count for seconds, count in rounds)
    del tree, traffic
    found["bytes per node"] = bytes_per_node(policy, min(size, 100_000))
    return found


def measure_adaptive(capacity: int) -> float:
    """Microseconds per chunk and candidate of feeding the shadow caches."""
    traffic = Traffic(seed=3)
    policy = Adaptive(capacity)
    while len(traffic.paths) * LENGTH < 2 * capacity:
        policy.observe(traffic.new_path(), cost=1e-3)
    best = float("inf")
    for _ in range(ROUNDS):
        paths = [traffic.new_path() for _ in range(100)] + traffic.some_paths(100)
        start = time.process_time()
        for keys in paths:
            policy.look_ahead(paths[:8])
            policy.observe(keys, cost=1e-3)
        spent = time.process_time() - start
        best = min(best, spent / (len(paths) * LENGTH * len(policy.rates)))
    return 1e6 * best


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", nargs="+", type=int, default=[10**4, 10**5, 10**6])
    parser.add_argument("--policies", nargs="+", default=["lookahead-lru", "pgdsf"])
    output_arguments(parser)
    with Run("index_scale", parser.parse_args(argv)) as run:
        measure_all(run)


def measure_all(run: Run) -> None:
    """Each policy at each size."""
    options, results = run.options, run.figures
    rows = []
    for policy in options.policies:
        for size in options.sizes:
            found = results[f"{policy} {size}"] = measure(policy, size)
            figures = [f"{value:.2f}" for value in found.values()]
            figures[-1] = f"{found['bytes per node']:.0f}"
            rows.append([policy, f"{size:,}", *figures])
    run.table(["policy", "nodes", *WORK, "bytes per node"], rows)
    adaptive = results["adaptive"] = measure_adaptive(min(options.sizes))
    print(f"adaptive: {adaptive:.2f} us per chunk and candidate")


if __name__ == "__main__":
    main()
