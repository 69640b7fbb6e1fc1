"""The engine's policies on the five streams: none is a bad choice, one is safe."""

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
