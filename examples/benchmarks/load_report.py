"""What a load test says: percentiles, a table, and plots over the request rate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
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


def draw_plots(runs: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """PNG files of each time's mean, P50 and P99, and of hit rates, over the rate."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    caches = list(dict.fromkeys(run["cache"] for run in runs))
    written = []
    for name, title in TIMES.items():
        figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.5), constrained_layout=True)
        for axis, metric in zip(axes, ("mean", "P50", "P99"), strict=True):
            for cache in caches:
                mine = [run for run in runs if run["cache"] == cache]
                rates = [run["rate"] for run in mine]
                values = [run[name][metric] * 1e3 for run in mine]
                axis.plot(rates, values, marker="o", label=cache)
            axis.set(xlabel="requests per second", ylabel=f"{title}, {metric}, ms")
            axis.set_ylim(bottom=0)
        axes[0].legend(title="cache")
        written.append(_save(figure, folder / f"{name}.png"))
        pyplot.close(figure)
    figure, axis = pyplot.subplots(figsize=(6, 3.5), constrained_layout=True)
    for cache in caches:
        mine = [run for run in runs if run["cache"] == cache]
        rates = [run["rate"] for run in mine]
        shares = [100 * run["hit_rate"] for run in mine]
        axis.plot(rates, shares, marker="o", label=cache)
    axis.set(xlabel="requests per second", ylabel="prompt tokens reused, %")
    axis.set_ylim(0, 100)
    axis.legend(title="cache")
    written.append(_save(figure, folder / "hit_rate.png"))
    pyplot.close(figure)
    return written


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=150)
    return path
