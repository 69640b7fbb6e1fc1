"""Generated streams have the repetition that they are made for."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pcr_core.errors import ConfigError
from pcr_core.simulator.optimum import infinite_reuse
from pcr_core.simulator.workloads import RECIPES, STREAMS, Recipe, draw, generate

SMALL = Recipe(requests=60, documents=20, document_tokens=100, chunk_tokens=16)


def mean_reuse(name: str, seeds: int) -> float:
    """Per cent."""
    return 100 * float(
        np.mean([infinite_reuse(generate(name, seed)) for seed in range(seeds)])
    )


@pytest.mark.parametrize(
    ("name", "low", "high", "seeds"),
    [
        ("W1", 38.5, 41.1, 6),
        ("W2", 34.3, 36.7, 3),
        ("W1-mini", 36.0, 43.0, 25),
        ("W2-mini", 33.0, 40.0, 25),
        ("locality", 41.0, 43.5, 4),
        ("drift", 31.0, 34.0, 5),
        ("ragcache", 65.0, 69.0, 4),
    ],
)
def test_reuse_without_a_limit(name, low, high, seeds):
    """Ranges of the paper notes, 1.7; one stream alone is up to 3 points off."""
    assert low < mean_reuse(name, seeds) < high


@pytest.mark.parametrize(
    ("name", "tokens", "chunks"),
    [("W1", 6780, 15_400), ("W2", 6780, 32_800)],
)
def test_sizes(name, tokens, chunks):
    trace = generate(name, 1)
    assert len(trace.requests) == RECIPES[name].requests
    assert trace.mean_tokens == pytest.approx(tokens, rel=0.07)
    distinct = len({key for r in trace.requests for key in r.chunks})
    assert distinct == pytest.approx(chunks, rel=0.1)


def test_three_in_a_hundred_documents_serve_sixty_of_a_hundred_requests():
    """RAGCache's measurement, 2.1 of the paper notes."""
    counts = Counter(visit.documents[0] for visit in draw("ragcache", 0))
    served = sum(count for _, count in counts.most_common(30))
    assert served / 1000 == pytest.approx(0.60, abs=0.05)
    assert generate("ragcache").mean_tokens == pytest.approx(2 * 3718, rel=0.1)


@pytest.mark.parametrize("name", STREAMS)
def test_one_request_a_second(name):
    trace = generate(name, 3)
    arrivals = [request.arrival for request in trace.requests]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] / len(arrivals) == pytest.approx(1.0, rel=0.35)


def test_a_seed_is_a_stream():
    assert generate("W1-mini", 5) == generate("W1-mini", 5)
    assert generate("W1-mini", 5).requests != generate("W1-mini", 6).requests


def test_chunks_are_full_and_end_with_the_documents():
    for request in generate(SMALL).requests:
        documents = request.prompt_tokens - SMALL.query_tokens
        assert len(request.chunks) == documents // SMALL.chunk_tokens
        assert len(set(request.chunks)) == len(request.chunks)
        assert request.output_tokens == 16


@settings(max_examples=30)
@given(st.integers(0, 2**32))
def test_a_chunk_has_one_place_and_one_parent(seed):
    """Keys name everything before them, as the engine's do."""
    before: dict[bytes, tuple[bytes, ...]] = {}
    for request in generate(SMALL, seed).requests:
        for index, key in enumerate(request.chunks):
            path = request.chunks[:index]
            assert before.setdefault(key, path) == path


def test_keys_are_spread_like_digests():
    """Adaptive eviction samples large tiers by the first bytes of the keys."""
    keys = {key for request in generate("W1").requests for key in request.chunks}
    low = sum(key[0] < 128 for key in keys)
    assert low / len(keys) == pytest.approx(0.5, abs=0.02)


def test_a_document_has_two_continuations_at_most():
    """One first document, its two partners."""
    follow: dict[bytes, set[bytes]] = {}
    for request in generate(replace(SMALL, requests=400)).requests:
        follow.setdefault(request.chunks[0], set()).add(request.chunks[-1])
    assert max(map(len, follow.values())) == 2


def test_phases_share_documents_but_no_pairs():
    trace = generate(replace(SMALL, requests=2000, phases=2))
    halves = trace.requests[:1000], trace.requests[1000:]
    first, second = ({r.chunks for r in half} for half in halves)
    assert len(first & second) < len(first) / 4
    roots = [{path[0] for path in half} for half in (first, second)]
    assert len(roots[0] & roots[1]) > 15


def test_repeats_are_of_the_last_thirty():
    trace = generate(replace(SMALL, documents=5000, requests=300, repeat=0.5))
    paths = [request.chunks for request in trace.requests]
    back = [
        next((n for n in range(1, index + 1) if paths[index - n] == path), None)
        for index, path in enumerate(paths)
    ]
    found = [distance for distance in back if distance is not None]
    assert len(found) == pytest.approx(150, abs=40)
    assert sum(distance <= 30 for distance in found) > 0.95 * len(found)


def test_silences_part_the_bursts():
    gaps = np.diff([request.arrival for request in generate("burst").requests])
    assert np.median(gaps) < 0.4
    assert np.sum(gaps > 20) >= 3


@pytest.mark.parametrize("bad", ["W3", Recipe(requests=5, documents=2)])
def test_a_wrong_recipe_is_refused(bad):
    with pytest.raises(ConfigError, match=r"there are: W1, W2|at least 3"):
        generate(bad)
