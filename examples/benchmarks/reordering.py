"""Serving what is cached first, when more comes than can be served.

    python -m examples.benchmarks.reordering

RAGCache's experiment (arXiv 2404.12457, reordering): under overload, the order of
arrival against that of cached over computed tokens, where no request is overtaken more
than ``max_overtakes`` times. It reports 1.2 to 2.1 times less time to first token, on a
cache in GPU and host memory. Here it is tried with DRAM alone, where what waits too
long is evicted, and with the SSD tier, where it is not: there the order can only serve
short work first.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from examples.benchmarks.common import arguments
from examples.benchmarks.disk import REAL, Disk
from examples.benchmarks.load_bench import (
    AGAIN,
    Stream,
    again,
    bench_for,
    contenders,
    label_of,
    stream_arguments,
)
from examples.benchmarks.load_report import METRICS, grouped, percentiles, summary
from examples.benchmarks.load_systems import DRAM, PREFETCH, System
from examples.benchmarks.report import Run
from examples.benchmarks.serve_load import Pair, measured, report, tell_about

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ORDERS = ("fcfs", "cache_aware")
CACHES = (replace(DRAM, settings={"ssd_bytes": 0}, name="DRAM"),
          replace(PREFETCH, name="DRAM + SSD"))  # fmt: skip
OVERTAKING = ("load", "system", "overtaken at all", *METRICS, "at most")


def ordered(cache: System, order: str, bound: int) -> System:
    """A cache whose queue is served in that order."""
    own = {"order": order, "max_overtakes": bound}
    return replace(
        cache, name=f"{cache.name} {order}", settings={**cache.settings, **own}
    )


def steps(systems: Sequence[System], disk: Disk) -> list[Pair]:
    """Each order compared with that of arrival; the control with the first one."""
    names = [label_of(system, disk) for system in systems]
    count, first = len(ORDERS), systems[0]
    found = [
        (name, names[index - index % count])
        for index, name in enumerate(names)
        if index % count
    ]
    return [*found, (label_of(again(first), disk), names[0])]


def overtaken(starts: Sequence[float]) -> list[int]:
    """How many later requests began before each one.

    Args:
        starts: When requests began to be served, in order of arrival.
    """
    times = np.asarray(starts)
    return [int((times[i + 1 :] < one).sum()) for i, one in enumerate(times)]


def overtaking(stream: Stream) -> list[int]:
    """The same of a stream."""
    return overtaken(
        [one.sent + one.result.timing.queue for one in stream.served.answers]
    )


def overtaking_rows(streams: Sequence[Stream]) -> list[list[str]]:
    """A line for each system at each load."""
    rows = []
    for load, systems in grouped(streams).items():
        for label, rounds in systems.items():
            counts = [count for stream in rounds for count in overtaking(stream)]
            found = percentiles([float(count) for count in counts])
            share = sum(count > 0 for count in counts) / max(1, len(counts))
            values = [f"{found[metric]:.1f}" for metric in METRICS]
            most = str(max(counts, default=0))
            rows.append([f"{load:.2f}", label, f"{share:.0%}", *values, most])
    return rows


def draw(figure: Figure, streams: Sequence[Stream]) -> None:
    """Share of requests with a first token by a time, a line for each order."""
    groups = grouped(one for one in streams if one.system != AGAIN)
    figure.set_size_inches(5 * len(groups) + 1, 4)
    axes = figure.subplots(1, len(groups), squeeze=False)[0]
    for axis, (load, systems) in zip(axes, groups.items(), strict=True):
        for label, rounds in systems.items():
            times = sorted(
                answer.result.timing.ttft
                for stream in rounds
                for answer in stream.served.answers
            )
            mean = summary(*(stream.served for stream in rounds))["ttft"]["mean"]
            shares = 100 * np.arange(1, len(times) + 1) / len(times)
            axis.step(times, shares, where="post", label=f"{label}: {mean:.1f} s")
        axis.set(xlabel="TTFT, s", ylabel="requests, %", title=f"load {load:.2f}")
        axis.legend(title="mean TTFT")


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = arguments((__doc__ or "").splitlines()[0])
    stream_arguments(parser)
    parser.set_defaults(disk=[REAL], requests=80, dram_requests=8.0)
    parser.add_argument("--loads", type=float, nargs="+", default=[1.3, 2.0])
    parser.add_argument("--max-overtakes", type=int, default=32)
    return parser.parse_args()


def main() -> None:
    options = parsed()
    disk = Disk.named(options.disk[0])
    with Run("reordering", options) as run, bench_for(options) as bench:
        tell_about(bench, [disk])
        bound = options.max_overtakes
        systems = [ordered(c, order, bound) for c in CACHES for order in ORDERS]
        streams = measured(run, bench, contenders(systems, [disk]), options.loads)
        report(run, streams, steps(systems, disk))
        run.table(OVERTAKING, overtaking_rows(streams), "How often overtaken:")
        run.plot("ttft", partial(draw, streams=streams))


if __name__ == "__main__":
    main()
