"""How far to look ahead into the queue: windows of 0 to 10 waiting requests.

    python -m examples.benchmarks.windows

The PCR paper's experiment (arXiv 2603.23049, figure 18): all else equal, how many of
the waiting requests are looked at, to keep their chunks and to read them from SSD. With
0 nothing is read ahead. The load is beyond what the engine can serve, because without a
queue there is nothing to look at; the disk is slowed down until reading takes about
what computing does, because a fast one leaves nothing to hide (``serve_load``).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from examples.benchmarks.common import arguments
from examples.benchmarks.disk import Disk
from examples.benchmarks.load_bench import (
    Stream,
    again,
    bench_for,
    contenders,
    label_of,
    stream_arguments,
)
from examples.benchmarks.load_report import grouped, summary
from examples.benchmarks.load_systems import System
from examples.benchmarks.report import Run
from examples.benchmarks.serve_load import Pair, measured, report, tell_about

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WINDOWS = (0, 2, 4, 6, 8, 10)


def window(size: int) -> System:
    """The engine as it is by default, with a window that is set."""
    return System(f"window {size}", {"lookahead_window": size})


def steps(systems: Sequence[System], disks: Sequence[Disk]) -> list[Pair]:
    """Each window compared with the first one, on each disk."""
    first, *others = systems
    found = [
        (label_of(other, disk), label_of(first, disk))
        for disk in disks
        for other in others
    ]
    return [*found, (label_of(again(first), disks[0]), label_of(first, disks[0]))]


def draw(figure: Figure, streams: Sequence[Stream], sizes: Sequence[int]) -> None:
    """Mean TTFT and hits over the window, a line for each load and disk."""
    figure.set_size_inches(10, 4)
    times, hits = figure.subplots(1, 2)
    shown = {window(size).name for size in sizes}
    for load, systems in grouped(streams).items():
        lines: dict[str, list[tuple[float, float]]] = {}
        for rounds in systems.values():
            if rounds[0].system in shown:
                one = summary(*(stream.served for stream in rounds))
                point = (one["ttft"]["mean"] * 1e3, 100 * one["hit_rate"])
                lines.setdefault(rounds[0].disk, []).append(point)
        for disk, points in lines.items():
            label = f"load {load:.2f}, {disk}"
            times.plot(sizes, [ms for ms, _ in points], marker="o", label=label)
            hits.plot(sizes, [share for _, share in points], marker="o", label=label)
    times.set(xlabel="look-ahead window, requests", ylabel="TTFT, mean, ms")
    hits.set(xlabel="look-ahead window, requests", ylabel="prompt tokens reused, %")
    for axis in (times, hits):
        axis.set_ylim(bottom=0)
    times.legend()


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = arguments((__doc__ or "").splitlines()[0])
    stream_arguments(parser)
    parser.set_defaults(disk=["30"], requests=80, dram_requests=12.0)
    parser.add_argument("--loads", type=float, nargs="+", default=[1.5])
    parser.add_argument("--windows", type=int, nargs="+", default=[*WINDOWS])
    return parser.parse_args()


def main() -> None:
    options = parsed()
    disks = [Disk.named(name) for name in options.disk]
    with Run("windows", options) as run, bench_for(options) as bench:
        tell_about(bench, disks)
        systems = [window(size) for size in options.windows]
        streams = measured(run, bench, contenders(systems, disks), options.loads)
        report(run, streams, steps(systems, disks))
        run.plot("windows", partial(draw, streams=streams, sizes=options.windows))


if __name__ == "__main__":
    main()
