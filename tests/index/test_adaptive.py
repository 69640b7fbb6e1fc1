"""The adaptive policy follows whichever candidate would have hit most."""

from __future__ import annotations

import hashlib
import random
from itertools import pairwise

import pytest

from pcr_core.errors import ConfigError
from pcr_core.index import adaptive
from pcr_core.index.adaptive import Adaptive, ShadowCache
from pcr_core.index.chunk import ChunkKey
from pcr_core.index.eviction import LookAheadLru, Lru, Pgdsf
from pcr_core.index.look_ahead import LookAhead


def key(name: str) -> ChunkKey:
    return ChunkKey(name.encode())


def frequent(rounds: int, start: int = 0) -> list[list[ChunkKey]]:
    """Three hot chunks, each before two that never return: memory wins, LRU is lost."""
    names = []
    for number in range(start, start + rounds):
        names += [f"hot{number % 3}", f"once{number}", f"never{number}"]
    return [[key(name)] for name in names]


def recent(rounds: int, start: int = 0) -> list[list[ChunkKey]]:
    """Each chunk comes again after a while, and then never more: recency wins."""
    names = []
    for number in range(start, start + rounds):
        names += [f"new{number}", f"new{number - 2}"]
    return [[key(name)] for name in names]


def play(policy: Adaptive, requests: list[list[ChunkKey]]) -> list[str]:
    """Observe requests; return who was in charge after each."""
    charge = []
    for keys in requests:
        policy.observe(keys, cost=1.0)
        charge.append(policy.current)
    return charge


# --- shadow caches ---


def test_a_shadow_cache_is_a_cache():
    shadow = ShadowCache(Lru(), 3)
    a, b, c, d = (key(name) for name in "abcd")
    assert [shadow.request([a, b], 1.0), shadow.request([a, b], 1.0)] == [0, 2]
    assert shadow.request([a, c], 1.0) == 1
    assert shadow.request([d], 1.0) == 0
    assert shadow.request([a, c], 1.0) == 2
    assert shadow.request([a, b], 1.0) == 1
    assert shadow.tree.audit() == []


def test_a_path_longer_than_the_shadow_keeps_its_head():
    shadow = ShadowCache(Lru(), 2)
    path = [key(name) for name in "abcd"]
    assert [shadow.request(path, 1.0) for _ in range(3)] == [0, 2, 2]
    assert len(shadow.tree) == 3  # with the root


def test_a_shadow_counts_the_cost_of_what_it_missed():
    shadow = ShadowCache(Pgdsf(), 9)
    shadow.request([key("a")], 2.0)
    shadow.request([key("a"), key("b")], 6.0)
    a, b = shadow.tree.match([key("a"), key("b")])
    assert a is not None
    assert b is not None
    assert (a.uses, a.misses, a.cost_sum) == (2, 1, 2.0)
    assert (b.uses, b.misses, b.cost_sum) == (1, 1, 6.0)


# --- following ---


def test_frequency_with_memory_takes_over_where_it_hits_more():
    policy = Adaptive(5)
    charge = play(policy, frequent(200))
    assert charge[0] == "lookahead-lru"
    assert charge[-1] == "pgdsf"
    assert policy.epoch == 1
    rates = policy.rates
    assert rates["pgdsf"] > rates["lru"] + 0.1


def test_it_comes_back_when_recency_wins():
    policy = Adaptive(5)
    play(policy, frequent(200))
    assert policy.current == "pgdsf"
    play(policy, recent(1000))
    assert policy.current == "lookahead-lru"
    rates = policy.rates
    assert rates["lru"] == rates["lookahead-lru"] > rates["pgdsf"]
    assert policy.epoch == 2


def test_changes_are_far_apart():
    policy = Adaptive(5)
    requests = []
    for number in range(12):
        requests += frequent(30, 1000 * number) + recent(40, 1000 * number)
    charge = play(policy, requests)
    changes = [at for at in range(1, len(charge)) if charge[at] != charge[at - 1]]
    assert changes
    assert all(late - early >= 100 for early, late in pairwise(changes))


def test_a_tie_changes_nothing():
    policy = Adaptive(1000)
    play(policy, frequent(300))
    rates = policy.rates
    assert rates["pgdsf"] == rates["lru"] == rates["lookahead-lru"] > 0
    assert (policy.current, policy.epoch) == ("lookahead-lru", 0)


def test_the_queue_is_seen_by_the_candidate_that_looks_at_it():
    policy = Adaptive(4)
    requests = [[key(f"{number % 6}")] for number in range(300)]
    for at, keys in enumerate(requests):
        policy.look_ahead(requests[at : at + 4])
        policy.observe(keys, cost=1.0)
    rates = policy.rates
    assert rates["lookahead-lru"] > 0.3
    assert rates["lru"] == 0.0


def test_rates_are_shares():
    policy = Adaptive(3)
    assert set(policy.rates.values()) == {0.0}
    policy.observe([], cost=0.0)
    play(policy, [[key("a"), key("b")]] * 50)
    assert policy.rates == pytest.approx(dict.fromkeys(policy.rates, 0.98), abs=0.01)


def zipf(count: int) -> list[list[ChunkKey]]:
    """Paths of eight chunks, the i-th as often as 1 / i."""
    pick = random.Random(4)
    docs = pick.choices(range(400), [1 / (i + 1) for i in range(400)], k=count)
    return [
        [ChunkKey(hashlib.sha256(f"{doc}/{i}".encode()).digest()) for i in range(8)]
        for doc in docs
    ]


def test_a_large_tier_is_played_at_a_smaller_scale(monkeypatch):
    requests = zipf(1500)
    full = Adaptive(800)
    play(full, requests)
    monkeypatch.setattr(adaptive, "_LARGEST", 200)
    sampled = Adaptive(800)
    for at, keys in enumerate(requests):
        sampled.look_ahead(requests[at : at + 3])
        sampled.observe(keys, cost=1.0)
        for shadow in sampled._shadows.values():
            assert len(shadow.tree) <= 201
    assert 0.3 < full.rates["lru"] < 0.9
    assert sampled.rates["lru"] == pytest.approx(full.rates["lru"], abs=0.05)
    assert sampled.rates["pgdsf"] == pytest.approx(full.rates["pgdsf"], abs=0.05)


# --- being the policy of a live tier ---


def live(policy: Adaptive, requests: list[list[ChunkKey]], capacity: int) -> list[int]:
    """Serve requests from a cache that runs ``policy`` itself; hits of each."""
    cache = ShadowCache(policy, capacity, remembered=4 * capacity)
    view = LookAhead(cache.tree)
    hits = []
    for at, keys in enumerate(requests):
        window = requests[at : at + 2]
        view.update(window)
        policy.look_ahead(window)
        hits.append(cache.request(keys, 1.0))
        policy.observe(keys, cost=1.0)
        assert cache.tree.audit() == []
    return hits


def test_the_live_tier_gets_what_the_candidate_promised():
    policy = Adaptive(5)
    hits = live(policy, frequent(400), 5)
    assert policy.current == "pgdsf"
    alone = ShadowCache(Pgdsf(), 5, remembered=20)
    promised = [alone.request(keys, 1.0) for keys in frequent(400)]
    assert sum(hits[-300:]) == sum(promised[-300:]) == 100
    assert sum(hits[:60]) < 20


def test_before_a_change_it_is_the_default_policy():
    requests = recent(60)
    default = ShadowCache(LookAheadLru(), 5)
    view = LookAhead(default.tree)
    expected = []
    for at, keys in enumerate(requests):
        view.update(requests[at : at + 2])
        expected.append(default.request(keys, 1.0))
    assert live(Adaptive(5), requests, 5) == expected


def test_nothing_is_kept_of_chunks_that_are_gone():
    policy = Adaptive(4)
    live(policy, frequent(100), 4)
    assert len(policy._pgdsf._stamps) <= 5
    for shadow in policy._shadows.values():
        assert len(shadow.tree) <= 5


def test_a_capacity_is_needed():
    with pytest.raises(ConfigError, match="capacity"):
        Adaptive(0)
