"""Hit rates over budgets: rows, ratios and prices by hand, and one small run."""

from __future__ import annotations

import json
import sys

import pytest

from examples.benchmarks import policy_budgets
from examples.benchmarks.policy_budgets import (
    Job,
    by_policy,
    by_tier,
    by_window,
    price_of,
    ratio_rows,
    tier_rows,
)
from pcr_core.simulator.rates import Rates

SMALL = Job("W1-mini", 8, seed=1)


def test_a_price_per_computed_token():
    """Half a second for nothing, then 10 ms a token, 20 ms from 100 tokens on."""
    price = price_of(Rates(prefill=((0, 100), (100, 50)), overhead=0.5))
    assert price(0, 100) == pytest.approx((0.5 + 100 * 0.015) / 100)
    assert price(100, 1) > price(0, 1)


def test_policies_lie_between_nothing_and_what_nobody_beats():
    found = by_policy(SMALL, policy_budgets.SEVEN_BILLION, 0.9)
    assert set(found) == {*policy_budgets.POLICIES, "no limit"}
    for name in policy_budgets.POLICIES:
        assert 0 < found[name] <= found["optimum"] <= found["no limit"]


def test_no_window_is_lru():
    rates = by_policy(SMALL, policy_budgets.SEVEN_BILLION, 1.15)
    windows = by_window(SMALL, 1.15)
    assert windows["W=0"] == rates["lru"]
    assert windows["W=10"] >= windows["W=0"]
    assert windows["optimum"] == rates["optimum"]


def test_tiers_without_a_limit_have_all_there_is():
    found = by_tier(SMALL)
    rates = by_policy(SMALL, policy_budgets.SEVEN_BILLION, 0.9)
    assert sum(found["no limit"]) == pytest.approx(rates["no limit"])
    assert len({dram for dram, _ in found.values()}) == 1
    ssd = [ssd for _, ssd in found.values()]
    assert ssd == sorted(ssd)


def test_ratios_are_within_a_stream():
    """Medians of the seeds' ratios, then their range over budgets."""
    sample = {"pgdsf": 6.0, "pgdsf+memory": 9.0, "gdsf": 3.0, "lru": 2.0, "lfu": 12.0}
    twice = {**sample, "lru": 3.0}
    rows = ratio_rows({("S", 8): [sample], ("S", 16): [twice]})
    assert rows[0] == ["S", "pgdsf", "2.00-2.00", "2.00-3.00", "0.50-0.50"]
    assert rows[1] == ["S", "pgdsf+memory", "3.00-3.00", "3.00-4.50", "0.75-0.75"]
    assert rows[2][0] == "RAGCache reports"


def test_the_share_of_hits_on_ssd():
    rows = tier_rows({("S", 8): [{"150": (3.0, 1.0), "no limit": (3.0, 9.0)}]})
    assert rows == [["S", "8", "3.0", "1.0 (25%)", "9.0 (75%)"]]
    assert tier_rows({("S", 8): [{"no limit": (0.0, 0.0)}]})[0][-1] == "0.0"


def test_tables_plots_and_figures(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(policy_budgets, "STREAMS", ("W1-mini", "W2-mini"))
    monkeypatch.setattr(policy_budgets, "WINDOW_STREAMS", ("W1-mini",))
    monkeypatch.setattr(policy_budgets, "BUDGETS", (4, 8))
    monkeypatch.setattr(policy_budgets, "WINDOW_BUDGETS", (4,))
    arguments = ["x", "--seeds", "2", "--jobs", "1", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    policy_budgets.main()
    output = capsys.readouterr().out
    rows = [line for line in output.splitlines() if line.startswith("| W1-mini")]
    assert len(rows) == 2 + 2 + 2 + 2  # policies, ratios, tiers, windows by load
    figures = json.loads((tmp_path / "policy_budgets.json").read_text())["figures"]
    assert [len(figures[name]) for name in ("policies", "tiers", "windows")] == [
        4,
        4,
        2,
    ]
    assert len(figures["windows"][0]["seeds"]) == 2
    plots = {path.name for path in tmp_path.glob("*.png")}
    assert plots == {"policy_budgets-dram.png", "policy_budgets-windows.png"}
