"""What a load test says: percentiles, a table, and plots over the request rate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from examples.benchmarks.report import Run
    from examples.benchmarks.serve_load import Served

PERCENTILES = (50, 75, 90, 95, 99)
METRICS = ("mean", *(f"P{p}" for p in PERCENTILES))
TIMES = {
    "ttft": "TTFT",
    "queue": "queue wait",
    "service": "service to first token",
    "itl": "between tokens",
    "e2e": "end to end",
}
TIERS = ("device", "dram", "ssd")


def percentiles(sample: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles of a sample; of none, not a number."""
    if not sample:
        return dict.fromkeys(METRICS, float("nan"))
    values = np.percentile(sample, PERCENTILES)
    names = [f"P{p}" for p in PERCENTILES]
    return {
        "mean": float(np.mean(sample)),
        **dict(zip(names, map(float, values), strict=True)),
    }


def summary(served: Served) -> dict[str, Any]:
    """The figures of one run; times in seconds."""
    timings = [result.timing for result in served.results]
    usages = [result.usage for result in served.results]
    prompt = sum(usage.prompt_tokens for usage in usages)
    out = sum(usage.completion_tokens for usage in usages)
    hits = {
        tier: sum(usage.cached_by_tier.get(tier, 0) for usage in usages)
        for tier in TIERS
    }
    return {
        "ttft": percentiles([timing.ttft for timing in timings]),
        "queue": percentiles([timing.queue for timing in timings]),
        "service": percentiles([timing.ttft - timing.queue for timing in timings]),
        "itl": percentiles(served.gaps),
        "e2e": percentiles([timing.total for timing in timings]),
        "requests_per_second": len(timings) / served.seconds,
        "tokens_per_second": out / served.seconds,
        "prompt_tokens": prompt,
        "hit_tokens": hits,
        "hit_rate": sum(hits.values()) / max(1, prompt),
        "sent_late": served.late,
        "failed": len(served.failed),
    }


def table_rows(runs: Iterable[dict[str, Any]]) -> list[list[str]]:
    """One line for each time of each run, in milliseconds, and one for the rest."""
    rows = []
    for run in runs:
        about = [run["cache"], f"{run['load']:.2f}", f"{run['rate']:.2f}"]
        for name, title in TIMES.items():
            values = [f"{run[name][metric] * 1e3:.0f}" for metric in METRICS]
            rows.append([*about, f"{title}, ms", *values])
            about = ["", "", ""]
        hits = ", ".join(f"{tier} {run['hit_tokens'][tier]}" for tier in TIERS)
        rows.append([*about, "requests/s", f"{run['requests_per_second']:.2f}"])
        rows.append([*about, "tokens/s out", f"{run['tokens_per_second']:.1f}"])
        rows.append([*about, f"hit rate ({hits} tokens)", f"{run['hit_rate']:.1%}"])
    width = 4 + len(METRICS)
    return [[*row, *[""] * (width - len(row))] for row in rows]


def draw_plots(run: Run, runs: Sequence[dict[str, Any]]) -> None:
    """Plots of each time's mean, P50 and P99, and of hit rates, over the rate."""
    for name, title in TIMES.items():
        run.plot(name, partial(_times, runs=runs, name=name, title=title))
    run.plot("hit_rate", partial(_hit_rates, runs=runs))


def _times(
    figure: Figure, runs: Sequence[dict[str, Any]], name: str, title: str
) -> None:
    figure.set_size_inches(12, 3.5)
    for axis, metric in zip(figure.subplots(1, 3), ("mean", "P50", "P99"), strict=True):
        for cache, mine in _by_cache(runs):
            values = [one[name][metric] * 1e3 for one in mine]
            axis.plot([one["rate"] for one in mine], values, marker="o", label=cache)
        axis.set(xlabel="requests per second", ylabel=f"{title}, {metric}, ms")
        axis.set_ylim(bottom=0)
        axis.legend(title="cache")


def _hit_rates(figure: Figure, runs: Sequence[dict[str, Any]]) -> None:
    axis = figure.subplots()
    for cache, mine in _by_cache(runs):
        shares = [100 * one["hit_rate"] for one in mine]
        axis.plot([one["rate"] for one in mine], shares, marker="o", label=cache)
    axis.set(xlabel="requests per second", ylabel="prompt tokens reused, %")
    axis.set_ylim(0, 100)
    axis.legend(title="cache")


def _by_cache(
    runs: Sequence[dict[str, Any]],
) -> list[tuple[str, list[dict[str, Any]]]]:
    names = dict.fromkeys(one["cache"] for one in runs)
    return [(name, [one for one in runs if one["cache"] == name]) for name in names]
