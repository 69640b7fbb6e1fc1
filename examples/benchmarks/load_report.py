"""What streams say: percentiles, what each step brings, and plots over the rate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from examples.benchmarks.common import Spread, ratios
from examples.benchmarks.load_bench import AGAIN, Stream
from examples.benchmarks.load_serving import Answer, Served

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from examples.benchmarks.report import Run

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
HEAD = (
    "load", "req/s", "system", "TTFT mean, ms", "P50", "P95", "P99", "queue mean, ms",
    "P95", "service mean, ms", "P95", "device", "DRAM", "SSD", "hits",
)  # fmt: skip
LATER_HEAD = (
    "load", "system", "E2EL mean, ms", "P50", "P95", "P99", "ITL mean, ms", "P99",
    "answered/s", "tokens/s out", "read ahead: used", "late", "computed though on SSD",
)  # fmt: skip
STEP_HEAD = (
    "load", "step", "mean TTFT ÷", "of each request: TTFT ÷", "service ÷",
)  # fmt: skip


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


def times_of(answer: Answer) -> dict[str, float]:
    """Seconds of one request."""
    timing = answer.result.timing
    return {
        "ttft": timing.ttft,
        "queue": timing.queue,
        "service": timing.ttft - timing.queue,
        "e2e": timing.total,
    }


def summary(*rounds: Served) -> dict[str, Any]:
    """The figures of one run, or of several together; times in seconds."""
    answers = [answer for served in rounds for answer in served.answers]
    times = [times_of(answer) for answer in answers]
    usages = [answer.result.usage for answer in answers]
    prompt = sum(usage.prompt_tokens for usage in usages)
    out = sum(usage.completion_tokens for usage in usages)
    seconds = sum(served.seconds for served in rounds)
    hits = {
        tier: sum(usage.cached_by_tier.get(tier, 0) for usage in usages)
        for tier in TIERS
    }
    return {
        **{
            name: percentiles([one[name] for one in times])
            for name in ("ttft", "queue", "service", "e2e")
        },
        "itl": percentiles([gap for served in rounds for gap in served.gaps]),
        "requests_per_second": len(answers) / seconds,
        "tokens_per_second": out / seconds,
        "prompt_tokens": prompt,
        "hit_tokens": hits,
        "hit_rate": sum(hits.values()) / max(1, prompt),
        "sent_late": max(served.late for served in rounds),
        "failed": sum(len(served.failed) for served in rounds),
    }


def figures(streams: Iterable[Stream]) -> list[dict[str, Any]]:
    """Everything, for JSON: a summary of each stream, and each of its requests."""
    found = []
    for one in streams:
        requests = [
            {
                "number": answer.number,
                "sent": answer.sent,
                **times_of(answer),
                "prompt_tokens": answer.result.usage.prompt_tokens,
                "cached": dict(answer.result.usage.cached_by_tier),
            }
            for answer in one.served.answers
        ]
        about = {
            "system": one.system,
            "disk": one.disk,
            "load": one.load,
            "rate": one.rate,
            "seed": one.seed,
            "engine": dict(one.decisions),
        }
        found.append({**about, **summary(one.served), "requests": requests})
    return found


Grouped = dict[float, dict[str, list[Stream]]]


def grouped(streams: Iterable[Stream]) -> Grouped:
    """Streams by load, then by label, seeds in order."""
    found: Grouped = {}
    for one in streams:
        found.setdefault(one.load, {}).setdefault(one.label, []).append(one)
    return found


def rows_of(streams: Sequence[Stream]) -> list[list[str]]:
    """A line for each system at each load: times to the first token, hits by tier."""
    rows = []
    for load, systems in grouped(streams).items():
        for label, rounds in systems.items():
            one = summary(*(stream.served for stream in rounds))
            hits = [one["hit_tokens"][t] / max(1, one["prompt_tokens"]) for t in TIERS]
            rows.append(
                [
                    f"{load:.2f}",
                    f"{rounds[0].rate:.2f}",
                    label,
                    *_ms(one["ttft"], "mean", "P50", "P95", "P99"),
                    *_ms(one["queue"], "mean", "P95"),
                    *_ms(one["service"], "mean", "P95"),
                    *(f"{share:.1%}" for share in (*hits, one["hit_rate"])),
                ]
            )
    return rows


def later_rows(streams: Sequence[Stream]) -> list[list[str]]:
    """A line for each system at each load: what comes after the first token."""
    rows = []
    for load, systems in grouped(streams).items():
        for label, rounds in systems.items():
            one = summary(*(stream.served for stream in rounds))
            counted = [
                str(sum(stream.decisions[name] for stream in rounds))
                for name in ("prefetch used", "prefetch late", "recomputed")
            ]
            rows.append(
                [
                    f"{load:.2f}",
                    label,
                    *_ms(one["e2e"], "mean", "P50", "P95", "P99"),
                    *_ms(one["itl"], "mean", "P99"),
                    f"{one['requests_per_second']:.2f}",
                    f"{one['tokens_per_second']:.1f}",
                    *counted,
                ]
            )
    return rows


def step_rows(
    streams: Sequence[Stream], steps: Sequence[tuple[str, str]]
) -> list[list[str]]:
    """What each step brings, as ratios: of means per seed, and request by request.

    Args:
        streams: All of them.
        steps: Labels of what is compared with what.
    """
    rows = []
    for load, systems in grouped(streams).items():
        for above, below in steps:
            if above not in systems or below not in systems:
                continue
            a, b = systems[above], systems[below]
            means = [
                [summary(one.served)["ttft"]["mean"] for one in side] for side in (a, b)
            ]
            rows.append(
                [
                    f"{load:.2f}",
                    f"{above} ÷ {below}",
                    ratios(*means).ratio(),
                    paired(a, b, "ttft").ratio(),
                    paired(a, b, "service").ratio(),
                ]
            )
    return rows


def paired(above: Sequence[Stream], below: Sequence[Stream], name: str) -> Spread:
    """Ratios of a time of the same request in two systems, all seeds together."""
    found = []
    for one, other in zip(above, below, strict=True):
        theirs = {a.number: times_of(a)[name] for a in other.served.answers}
        for answer in one.served.answers:
            if answer.number in theirs:
                found.append(times_of(answer)[name] / theirs[answer.number])
    return Spread.of(found or [float("nan")])


def draw_plots(run: Run, streams: Sequence[Stream]) -> None:
    """Plots of each time's mean, P50 and P99 over the rate, and of hits by tier."""
    shown = [one for one in streams if one.system != AGAIN]
    for name, title in TIMES.items():
        run.plot(name, partial(_times, streams=shown, name=name, title=title))
    run.plot("hit_rate", partial(_hits, streams=shown))


def _times(figure: Figure, streams: Sequence[Stream], name: str, title: str) -> None:
    figure.set_size_inches(13, 4)
    lines: dict[str, list[tuple[float, Mapping[str, float]]]] = {}
    for systems in grouped(streams).values():
        for label, rounds in systems.items():
            one = summary(*(stream.served for stream in rounds))[name]
            lines.setdefault(label, []).append((rounds[0].rate, one))
    axes: Sequence[Axes] = figure.subplots(1, 3)
    for axis, metric in zip(axes, ("mean", "P50", "P99"), strict=True):
        for label, points in lines.items():
            rates = [rate for rate, _ in points]
            values = [one[metric] * 1e3 for _, one in points]
            axis.plot(rates, values, marker="o", label=label)
        axis.set(xlabel="requests per second", ylabel=f"{title}, {metric}, ms")
        axis.set_ylim(bottom=0)
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4
    )


def _hits(figure: Figure, streams: Sequence[Stream]) -> None:
    """Prompt tokens reused, by tier, in bars: a group for each load."""
    groups = grouped(streams)
    figure.set_size_inches(4 * len(groups) + 1, 4.5)
    axes = figure.subplots(1, len(groups), sharey=True, squeeze=False)[0]
    for axis, (load, systems) in zip(axes, groups.items(), strict=True):
        below = np.zeros(len(systems))
        found = [summary(*(s.served for s in rounds)) for rounds in systems.values()]
        for tier in TIERS:
            shares = np.array(
                [
                    100 * one["hit_tokens"][tier] / max(1, one["prompt_tokens"])
                    for one in found
                ]
            )
            axis.bar(list(systems), shares, bottom=below, label=tier)
            below += shares
        axis.set_title(f"load {load:.2f}")
        axis.tick_params(axis="x", rotation=60)
    axes[0].set_ylabel("prompt tokens reused, %")
    axes[0].legend()


def _ms(one: Mapping[str, float], *metrics: str) -> list[str]:
    return [f"{one[metric] * 1e3:.0f}" for metric in metrics]
