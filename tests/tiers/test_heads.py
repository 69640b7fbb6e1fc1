"""Chunks that begin alike: which is found, and what a lease may do with it."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from pcr_core.index.chunk import ChunkKey
from pcr_core.index.node import Event, Node
from pcr_core.tiers.siblings import Siblings
from tests.tiers.conftest import LAYOUT, NAMESPACE, keys_of

SIZE = LAYOUT.chunk_tokens


def serve(manager: Any, tokens: list[int], **options: Any) -> SimpleNamespace:
    """A request; returns the heads it was lent, and what it read."""
    keys = keys_of(tokens)
    usable = options.pop("usable", len(keys))
    with manager.lease(keys, tokens, usable, **options) as lease:
        lease.wait()
        heads = {i: (head.node.key, head.tokens) for i, head in lease.heads.items()}
        sources = set(lease.sources)
        for index in lease.sinks:
            lease.filled(index)
        assert manager.check_memory() == []
    assert manager.check_memory() == []
    return SimpleNamespace(heads=heads, sources=sources)


@pytest.fixture
def manager(kit: Any) -> Any:
    return kit.manager(ssd_chunks=0, shortest_head=2)


def test_a_chunk_that_begins_alike(manager: Any) -> None:
    first = [1, 1, 1, 1, 2, 3, 4, 5]
    serve(manager, first)
    found = serve(manager, [1, 1, 1, 1, 2, 3, 9, 9, 9])
    assert found.heads == {1: (keys_of(first)[1], 2)}
    assert found.sources == {0}
    assert serve(manager, [1, 1, 1, 1, 2, 9, 9, 9, 9]).heads == {}, "one is too few"
    assert serve(manager, [2, 3, 4, 5, 9, 9, 9, 9]).heads == {}, "behind other tokens"


def test_the_end_of_a_prompt(manager: Any) -> None:
    first = [1, 1, 1, 1, 2, 3, 4, 5]
    serve(manager, first)
    second = keys_of(first)[1]
    assert serve(manager, [*first[:7], 5]).heads == {}, "the chunk itself"
    assert serve(manager, first[:7]).heads == {1: (second, 2)}, "the last is computed"
    assert serve(manager, first[:6]).heads == {}
    assert serve(manager, [1, 1, 1]).heads == {0: (keys_of(first)[0], 2)}
    assert serve(manager, [1]).heads == {}


def test_only_behind_what_can_be_read(manager: Any) -> None:
    first = [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]
    serve(manager, first)
    keys = keys_of(first)
    node = manager._tree.match(keys)[1]
    serve(manager, [1, 1, 1, 1, 2, 2, 9, 9])
    manager._dram.evict(node)
    tokens = [*first[:8], 3, 3, 9, 9]
    found = serve(manager, tokens)
    assert set(found.heads) == {1}, "the third follows what is computed anyway"
    assert set(serve(manager, [*first[:8], 3, 3, 8, 8]).heads) == {2}


def test_behind_what_only_the_device_holds(manager: Any) -> None:
    first = [1, 1, 1, 1, 2, 3, 4, 5]
    serve(manager, first)
    manager._dram.free(manager._tree.match(keys_of(first))[0], Event.EVICT)
    tokens = [1, 1, 1, 1, 2, 3, 9, 9]
    assert set(serve(manager, tokens, resident=4).heads) == {1}


def test_what_must_not_be_read_has_no_heads(manager: Any) -> None:
    first = [1, 1, 1, 1, 2, 3, 4, 5]
    serve(manager, first)
    tokens = [1, 1, 1, 1, 2, 3, 9, 9, 9]
    assert serve(manager, tokens, usable=0).heads == {}
    assert serve(manager, [*tokens[:6], 8, 8, 8], usable=1).heads == {}
    assert serve(manager, first[:7], usable=0).heads == {}


def test_only_what_the_device_does_not_hold(manager: Any) -> None:
    first = [1, 1, 1, 1, 2, 3, 4, 5]
    serve(manager, first)
    for resident, expected in ((4, {1}), (5, {1}), (6, set()), (7, set())):
        tokens = [*first[:7], 90 + resident, 9]
        assert set(serve(manager, tokens, resident=resident).heads) == expected


def test_by_default_there_are_none(kit: Any) -> None:
    manager = kit.manager(ssd_chunks=0)
    serve(manager, [1, 1, 1, 1])
    assert serve(manager, [1, 1, 1, 9, 9]).heads == {}


def test_a_head_stays_where_it_is(kit: Any) -> None:
    """Nothing evicts it while it is lent, not even the chunk it is lent for."""
    manager = kit.manager(slots=1, ssd_chunks=0, shortest_head=2)
    keys, tokens = keys_of([1, 1, 1, 1]), [1, 1, 1, 9, 9]
    serve(manager, [1, 1, 1, 1])
    with manager.lease(keys_of(tokens), tokens, 1) as lease:
        assert lease.heads[0].node.key == keys[0]
        assert not lease.sinks
        assert manager.match(keys) == ["dram"]
        assert manager.heads(keys_of(tokens), tokens, 1) == {0: 3}
    with manager.lease(keys_of([5] * 4), [5] * 4, 1) as lease:
        assert lease.sinks, "afterwards it may go"


def test_a_chunk_on_ssd_only_is_not_looked_at(kit: Any) -> None:
    manager = kit.manager(slots=1, shortest_head=2)
    serve(manager, [1, 1, 1, 1])
    serve(manager, [2, 2, 2, 2])
    assert manager.match(keys_of([1] * 4)) == ["ssd"]
    assert serve(manager, [1, 1, 1, 9, 9]).heads == {}


def test_a_forgotten_chunk_is_not_used(manager: Any) -> None:
    first, document = [1, 1, 1, 1, 2, 2, 2, 2], b"d" * 16
    keys = keys_of(first)
    manager.register({document: keys[1]})
    serve(manager, first)
    tokens = [*first[:6], 9, 9, 9]
    with manager.lease(keys, first, 2):  # it is in use, and so not gone yet
        manager.end_forget(manager.begin_forget(document))
        assert manager._forgetting._doomed
        assert manager.heads(keys_of(tokens), tokens, 2) == {}
    assert len(manager._dram.siblings) == 1
    assert serve(manager, tokens).heads == {}


def test_forgotten_while_it_is_lent(manager: Any) -> None:
    first, document = [1, 1, 1, 1, 2, 2, 2, 2], b"d" * 16
    manager.register({document: keys_of(first)[1]})
    serve(manager, first)
    tokens = [*first[:6], 9, 9, 9]
    with manager.lease(keys_of(tokens), tokens, 2) as lease:
        assert set(lease.heads) == {1}
        manager.end_forget(manager.begin_forget(document))
        assert manager.check_memory() == []
    assert manager.match(keys_of(first))[1] == "none"
    assert manager.check_memory() == []


# --- the index ---


def brute(known: dict[Node, tuple[bytes, list[int]]], parent: bytes, tokens: list[int]):
    best = 0
    for other, chunk in known.values():
        if other == parent:
            limit = min(len(chunk), len(tokens))
            shared = next((i for i in range(limit) if chunk[i] != tokens[i]), limit)
            best = max(best, shared)
    return best


@given(st.integers(0, 2**32))
def test_siblings_against_a_search_of_all(seed: int) -> None:
    draw = random.Random(seed)
    siblings, known = Siblings(), {}
    parents = [NAMESPACE.root, b"p" * 32]
    for number in range(draw.randint(1, 40)):
        if known and draw.random() < 0.3:
            gone = draw.choice(list(known))
            siblings.remove(gone)
            del known[gone]
            continue
        # Ids whose bytes sort otherwise than the numbers do.
        tokens = [draw.choice([1, 256, 65_536, 2]) for _ in range(SIZE)]
        parent = draw.choice(parents)
        if any(one == (parent, tokens) for one in known.values()):
            continue
        node = Node(ChunkKey(number.to_bytes(32, "big")))
        siblings.add(node, parent, tokens)
        known[node] = parent, tokens
    assert set(siblings) == set(known)
    for _ in range(10):
        wanted = [draw.choice([1, 256, 65_536, 2]) for _ in range(draw.randint(0, 6))]
        parent = draw.choice(parents)
        barred = {node for node in known if draw.random() < 0.3}
        allowed = {n: one for n, one in known.items() if n not in barred}
        node, count = siblings.nearest(parent, wanted, allowed.__contains__)
        assert count == brute(allowed, parent, wanted)
        assert (node is None) == (count == 0)
        if node is not None:
            assert known[node][1][:count] == wanted[:count]
            assert node not in barred
