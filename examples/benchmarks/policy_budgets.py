"""Hit rates over DRAM budgets by policy, by tier, and over look-ahead windows.

    python -m examples.benchmarks.policy_budgets

RAGCache's comparison of PGDSF with GDSF, LFU and LRU, and PCR's of look-ahead windows,
with the offline optimum beside them. Everything is simulated (``pcr_core.simulator``),
so the figures do not depend on the machine. A hit rate is the share of the prompt
tokens that need not be computed; budgets are in mean requests. Streams of one recipe
differ: a figure is the mean over seeds, a ratio the median of the ratios within a seed.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from examples.benchmarks.common import output_arguments, ratios
from examples.benchmarks.policies import Map, mapping
from examples.benchmarks.report import Run
from pcr_core.simulator.contenders import contenders
from pcr_core.simulator.lru_tiers import UNLIMITED, find_all
from pcr_core.simulator.optimum import infinite_reuse
from pcr_core.simulator.rates import Rates, read_rates
from pcr_core.simulator.replay import Price, replay, service_rate
from pcr_core.simulator.workloads import generate
from pcr_core.trace import Trace

STREAMS = ("ragcache", "W1", "W2", "locality", "drift")
BUDGETS = (8, 16, 32, 75, 150)
POLICIES = (
    "lru",
    "lfu",
    "gdsf",
    "pgdsf",
    "pgdsf+memory",
    "lookahead-lru",
    "adaptive",
    "optimum",
)
WINDOWS = (0, 2, 4, 6, 8, 10)
WINDOW_STREAMS = ("W1", "W2")
WINDOW_BUDGETS = (4, 12, 25)
LOADS = (0.9, 1.15)
SSD_BUDGETS = (150, 600)
# RAGCache's hit rates of PGDSF over the others', host memory of 8 to 128 GB, which is 8
# to 134 of its requests (arXiv 2404.12457).
REPORTED = {"gdsf": "1.02-1.32", "lru": "1.06-1.62", "lfu": "1.06-1.75"}
# A model of 7 billion parameters on an A10G, RAGCache's machine: 4,000 tokens in about
# a second; attention costs as much as all else at 27,000 tokens of context, by counting
# operations; reading the weights once takes 25 ms.
SEVEN_BILLION = Rates(prefill=((0, 4300), (27_000, 2150)), overhead=0.025)


@dataclass(frozen=True)
class Job:
    """One draw of a stream in one budget."""

    stream: str
    budget: int
    seed: int

    def trace(self) -> tuple[Trace, int]:
        """The stream, and the budget in chunks."""
        trace = generate(self.stream, self.seed)
        return trace, max(1, round(self.budget * trace.mean_chunks))


def price_of(rates: Rates) -> Price:
    """Seconds per computed token of a prefill, as RAGCache's profile has them."""

    def price(cached: int, computed: int) -> float:
        return (rates.overhead + rates.compute_seconds(cached, computed)) / computed

    return price


def by_policy(job: Job, rates: Rates, load: float) -> dict[str, float]:
    """Hit rates in % by policy, and of a cache without a limit."""
    trace, capacity = job.trace()
    speed = service_rate(trace, load)
    rows = contenders(POLICIES, (None,), price_of(rates))
    found = {
        row.name: 100 * replay(trace, row, capacity, speed).hit_rate for row in rows
    }
    return {**found, "no limit": 100 * infinite_reuse(trace)}


def by_window(job: Job, load: float) -> dict[str, float]:
    """Hit rates in % by window; 0 is plain LRU. Also the requests that wait."""
    trace, capacity = job.trace()
    speed = service_rate(trace, load)
    rows = contenders(
        ("lru", "lookahead-lru", "optimum"), [window for window in WINDOWS if window]
    )
    outcomes = [replay(trace, row, capacity, speed) for row in rows]
    *windows, best = [100 * outcome.hit_rate for outcome in outcomes]
    labels = [f"W={window}" for window in WINDOWS]
    found = dict(zip(labels, windows, strict=True))
    return {"queue": outcomes[0].queue, **found, "optimum": best}


def by_tier(job: Job) -> dict[str, tuple[float, float]]:
    """Hits in DRAM and on SSD in %, by the size of SSD in requests, LRU in both."""
    trace, dram = job.trace()
    tokens = sum(request.prompt_tokens for request in trace.requests)
    found = {}
    for ssd in (*SSD_BUDGETS, UNLIMITED):
        hits = find_all(trace, dram, ssd * trace.mean_chunks)
        share = 100 * trace.chunk_tokens / tokens
        shares = share * sum(hit.dram for hit in hits), share * sum(h.ssd for h in hits)
        found[size_name(ssd)] = shares
    return found


def size_name(requests: float) -> str:
    return "no limit" if requests == UNLIMITED else f"{requests:.0f}"


# --- what it adds up to ---


def mean_of(samples: Iterable[dict[str, float]], name: str) -> float:
    return statistics.mean(sample[name] for sample in samples)


def policy_rows(found: dict[tuple[str, int], list[dict[str, float]]]) -> list[Any]:
    columns = (*POLICIES, "no limit")
    return [
        [stream, str(budget), *(f"{mean_of(samples, name):.1f}" for name in columns)]
        for (stream, budget), samples in found.items()
    ]


def ratio_rows(found: dict[tuple[str, int], list[dict[str, float]]]) -> list[Any]:
    """PGDSF, with and without memory, over the others: range over the budgets."""
    rows = []
    for stream in dict.fromkeys(stream for stream, _ in found):
        for name in ("pgdsf", "pgdsf+memory"):
            cells = []
            for other in REPORTED:
                medians = [
                    ratios([s[name] for s in samples], [s[other] for s in samples])
                    for (mine, _), samples in found.items()
                    if mine == stream
                ]
                cells.append(span([spread.median for spread in medians]))
            rows.append([stream, name, *cells])
    return [*rows, ["RAGCache reports", "pgdsf", *REPORTED.values()]]


def span(values: Sequence[float]) -> str:
    return f"{min(values):.2f}-{max(values):.2f}"


def window_rows(
    found: dict[tuple[str, int, float], list[dict[str, float]]],
) -> list[Any]:
    names = ("queue", *(f"W={window}" for window in WINDOWS), "optimum")
    rows = []
    for (stream, budget, load), samples in found.items():
        cells = [f"{mean_of(samples, name):.1f}" for name in names]
        rows.append([stream, str(budget), f"{load:.2f}", *cells])
    return rows


def tier_rows(
    found: dict[tuple[str, int], list[dict[str, tuple[float, float]]]],
) -> list[Any]:
    """DRAM + SSD hits, and what share of the hits SSD has."""
    rows = []
    for (stream, budget), samples in found.items():
        cells = [f"{statistics.mean(s['no limit'][0] for s in samples):.1f}"]
        for name in samples[0]:
            ssd = statistics.mean(sample[name][1] for sample in samples)
            both = ssd + statistics.mean(sample[name][0] for sample in samples)
            cells.append(f"{ssd:.1f} ({ssd / both:.0%})" if both else "0.0")
        rows.append([stream, str(budget), *cells])
    return rows


# --- drawings ---


def draw_policies(figure: Figure, found: dict[Any, list[dict[str, float]]]) -> None:
    """Hit rate over the budget, a curve per policy, a panel per stream."""
    streams = list(dict.fromkeys(stream for stream, _ in found))
    figure.set_size_inches(4 * len(streams), 4)
    panels = figure.subplots(1, len(streams), squeeze=False)[0]
    for panel, stream in zip(panels, streams, strict=True):
        budgets = [budget for mine, budget in found if mine == stream]
        for name in (*POLICIES, "no limit"):
            values = [mean_of(found[stream, budget], name) for budget in budgets]
            style = "k--" if name == "optimum" else "k:" if name == "no limit" else "o-"
            panel.plot(budgets, values, style, label=name, markersize=3)
        panel.set(title=stream, xscale="log", xlabel="DRAM, mean requests")
        panel.set_xticks(budgets, [str(budget) for budget in budgets])
        panel.minorticks_off()
    finish(figure, panels)


def draw_windows(figure: Figure, found: dict[Any, list[dict[str, float]]]) -> None:
    """Hit rate over the window, a curve per budget and load, a panel per stream."""
    streams = list(dict.fromkeys(stream for stream, *_ in found))
    figure.set_size_inches(5 * len(streams), 4)
    panels = figure.subplots(1, len(streams), squeeze=False)[0]
    colours = {budget: f"C{index}" for index, budget in enumerate(WINDOW_BUDGETS)}
    for panel, stream in zip(panels, streams, strict=True):
        for (mine, budget, load), samples in found.items():
            if mine == stream:
                values = [mean_of(samples, f"W={window}") for window in WINDOWS]
                style = "o-" if load > 1 else "o--"
                label = f"R={budget}, load {load}"
                panel.plot(WINDOWS, values, style, color=colours[budget], label=label)
        panel.set(title=stream, xlabel="look-ahead window, requests")
    finish(figure, panels)


def finish(figure: Figure, panels: Sequence[Any]) -> None:
    """What all panels share: rates from 0 on, and one legend beside them."""
    for panel in panels:
        panel.set_ylim(bottom=0)
    panels[0].set_ylabel("hit rate, % of prompt tokens")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper")


# --- the run ---


def per_key(
    over: Map, work: Callable[[Job], Any], keys: Sequence[Any], seeds: Sequence[int]
) -> dict[Any, list[Any]]:
    """Samples by key; a key begins with a stream and a budget."""
    jobs = [Job(key[0], key[1], seed) for key in keys for seed in seeds]
    results = list(over(work, jobs))
    count = len(seeds)
    return {key: results[i * count : (i + 1) * count] for i, key in enumerate(keys)}


def as_records(names: Sequence[str], found: dict[Any, list[Any]]) -> list[Any]:
    return [
        {**dict(zip(names, key, strict=True)), "seeds": samples}
        for key, samples in found.items()
    ]


def measure(over: Map, options: argparse.Namespace, run: Run) -> None:
    seeds = range(options.seeds)
    rates = read_rates(options.rates) if options.rates else SEVEN_BILLION
    run.figures["rates"] = rates.as_dict()
    places = list(product(STREAMS, BUDGETS))
    work = partial(by_policy, rates=rates, load=options.load)
    policies = per_key(over, work, places, seeds)
    run.figures["policies"] = as_records(("stream", "budget"), policies)
    run.save()
    tiers = per_key(over, by_tier, places, seeds)
    run.figures["tiers"] = as_records(("stream", "budget"), tiers)
    windows: dict[Any, list[Any]] = {}
    for load in LOADS:
        keys = list(product(WINDOW_STREAMS, WINDOW_BUDGETS))
        found = per_key(over, partial(by_window, load=load), keys, seeds)
        windows |= {(*key, load): samples for key, samples in found.items()}
    run.figures["windows"] = as_records(("stream", "budget", "load"), windows)
    show(run, options, policies, tiers, windows)


def show(
    run: Run,
    options: argparse.Namespace,
    policies: dict[Any, list[Any]],
    tiers: dict[Any, list[Any]],
    windows: dict[Any, list[Any]],
) -> None:
    means = f"means of {options.seeds} streams"
    run.table(
        ("stream", "R", *POLICIES, "no limit"),
        policy_rows(policies),
        title=f"Hit rates in DRAM of R requests, %, {means}, load {options.load}",
    )
    run.table(
        ("stream", "policy", *(f"over {name}" for name in REPORTED)),
        ratio_rows(policies),
        title="PGDSF's hit rate over others': medians within streams, range over R",
    )
    sizes = (f"SSD of {size_name(size)}" for size in (*SSD_BUDGETS, UNLIMITED))
    run.table(
        ("stream", "R", "DRAM", *sizes),
        tier_rows(tiers),
        title=f"LRU, hits by tier, % (share of all hits that SSD has), {means}",
    )
    run.table(
        ("stream", "R", "load", "queue", *(f"W={w}" for w in WINDOWS), "optimum"),
        window_rows(windows),
        title=f"Look-ahead LRU, hit rates by window, %, {means}",
    )
    run.plot("dram", lambda figure: draw_policies(figure, policies))
    run.plot("windows", lambda figure: draw_windows(figure, windows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5, help="streams per recipe")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--load", type=float, default=0.9)
    parser.add_argument("--rates", type=Path, help="rates.json; default: 7B on an A10G")
    output_arguments(parser)
    options = parser.parse_args()
    with Run("policy_budgets", options) as run, mapping(options.jobs) as over:
        run.vouch()  # simulated
        measure(over, options, run)


if __name__ == "__main__":
    main()
