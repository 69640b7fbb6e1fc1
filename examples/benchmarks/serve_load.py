"""Requests that arrive at random: latency, queueing and throughput over the load.

    python -m examples.benchmarks.serve_load

The streams are those of the simulator (W1-mini by default; ``--document-tokens``
scales them to the model), in real text, with Poisson arrivals. A load of 1 is the rate
at which an engine that reuses nothing and batches nothing would just keep up; it is
measured at the start. The loop is open: requests are sent at their time, however many
are waiting, unless ``--concurrency`` limits those under way, as a pool of clients does.

Caches: ``none`` keeps nothing, ``dram`` has no disk, ``ssd`` has both and reads only
what a request needs when its turn comes, ``prefetch`` is the default engine. Queue wait
and service time are told apart: TTFT is their sum.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from examples.benchmarks.common import arguments
from examples.benchmarks.load_report import METRICS, draw_plots, summary, table_rows
from examples.benchmarks.load_work import Arrival, make_arrivals, recipe_for
from examples.benchmarks.report import Run
from pcr_core import Completion, Engine, EngineConfig, PcrError, Result, SamplingParams
from pcr_core.model.loading import LoadedModel, load
from pcr_core.simulator.workloads import RECIPES

NOTHING = {"ssd_bytes": 0, "dram_bytes": "16MiB", "resident_rows": 0}
CACHES: dict[str, dict[str, Any]] = {
    "none": NOTHING,
    "dram": {"ssd_bytes": 0},
    "ssd": {"prefetch": "off"},
    "prefetch": {},
}


@dataclass
class Sent:
    """A request under way.

    Attributes:
        due: Seconds after the start at which it was to be sent.
        sent: When it was.
        completion: Its completion.
        heard: When text came, on the clock of ``time.perf_counter``.
    """

    due: float
    sent: float
    completion: Completion
    heard: list[float] = field(default_factory=list)

    def hear(self) -> None:
        """Something has come."""
        self.heard.append(time.perf_counter())


@dataclass(frozen=True)
class Served:
    """What one run gave.

    Attributes:
        seconds: From the first arrival to the last token.
        results: Of each request that ended well.
        gaps: Seconds between texts of one answer, all requests together.
        late: Seconds by which requests were sent later than due, at most.
        failed: Messages of requests that did not end well.
    """

    seconds: float
    results: list[Result]
    gaps: list[float]
    late: float
    failed: list[str]


def serve(
    engine: Engine,
    arrivals: Sequence[Arrival],
    rate: float,
    output: int,
    concurrency: int | None,
) -> Served:
    """Send every request at its time and wait for all of them."""
    params = SamplingParams(max_tokens=output, min_tokens=output)
    slots = threading.Semaphore(concurrency or len(arrivals))
    begun, sent, failed = time.perf_counter(), list[Sent](), list[str]()
    for arrival in arrivals:
        due = arrival.at / rate
        time.sleep(max(0.0, begun + due - time.perf_counter()))
        slots.acquire()
        try:
            completion = engine.submit(arrival.prompt, params)
        except PcrError as error:
            failed.append(str(error))
            slots.release()
            continue
        one = Sent(due, time.perf_counter() - begun, completion)
        completion.subscribe(one.hear)
        completion.subscribe(_releasing(completion, slots))
        sent.append(one)
    results = []
    for one in sent:
        try:
            results.append(one.completion.result())
        except PcrError as error:
            failed.append(str(error))
    gaps = [b - a for one in sent for a, b in zip(one.heard, one.heard[1:])]  # noqa: B905
    late = max((one.sent - one.due for one in sent), default=0.0)
    return Served(time.perf_counter() - begun, results, gaps, late, failed)


def _releasing(completion: Completion, slots: threading.Semaphore) -> Any:
    """A listener that gives the slot back once, when the request is over."""
    over = threading.Lock()

    def listen() -> None:
        if completion.done and over.acquire(blocking=False):
            slots.release()

    return listen


def cold_seconds(
    plain: dict[str, Any], objects: Any, arrivals: Sequence[Arrival], output: int
) -> float:
    """Mean time of a request that finds nothing, served alone."""
    params = SamplingParams(max_tokens=output, min_tokens=output)
    with Engine(EngineConfig(**{**plain, **NOTHING}), **objects) as engine:
        engine.generate(arrivals[-1].prompt, params)
        return statistics.fmean(
            engine.generate([999, *arrival.prompt[1:]], params).timing.total
            for arrival in arrivals[:5]
        )


def measure(options: Any, folder: Path, loaded: LoadedModel) -> list[dict[str, Any]]:
    """All runs: every cache at every load, each from an empty cache."""
    recipe = recipe_for(options.workload, options.requests, options.document_tokens)
    arrivals = make_arrivals(loaded.tokenizer, recipe, options.seed)
    objects = {"model": loaded.model, "tokenizer": loaded.tokenizer}
    plain = settings(options, folder)
    cold = cold_seconds(plain, objects, arrivals, options.output)
    print(
        f"{options.workload}: {len(arrivals)} requests of "
        f"{statistics.fmean(len(a.prompt) for a in arrivals):.0f} tokens on average, "
        f"{options.output} tokens out; alone and cold {cold * 1e3:.0f} ms each"
    )
    runs = []
    for load_factor in options.loads:
        for cache in options.caches:
            own = {**CACHES[cache], "namespace": f"{cache} {load_factor}"}
            config = EngineConfig(**{**plain, **own})
            with Engine(config, **objects) as engine:
                engine.generate(arrivals[-1].prompt[-40:])
                rate = load_factor / cold
                served = serve(
                    engine, arrivals, rate, options.output, options.concurrency
                )
            about = {"cache": cache, "load": load_factor, "rate": rate}
            runs.append({**about, **summary(served)})
    return runs


def settings(options: Any, folder: Path) -> dict[str, Any]:
    """What all runs have in common."""
    return {
        "model": options.model,
        "cache_dir": folder,
        "dtype": options.dtypes[0],
        "threads": options.threads,
        "dram_bytes": options.dram_bytes,
        "ssd_bytes": options.ssd_bytes,
        **dict(pair.split("=", 1) for pair in options.set),
    }


def add_stream_arguments(
    parser: argparse.ArgumentParser, caches: Mapping[str, Any]
) -> None:
    """What a stream consists of, and how the engine that serves it is set."""
    parser.set_defaults(dtypes=["float32"])
    parser.add_argument("--workload", choices=RECIPES, default="W1-mini")
    parser.add_argument("--requests", type=int, help="how many of the stream")
    parser.add_argument("--document-tokens", type=float, help="mean length")
    parser.add_argument("--output", type=int, default=16, help="tokens per answer")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.8, 1.1])
    parser.add_argument("--caches", nargs="+", choices=caches, default=[*caches])
    parser.add_argument("--dram-bytes", default="auto")
    parser.add_argument("--ssd-bytes", default="4GiB")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="NAME=VALUE", help="EngineConfig fields"
    )


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    add_stream_arguments(parser, CACHES)
    parser.add_argument("--concurrency", type=int, help="requests under way at most")
    options = parser.parse_args()
    with Run("serve_load", options) as run, tempfile.TemporaryDirectory() as folder:
        loaded = load(EngineConfig(**settings(options, Path(folder))))
        runs = run.figures["runs"] = measure(options, Path(folder), loaded)
        tell_failed(runs)
        run.table(("cache", "load", "req/s", "metric", *METRICS), table_rows(runs))
        draw_plots(run, runs)


def tell_failed(runs: Sequence[dict[str, Any]]) -> None:
    """Say which runs have requests without an answer."""
    for run in runs:
        if run["failed"]:
            print(f"{run['cache']} at {run['load']}: {run['failed']} failed")


if __name__ == "__main__":
    main()
