"""The engine's policies on the five streams, and beside the figures of the notes."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean

import pytest

from pcr_core.simulator.contenders import contenders
from pcr_core.simulator.replay import replay, service_rate
from pcr_core.simulator.workloads import RECIPES, STREAMS, Recipe, generate

POLICIES = ("lru", "lookahead-lru", "pgdsf+memory", "adaptive")


def hit_rates(recipe: Recipe, requests: float, seeds: range) -> dict[str, float]:
    """Mean hit rates in %, with a tier for so many mean requests and load 0.9."""
    found: dict[str, list[float]] = {name: [] for name in POLICIES}
    for seed in seeds:
        trace = generate(recipe, seed)
        capacity = round(requests * trace.mean_chunks)
        rate = service_rate(trace, 0.9)
        for contender in contenders(POLICIES, [None]):
            outcome = replay(trace, contender, capacity, rate)
            found[contender.name].append(100 * outcome.hit_rate)
    return {name: mean(rates) for name, rates in found.items()}


def check(rates: dict[str, float]) -> None:
    fixed = {name: rate for name, rate in rates.items() if name != "adaptive"}
    assert rates["lookahead-lru"] >= rates["lru"] - 0.5, rates
    assert rates["adaptive"] >= max(fixed.values()) - 1.0, rates


@pytest.mark.parametrize("stream", STREAMS)
def test_streams_of_a_quarter_of_their_size(stream):
    recipe = RECIPES[stream]
    quarter = replace(
        recipe, requests=recipe.requests // 4, documents=recipe.documents // 4
    )
    check(hit_rates(quarter, 75 / 4, seeds=range(2)))


@pytest.mark.slow
@pytest.mark.parametrize("budget", [12, 25, 75, 150])
@pytest.mark.parametrize("stream", STREAMS)
def test_streams(stream, budget):
    check(hit_rates(RECIPES[stream], budget, seeds=range(3)))


# Hit rates in % of LRU, look-ahead with windows 6 and 64, PGDSF, PGDSF with memory and
# the offline optimum in the paper notes, 1.7: from one stream each. Ours is, of the
# first 80, the one that is nearest in reuse and LRU; streams differ by more than that.
NOTES = {
    ("W1", 12, 0.90): (2.3, 2.8, 2.9, 2.5, 4.5, 16.1),
    ("W1", 12, 1.15): (2.3, 3.7, 9.4, 2.5, 4.5, 16.1),
    ("W1", 25, 0.90): (4.8, 5.2, 5.3, 6.1, 8.0, 22.3),
    ("W1", 75, 0.90): (13.0, 13.2, 13.3, 14.3, 15.5, 32.6),
    ("W1", 150, 0.90): (19.8, 19.8, 19.8, 21.8, 22.7, 39.6),
    ("locality", 25, 0.90): (33.5, 33.7, 33.7, 30.1, 29.9, 40.0),
    ("locality", 75, 0.90): (35.8, 35.8, 35.8, 36.4, 36.8, 42.0),
}
NEAREST = {"W1": 11, "locality": 7}


@pytest.mark.slow
@pytest.mark.parametrize(("stream", "budget", "load"), NOTES)
def test_each_policy_is_within_a_point_of_the_notes(stream, budget, load):
    trace = generate(stream, NEAREST[stream])
    capacity = round(budget * trace.mean_chunks)
    names = ("lru", "lookahead-lru", "pgdsf", "pgdsf+memory", "optimum")
    rates = [
        100 * replay(trace, one, capacity, service_rate(trace, load)).hit_rate
        for one in contenders(names, [6, 64])
    ]
    assert rates == pytest.approx(NOTES[stream, budget, load], abs=1.0)
