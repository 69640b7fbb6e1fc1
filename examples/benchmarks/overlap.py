"""Time to first token with copies beside compute, by how much of a prompt is stored.

    python -m examples.benchmarks.overlap

    python -m examples.benchmarks.overlap --modes auto --rounds 15 --matched 0 0.5 0.95

The engine's own loop, on one thread, with the copies of each mode; ``auto`` is the mode
that the start-up probe chose, measured like the others: where it chose ``none``, the
two run the same code and what they differ by is noise. The second command compares only
these two, in more rounds. In every round each mode gets a prompt of which a part is in
DRAM and the rest is new; ratios are taken within a round. Beside them the model of the
layer-wise pipeline (PCR, arXiv 2603.23049): what is stage by stage within a layer, and
``T = sum(stages) + (n - 1) * max(stages)`` over ``n`` layers, from the times that one
layer's load, compute and offload took without overlap. It has a processor for each
stage; two threads on two cores do not.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from examples.benchmarks.common import Spread, arguments, ratios, real_tokens
from examples.benchmarks.report import Run
from pcr_core import EngineConfig, Result, SamplingParams
from pcr_core.index.chunk import ChunkLayout, chunk_keys
from pcr_core.loop import EngineLoop
from pcr_core.model.chunk_io import ChunkIO
from pcr_core.model.loading import LoadedModel, load
from pcr_core.model.overlap import OverlapChoice
from pcr_core.model.prefill import Prefill, Prefilled
from pcr_core.model.runner import Row, Runner
from pcr_core.model.setup import Prepared, model_prepared
from pcr_core.model.streams import OVERLAPS, streams_opened
from pcr_core.request import Request
from pcr_core.tiers import CudaRegistrar, open_tiers

MATCHED = (0.0, 0.25, 0.5, 0.75, 0.9, 0.95)
BESIDE = (*OVERLAPS[1:], "auto")
ONE = SamplingParams(max_tokens=1)


class NotingRunner(Runner):
    """Keeps the last prefill, for its forwards."""

    last: Prefill

    def begin_prefill(self, row: Row, tokens: Sequence[int], io: ChunkIO) -> Prefill:
        self.last = super().begin_prefill(row, tokens, io)
        return self.last


class Server:
    """The engine's loop on the caller's thread, with the copies of one mode.

    Not engines: each has a thread, and several threads that run torch slow each other
    down.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        prepared: Prepared,
        mode: Any,
        config: EngineConfig,
        lifetimes: ExitStack,
    ) -> None:
        self._namespace = prepared.namespace
        self._chunk = config.chunk_tokens
        streams = lifetimes.enter_context(streams_opened(loaded.device, mode))
        cuts = prepared.runner.cuts
        self.runner = NotingRunner(loaded, config.chunk_tokens, cuts, streams)
        self.runner.make_ready()
        lifetimes.callback(self.runner.close)
        layout = ChunkLayout(
            loaded.shapes,
            config.chunk_tokens,
            loaded.safetensors_dtype,
            loaded.dtype.itemsize,
        )
        on_cuda = loaded.device.type == "cuda"
        registrar = CudaRegistrar(loaded.device) if on_cuda else None
        tiers = open_tiers(
            layout,
            prepared.namespace,
            dram_bytes=int(config.dram_bytes),
            cache_dir=config.cache_path,
            ssd_bytes=0,
            registrar=registrar,
        )
        lifetimes.callback(tiers.close)
        self._loop = EngineLoop(self.runner, loaded.tokenizer, (), tiers)

    def ttft(self, tokens: list[int], cached: int) -> float:
        """Seconds to the first token of a prompt of which so much must be cached."""
        result = self.serve(tokens)
        assert result.usage.cached_tokens == cached, result.usage
        return float(result.timing.ttft)

    def serve(self, tokens: list[int]) -> Result:
        """Answer with one token."""
        while self._loop.idle():  # as an engine does when nobody waits
            pass
        keys = chunk_keys(self._namespace, tokens, self._chunk)
        request = Request(tokens, keys, ONE)
        self._loop.add(request)
        while self._loop.busy:
            self._loop.step()
        result: Result = request.completion.result(timeout=0)
        return result


def layer_times(prefilled: Prefilled) -> dict[str, float]:
    """Seconds of a layer's load, compute and offload in a prefill without overlap."""
    found: dict[str, float] = {}
    for forward in prefilled.forwards:
        pieces = [one for one in forward.intervals() if one.layer is not None]
        for lane in ("load", "compute", "offload"):
            took = [one.seconds for one in pieces if one.lane == lane]
            middle = statistics.median(took) if took else 0.0
            found[lane] = found.get(lane, 0.0) + middle
    return found


def predicted(mode: str, layers: int, times: dict[str, float]) -> float:
    """The pipeline's seconds for all layers."""
    load, compute, offload = times["load"], times["compute"], times["offload"]
    stages = {
        "none": [load + compute + offload],
        "up": [load, compute + offload],
        "down": [load + compute, offload],
        "both": [load, compute, offload],
    }[mode]
    return sum(stages) + (layers - 1) * max(stages)


class Bench:
    """A server for each mode, all on one model."""

    def __init__(self, dtype: str, options: Any, folder: Path) -> None:
        self._options = options
        self._lifetimes = ExitStack()
        config = EngineConfig(
            model=options.model,
            cache_dir=options.cache or folder,
            dtype=dtype,
            threads=options.threads,
            dram_bytes="512MiB",
            chunk_tokens=options.chunk_tokens,
        )
        self._loaded = load(config)
        prepared = self._lifetimes.enter_context(model_prepared(self._loaded, config))
        self.choice: OverlapChoice = prepared.overlap
        every = {**{mode: mode for mode in OVERLAPS}, "auto": self.choice.mode}
        modes = {name: every[name] for name in ("none", *options.modes)}
        self._servers = {
            name: Server(self._loaded, prepared, mode, config, self._lifetimes)
            for name, mode in modes.items()
        }
        self.cuts = prepared.runner.cuts.name
        self.layers = len(self._loaded.shapes)
        self._shared = real_tokens(self._loaded.tokenizer, options.tokens)

    def prompt(self, matched: int, number: int) -> list[int]:
        """So many stored tokens, then real text that nobody has seen there."""
        own = real_tokens(self._loaded.tokenizer, self._options.tokens, which=number)
        own[matched] = 1000 + number
        return [*self._shared[:matched], *own[matched:]]

    def measure(self, ratio: float) -> dict[str, Any]:
        """All modes with one part of the prompt stored."""
        chunk = self._options.chunk_tokens
        matched = round(ratio * self._options.tokens / chunk) * chunk
        seconds: dict[str, list[float]] = {name: [] for name in self._servers}
        layer: list[dict[str, float]] = []
        for server in self._servers.values():
            server.serve(self._shared)  # which earlier rounds may have evicted
        for number in range(-1, self._options.rounds):  # the first round warms up
            prompt = self.prompt(matched, number + 2)
            names = list(self._servers)
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                took = self._servers[name].ttft(prompt, matched)
                if number >= 0:
                    seconds[name].append(took)
            if number >= 0:
                layer.append(layer_times(self._servers["none"].runner.last.result()))
        times = {
            lane: statistics.median(one[lane] for one in layer) for lane in layer[0]
        }
        return {"matched": matched, "seconds": seconds, "layer": times}

    def close(self) -> None:
        self._lifetimes.close()


def row_of(dtype: str, ratio: float, found: dict[str, Any]) -> list[str]:
    """Each mode's time beside that of ``none``, within rounds."""
    seconds = found["seconds"]
    beside = [ratios(seconds[name], seconds["none"]).ratio() for name in seconds]
    return [
        dtype,
        f"{ratio:.2f} ({found['matched']})",
        Spread.of(seconds["none"]).ms(),
        *beside[1:],
    ]


def model_row(
    dtype: str, ratio: float, found: dict[str, Any], layers: int
) -> list[str]:
    """The model's ratios, with what belongs to no layer taken from ``none``."""
    times = found["layer"]
    alone = statistics.median(found["seconds"]["none"])
    rest = alone - predicted("none", layers, times)
    ms = (f"{times[lane] * 1e3:.2f}" for lane in ("load", "compute", "offload"))
    modes = OVERLAPS[1:]
    expected = [predicted(mode, layers, times) + rest for mode in modes]
    return [
        dtype,
        f"{ratio:.2f} ({found['matched']})",
        *ms,
        f"{rest * 1e3:.0f}",
        *(f"{one / alone:.3f}" for one in expected),
    ]


MODELLED = ("dtype", "matched (tokens)", "load, ms a layer", "compute", "offload",
            "rest, ms", "T up / none", "T down / none", "T both / none")  # fmt: skip


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--chunk-tokens", type=int, default=64)
    parser.add_argument(
        "--modes",
        nargs="+",
        choices=BESIDE,
        default=list(BESIDE),
        help="what to measure beside none",
    )
    parser.add_argument("--matched", type=float, nargs="+", default=list(MATCHED))
    parser.add_argument("--cache", type=Path, help="keeps the start-up probe's figures")
    parser.set_defaults(tokens=1280)  # in chunks of 64, every ratio comes out even
    options = parser.parse_args()
    measured: list[list[str]] = []
    modelled: list[list[str]] = []
    with Run("overlap", options) as run, tempfile.TemporaryDirectory() as folder:
        for dtype in options.dtypes:
            bench = Bench(dtype, options, Path(folder))
            print(f"{dtype}: {bench.cuts} prefill, auto is {bench.choice}")
            choice = dataclasses.asdict(bench.choice)
            found = run.figures[dtype] = {"choice": choice, "matched": {}}
            for ratio in options.matched:
                one = found["matched"][ratio] = bench.measure(ratio)
                measured.append(row_of(dtype, ratio, one))
                modelled.append(model_row(dtype, ratio, one, bench.layers))
            bench.close()
        beside = (f"{mode} / none" for mode in options.modes)
        run.table(("dtype", "matched (tokens)", "none, ms", *beside), measured)
        run.table(MODELLED, modelled, "From one layer's times without overlap:")


if __name__ == "__main__":
    main()
