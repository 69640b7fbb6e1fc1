"""What ``pcr capacity`` predicts beside what the engine then does.

    python -m examples.benchmarks.capacity_check --dtypes float32

Rates are measured first, on the same model and threads. Then the stream (W1-mini by
default, from an empty cache) is predicted and served at each load. A load of 1 is the
rate at which an engine that reuses nothing would just keep up, by prediction. Hits in
rows at rest on the device are switched off, because the prediction has none.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from examples.benchmarks.common import arguments
from examples.benchmarks.load_report import summary
from examples.benchmarks.load_work import make_arrivals, recipe_for
from examples.benchmarks.report import Run
from examples.benchmarks.serve_load import (
    NOTHING,
    add_stream_arguments,
    serve,
    settings,
    tell_failed,
)
from pcr_core import Engine, EngineConfig
from pcr_core.config import parse_bytes
from pcr_core.measuring import Measured, measure
from pcr_core.model.loading import LoadedModel, load
from pcr_core.simulator.capacity import Forecast, Plan, predict
from pcr_core.simulator.workloads import Recipe

CACHES: dict[str, dict[str, Any]] = {
    "none": NOTHING,
    "dram": {"ssd_bytes": 0, "resident_rows": 0},
    "dram + ssd": {"resident_rows": 0},
}
HEAD = (
    "cache",
    "load",
    "req/s",
    "",
    "DRAM hits",
    "SSD hits",
    "TTFT mean, ms",
    "P50",
    "P95",
    "queue mean, ms",
)


def plan_for(options: Any, recipe: Recipe, measured: Measured, rate: float) -> Plan:
    """The run as the calculator is asked about it."""
    return Plan(
        recipe=replace(
            recipe,
            chunk_tokens=measured.chunk_tokens,
            output_tokens=options.output,
        ),
        rate=rate,
        kv=measured.kv,
        rates=measured.rates,
        dram_bytes=parse_bytes(options.dram_bytes),
        ssd_bytes=parse_bytes(options.ssd_bytes),
        seed=options.seed,
    )


def predicted(forecast: Forecast) -> dict[str, float]:
    """The figures of a forecast that are compared; seconds and shares."""
    return {
        "dram": forecast.dram_hits,
        "ssd": forecast.ssd_hits,
        "mean": forecast.ttft.mean,
        "p50": forecast.ttft.p50,
        "p95": forecast.ttft.p95,
        "queue": forecast.queue.mean,
    }


def measured_figures(found: dict[str, Any]) -> dict[str, float]:
    """The same of a run; what was in a row already counts as DRAM."""
    tokens, hits = max(1, found["prompt_tokens"]), found["hit_tokens"]
    return {
        "dram": (hits["device"] + hits["dram"]) / tokens,
        "ssd": hits["ssd"] / tokens,
        "mean": found["ttft"]["mean"],
        "p50": found["ttft"]["P50"],
        "p95": found["ttft"]["P95"],
        "queue": found["queue"]["mean"],
    }


def check(
    options: Any, folder: Path, loaded: LoadedModel, measured: Measured
) -> list[dict[str, Any]]:
    """Every cache at every load: a prediction and a run."""
    recipe = recipe_for(options.workload, options.requests, options.document_tokens)
    arrivals = make_arrivals(loaded.tokenizer, recipe, options.seed)
    objects = {"model": loaded.model, "tokenizer": loaded.tokenizer}
    alone = predict(plan_for(options, recipe, measured, 1.0))["none"].most
    runs = []
    for load_factor in options.loads:
        rate = load_factor * alone
        forecasts = predict(plan_for(options, recipe, measured, rate))
        for cache in options.caches:
            own = {**CACHES[cache], "namespace": f"{cache} {load_factor}"}
            config = EngineConfig(**{**settings(options, folder), **own})
            with Engine(config, **objects) as engine:
                engine.generate(arrivals[-1].prompt[-40:])
                served = serve(engine, arrivals, rate, options.output, None)
            runs.append(
                {
                    "cache": cache,
                    "load": load_factor,
                    "rate": rate,
                    "predicted": predicted(forecasts[cache]),
                    "measured": measured_figures(summary(served)),
                    "failed": len(served.failed),
                }
            )
    return runs


def table_rows(runs: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Two lines for each run."""
    rows = []
    for run in runs:
        about = [run["cache"], f"{run['load']:.2f}", f"{run['rate']:.2f}"]
        for kind in ("predicted", "measured"):
            found = run[kind]
            shares = [f"{found[name]:.1%}" for name in ("dram", "ssd")]
            times = [f"{found[n] * 1e3:.0f}" for n in ("mean", "p50", "p95", "queue")]
            rows.append([*about, kind, *shares, *times])
            about = ["", "", ""]
    return rows


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    add_stream_arguments(parser, caches=CACHES)
    parser.set_defaults(loads=[0.4, 0.8], dram_bytes="256MiB")
    options = parser.parse_args()
    with (
        Run("capacity_check", options) as run,
        tempfile.TemporaryDirectory() as folder,
    ):
        config = EngineConfig(**settings(options, Path(folder)))
        loaded = load(config)
        measured = measure(config, model=loaded.model, tokenizer=loaded.tokenizer)
        print(f"measured: {measured}")
        runs = check(options, Path(folder), loaded, measured)
        run.figures.update(measured=asdict(measured), runs=runs)
        run.table(HEAD, table_rows(runs))
        tell_failed(runs)


if __name__ == "__main__":
    main()
