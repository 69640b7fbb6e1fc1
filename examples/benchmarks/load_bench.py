"""Streams of one run: what they are made of, and an engine from empty for each.

A load of 1 is the rate at which an engine that reuses nothing would just keep up, if it
served one request at a time. Every stream of a load has the same requests at the same
times, so that each request can be compared with itself; and the first one is served
once more at the end, as a control: what that differs by is the machine's drift.
"""

from __future__ import annotations

import argparse
import math
import shutil
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from examples.benchmarks.disk import REAL, Disk, disk_name, on_disk
from examples.benchmarks.load_serving import Served, serve
from examples.benchmarks.load_systems import System
from examples.benchmarks.load_work import Arrival, make_arrivals, recipe_for
from pcr_core import Engine, EngineConfig, SamplingParams
from pcr_core.model.loading import LoadedModel, load
from pcr_core.simulator.kv_size import KvSize, kv_size_of
from pcr_core.simulator.workloads import RECIPES

_ALONE = 5  # requests served by themselves, to know what one takes
AGAIN = "again"


@dataclass(frozen=True)
class Stream:
    """One stream served by one system.

    Attributes:
        system: Its name.
        disk: What it read from; ``""`` without an SSD tier.
        load, rate, seed: Of the stream; the rate is in requests per second.
        served: What it gave.
        decisions: Rates that the engine had measured at the end, and its counters.
    """

    system: str
    disk: str
    load: float
    rate: float
    seed: int
    served: Served
    decisions: Mapping[str, Any]

    @property
    def label(self) -> str:
        """What rows and lines are called."""
        return f"{self.system}, {self.disk}" if self.disk else self.system


class LoadBench:
    """A loaded model and the streams for it, in one folder.

    Args:
        options: From a parser with ``stream_arguments``.
        folder: For chunks, which are removed after each stream, and for what an engine
            measures at its first start.

    Attributes:
        alone: Seconds of a request that finds nothing, served alone: a mean.
        kv: Size of the model's KV.
        alone_ttft: Seconds of that to the first token.
        chunk_tokens: Tokens per chunk.
        dram_bytes: Budget of the DRAM tier.

    Raises:
        SystemExit: If the folder has chunks already: they would be removed.
    """

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options = options
        self._folder = folder
        if (folder / "kv").exists():
            raise SystemExit(f"{folder} has chunks (kv) that would go; take another")
        self._loaded: LoadedModel = load(EngineConfig(**self.settings()))
        model = self._loaded.model
        dtype = str(model.dtype).removeprefix("torch.")
        self.kv: KvSize = kv_size_of(model.config.to_dict(), dtype)
        self._streams = {
            seed: self._arrivals(options.seed + seed) for seed in range(options.rounds)
        }
        self.dram_bytes = self._dram_bytes()
        self._measure_alone()

    def settings(self) -> dict[str, Any]:
        """What all engines have in common."""
        options = self._options
        return {
            "model": options.model,
            "cache_dir": self._folder,
            "dtype": options.dtypes[0],
            "threads": options.threads,
            "ssd_bytes": options.ssd_bytes,
            "store_answers": False,
            **dict(pair.split("=", 1) for pair in options.set),
        }

    @property
    def loaded(self) -> LoadedModel:
        """The model."""
        return self._loaded

    @property
    def mean_tokens(self) -> float:
        """Mean length of a prompt."""
        return statistics.fmean(
            len(one.prompt) for stream in self._streams.values() for one in stream
        )

    @property
    def rounds(self) -> int:
        """Streams with a seed of their own."""
        return len(self._streams)

    def about(self) -> dict[str, Any]:
        """What the figures rest on."""
        return {
            "workload": self._options.workload,
            "requests": len(self._streams[0]),
            "mean tokens": self.mean_tokens,
            "KV per request, bytes": round(self.mean_tokens) * self.kv.token_bytes,
            "DRAM, bytes": self.dram_bytes,
            "chunk tokens": self.chunk_tokens,
            "alone and cold, seconds": self.alone,
            "of that to the first token": self.alone_ttft,
        }

    def read_share(self, disk: Disk) -> float:
        """Seconds of reading a chunk from there, over those of computing it."""
        size = self.kv.file_bytes(self.chunk_tokens)
        return size / disk.bandwidth / self.chunk_tokens / self.token_seconds

    @property
    def token_seconds(self) -> float:
        """Seconds to compute a token of a prompt, on average."""
        return self.alone_ttft / self.mean_tokens

    def serve(self, system: System, disk: Disk, load: float, seed: int) -> Stream:
        """Serve the stream of a round, from an empty cache."""
        rate = load / self.alone
        arrivals, output = self._streams[seed], self._options.output
        concurrency = self._options.concurrency
        with on_disk(disk), self._engine(system) as engine:
            engine.generate(arrivals[-1].prompt[-40:], _answer(2))  # threads start
            served = serve(engine, arrivals, rate, output, concurrency)
            stats = engine.stats()
        shutil.rmtree(self._folder / "kv", ignore_errors=True)
        where = str(disk) if system.disk else ""
        decisions = {
            "read bandwidth": stats.decisions.read_bandwidth,
            "prefill rate": stats.decisions.prefill_rate,
            "window": stats.decisions.lookahead_window,
            "prefetch used": stats.cache.prefetch_used,
            "prefetch late": stats.cache.prefetch_late,
            "recomputed": stats.cache.recomputed,
            "overlap": stats.overlap,
        }
        found = Stream(system.name, where, load, rate, seed, served, decisions)
        _tell(found)
        return found

    def _engine(self, system: System) -> Engine:
        chunk = self.kv.token_bytes * self.chunk_tokens
        dram = self.dram_bytes if system.cache else chunk
        own = {"dram_bytes": dram, **system.settings}
        config = EngineConfig(**{**self.settings(), **own})
        model, tokenizer = self._loaded.model, self._loaded.tokenizer
        return Engine(config, model=model, tokenizer=tokenizer)

    def _arrivals(self, seed: int) -> list[Arrival]:
        options = self._options
        recipe = recipe_for(options.workload, options.requests, options.document_tokens)
        return make_arrivals(self._loaded.tokenizer, recipe, seed)

    def _dram_bytes(self) -> int:
        each = round(self.mean_tokens) * self.kv.token_bytes
        return math.ceil(self._options.dram_requests * each)

    def _measure_alone(self) -> None:
        """Serve a few requests, each by itself, that find nothing."""
        options, arrivals = self._options, self._streams[0]
        config = EngineConfig(**{**self.settings(), "ssd_bytes": 0})
        model, tokenizer = self._loaded.model, self._loaded.tokenizer
        with Engine(config, model=model, tokenizer=tokenizer) as engine:
            self.chunk_tokens = engine.stats().chunk_tokens
            engine.generate(arrivals[-1].prompt, _answer(options.output))
            timings = [
                engine.generate([999, *one.prompt[1:]], _answer(options.output)).timing
                for one in _of_usual_length(arrivals)
            ]
        self.alone = statistics.fmean(timing.total for timing in timings)
        self.alone_ttft = statistics.fmean(timing.ttft for timing in timings)


def label_of(system: System, disk: Disk) -> str:
    """What a stream is called that the system served from that disk."""
    return f"{system.name}, {disk}" if system.disk else system.name


def again(system: System) -> System:
    """The control: the same once more."""
    return replace(system, name=AGAIN)


def _of_usual_length(arrivals: Sequence[Arrival]) -> list[Arrival]:
    """The few whose lengths are nearest to the mean."""
    mean = statistics.fmean(len(one.prompt) for one in arrivals)
    return sorted(arrivals, key=lambda one: abs(len(one.prompt) - mean))[:_ALONE]


def _answer(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, min_tokens=tokens)


def _tell(stream: Stream) -> None:
    served = stream.served
    for message in served.failed:
        print(f"no answer: {message}")
    print(
        f"load {stream.load:.2f}, seed {stream.seed}, {stream.label}: "
        f"{served.seconds:.0f} s",
        flush=True,
    )


@contextmanager
def bench_for(options: argparse.Namespace) -> Iterator[LoadBench]:
    """The bench in ``options.folder``, or in a temporary one."""
    with tempfile.TemporaryDirectory() as temporary:
        yield LoadBench(options, options.folder or Path(temporary))


def contenders(
    systems: Sequence[System], disks: Sequence[Disk]
) -> list[tuple[System, Disk]]:
    """Each system on each disk; one without an SSD tier once."""
    alone = [(system, disks[0]) for system in systems if not system.disk]
    return alone + [(s, disk) for disk in disks for s in systems if s.disk]


def served_in_turn(
    bench: LoadBench, entries: Sequence[tuple[System, Disk]], loads: Sequence[float]
) -> Iterator[Stream]:
    """All streams: loads and seeds outside, systems inside, the first one twice."""
    for at in loads:
        for seed in range(bench.rounds):
            for system, disk in entries:
                yield bench.serve(system, disk, at, seed)
            first, disk = entries[0]
            yield bench.serve(again(first), disk, at, seed)


def stream_arguments(parser: argparse.ArgumentParser) -> None:
    """What a stream consists of, and how the engine that serves it is set."""
    parser.set_defaults(dtypes=["float32"], rounds=1)
    parser.add_argument("--workload", choices=RECIPES, default="W1-mini")
    parser.add_argument(
        "--requests",
        type=int,
        default=40,
        help="how many; documents become fewer with them, so that the reuse stays",
    )
    parser.add_argument("--document-tokens", type=float, help="mean length")
    parser.add_argument("--output", type=int, default=4, help="tokens per answer")
    parser.add_argument("--concurrency", type=int, help="requests under way at most")
    parser.add_argument(
        "--dram-requests",
        type=float,
        default=5.0,
        metavar="R",
        help="DRAM budget: KV of so many requests of mean length",
    )
    parser.add_argument("--ssd-bytes", default="20GiB")
    parser.add_argument(
        "--disk",
        type=disk_name,
        nargs="+",
        default=[REAL, "30"],
        metavar="MB/s",
        help=f"{REAL!r}, or what reads are slowed down to",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    parser.add_argument(
        "--folder",
        type=Path,
        help="for what a first start measures, and for chunks, which are removed; it "
        "must hold none; default: temporary",
    )
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="NAME=VALUE", help="EngineConfig fields"
    )
