"""What ``pcr capacity`` predicts beside what the engine then does.

    python -m examples.benchmarks.capacity_check

Rates are measured first, on the same model and threads. Then the stream (W1-mini by
default, from an empty cache) is predicted and served at each load. Hits in rows at rest
on the device are switched off, because the prediction has none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from examples.benchmarks.common import arguments
from examples.benchmarks.disk import Disk
from examples.benchmarks.load_bench import LoadBench, bench_for, stream_arguments
from examples.benchmarks.load_report import summary
from examples.benchmarks.load_systems import NONE, System
from examples.benchmarks.load_work import recipe_for
from examples.benchmarks.report import Run
from pcr_core import EngineConfig
from pcr_core.config import parse_bytes
from pcr_core.measuring import Measured, measure
from pcr_core.simulator.capacity import Forecast, Plan, predict
from pcr_core.simulator.workloads import Recipe

CACHES = (
    replace(NONE, name="none"),
    System("dram", {"ssd_bytes": 0, "resident_rows": 0}, disk=False),
    System("dram + ssd", {"resident_rows": 0}),
)
SECONDS = ("mean", "p50", "p95", "queue")
_LEAST = 1e-3  # seconds: of less, a ratio says nothing
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


def plan_for(
    options: Any, recipe: Recipe, measured: Measured, rate: float, dram_bytes: int
) -> Plan:
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
        dram_bytes=dram_bytes,
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
    options: Any, bench: LoadBench, measured: Measured, keep: Callable[[Any], None]
) -> list[dict[str, Any]]:
    """Every cache at every load: a prediction and a run."""
    recipe = recipe_for(options.workload, options.requests, options.document_tokens)
    runs = []
    for at in options.loads:
        rate = at / bench.alone
        plan = plan_for(options, recipe, measured, rate, bench.dram_bytes)
        forecasts = predict(plan)
        for system in CACHES:
            served = bench.serve(system, Disk(), at, 0).served
            found = summary(served)
            runs.append(
                {
                    "cache": system.name,
                    "load": at,
                    "rate": rate,
                    "predicted": predicted(forecasts[system.name]),
                    "measured": measured_figures(found),
                    "service": found["service"],
                    "failed": found["failed"],
                }
            )
            keep(runs)
    return runs


def table_rows(runs: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Three lines for each run: both, and the one over the other."""
    rows = []
    for run in runs:
        about = [run["cache"], f"{run['load']:.2f}", f"{run['rate']:.2f}"]
        for kind in ("predicted", "measured"):
            found = run[kind]
            shares = [f"{found[name]:.1%}" for name in ("dram", "ssd")]
            times = [f"{found[name] * 1e3:.0f}" for name in SECONDS]
            rows.append([*about, kind, *shares, *times])
            about = ["", "", ""]
        both = [(run["predicted"][name], run["measured"][name]) for name in SECONDS]
        times = [f"{a / b:.2f}" if b > _LEAST else "" for a, b in both]
        rows.append([*about, "predicted ÷ measured", "", "", *times])
    return rows


def main() -> None:
    parser = arguments((__doc__ or "").splitlines()[0])
    stream_arguments(parser)
    parser.set_defaults(requests=36)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.4, 0.8])
    options = parser.parse_args()
    with Run("capacity_check", options) as run, bench_for(options) as bench:
        loaded, settings = bench.loaded, EngineConfig(**bench.settings())
        rates = measure(settings, model=loaded.model, tokenizer=loaded.tokenizer)
        run.figures.update(measured=asdict(rates), about=bench.about())
        print(f"measured: {rates}")

        def keep(runs: Any) -> None:
            run.figures["runs"] = runs
            run.save()

        run.table(HEAD, table_rows(check(options, bench, rates, keep)))


if __name__ == "__main__":
    main()
