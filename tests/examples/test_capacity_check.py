"""Predicted beside measured: the same figures, from the same stream."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from examples.benchmarks.capacity_check import (
    HEAD,
    measured_figures,
    plan_for,
    predicted,
    table_rows,
)
from examples.benchmarks.load_report import percentiles
from examples.benchmarks.load_work import recipe_for
from pcr_core.measuring import Measured
from pcr_core.simulator.capacity import predict
from pcr_core.simulator.kv_size import PACKAGED
from pcr_core.simulator.rates import Rates
from pcr_core.simulator.workloads import draw

ROOT = Path(__file__).resolve().parents[2]


def test_figures_stand_below_each_other() -> None:
    options = SimpleNamespace(output=4, ssd_bytes="1GiB", seed=2)
    rates = Rates(prefill=((0, 900),), ssd_read=1e9)
    recipe = recipe_for("W1-mini", 30, 60.0)
    plan = plan_for(options, recipe, Measured(rates, PACKAGED, 32), 2.0, 2**26)
    visits, trace = draw(recipe, 2), plan.trace()
    assert [one.arrival for one in trace.requests] == [v.arrival for v in visits]
    assert [one.prompt_tokens for one in trace.requests] == [
        sum(v.lengths) + recipe.query_tokens for v in visits
    ]
    forecast = predict(plan)["dram + ssd"]
    run = {
        "prompt_tokens": 1000,
        "hit_tokens": {"device": 10, "dram": 90, "ssd": 250},
        "ttft": percentiles([0.5]),
        "queue": percentiles([0.2]),
    }
    found = measured_figures(run)
    assert found["dram"] == 0.1
    assert found["ssd"] == 0.25
    assert set(found) == set(predicted(forecast))
    one = {"cache": "dram", "load": 0.5, "rate": 2.0}
    rows = table_rows([{**one, "predicted": predicted(forecast), "measured": found}])
    assert [len(row) for row in rows] == [len(HEAD)] * 3
    assert rows[1][3:] == ["measured", "10.0%", "25.0%", "500", "500", "500", "200"]
