"""The PCR paper's comparison: time to first token over the request rate.

    python -m examples.benchmarks.serve_load
    python -m examples.benchmarks.serve_load --workload W2-mini --loads 0.8

Requests of the simulator's streams, in real text, arrive at random. Five systems, each
with one thing more than the one before (``load_systems``): no cache, DRAM (CCache),
DRAM and SSD (SCCache), overlap, and the queue (PCR). On a CPU with a fast disk reading
takes a few per cent of computing, so that the last two have next to nothing to hide; on
the machines of the paper the two are of a size. So each system with an SSD tier is also
measured on a disk that is slowed down until they are (an emulation, and named so).
Queue wait and service time are told apart: TTFT is their sum.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import pairwise

from examples.benchmarks.common import arguments
from examples.benchmarks.disk import Disk
from examples.benchmarks.load_bench import (
    AGAIN,
    LoadBench,
    Stream,
    again,
    bench_for,
    contenders,
    label_of,
    served_in_turn,
    stream_arguments,
)
from examples.benchmarks.load_report import (
    HEAD,
    LATER_HEAD,
    STEP_HEAD,
    draw_plots,
    figures,
    later_rows,
    rows_of,
    step_rows,
)
from examples.benchmarks.load_systems import PAPER, PREFETCH, SSD, System
from examples.benchmarks.report import Run

Pair = tuple[str, str]


def steps(systems: Sequence[System], disks: Sequence[Disk]) -> list[Pair]:
    """What is compared with what: each system with the one before it, on each disk."""
    found = dict[Pair, None]()
    for disk in disks:
        labels = {system.name: label_of(system, disk) for system in systems}
        pairs = [(above, below) for below, above in pairwise(labels.values())]
        if PREFETCH.name in labels and SSD.name in labels:
            pairs.append((labels[PREFETCH.name], labels[SSD.name]))
        found.update(dict.fromkeys(pairs))
    first, disk = contenders(systems, disks)[0]
    return [*found, (label_of(again(first), disk), label_of(first, disk))]


def tell_about(bench: LoadBench, disks: Sequence[Disk]) -> None:
    """What the streams are, on the terminal."""
    for name, value in bench.about().items():
        print(
            f"{name}: {value:.3f}" if isinstance(value, float) else f"{name}: {value}"
        )
    for disk in disks:
        if (share := bench.read_share(disk)) > 0:
            print(f"{disk}: reading a chunk takes {share:.2f} of computing it")


def report(run: Run, streams: Sequence[Stream], pairs: Sequence[Pair]) -> None:
    """Figures, tables and plots."""
    run.figures["runs"] = figures(streams)
    run.table(HEAD, rows_of(streams), "Times to first token, and hits by tier:")
    run.table(LATER_HEAD, later_rows(streams), "To the end of the answer:")
    title = f"What each step brings ({AGAIN}: the machine's drift):"
    run.table(STEP_HEAD, step_rows(streams, pairs), title)


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = arguments((__doc__ or "").splitlines()[0])
    stream_arguments(parser)
    names = [system.name for system in PAPER]
    parser.add_argument("--loads", type=float, nargs="+", default=[0.7, 1.0, 1.4])
    parser.add_argument("--systems", nargs="+", choices=names, default=names)
    return parser.parse_args()


def measured(
    run: Run,
    bench: LoadBench,
    entries: Sequence[tuple[System, Disk]],
    loads: Sequence[float],
) -> list[Stream]:
    """All streams; what there is so far is written after each."""
    run.figures["about"] = bench.about()
    streams = []
    for stream in served_in_turn(bench, entries, loads):
        streams.append(stream)
        run.figures["runs"] = figures(streams)
        run.save()
    return streams


def main() -> None:
    options = parsed()
    systems = [system for system in PAPER if system.name in options.systems]
    disks = [Disk.named(name) for name in options.disk]
    with Run("serve_load", options) as run, bench_for(options) as bench:
        tell_about(bench, disks)
        entries = contenders(systems, disks)
        streams = measured(run, bench, entries, options.loads)
        report(run, streams, steps(systems, disks))
        draw_plots(run, streams)


if __name__ == "__main__":
    main()
