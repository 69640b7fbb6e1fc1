"""Peak memory of an engine whose DRAM tier is full, beside plain transformers.

    python -m examples.benchmarks.memory

Each side is a process of its own that answers the same prompts, ``--at-once`` of them
together. The peak is the kernel's (``VmHWM``), reset when the model is loaded and the
engine open, as loading has a peak of its own, told beside it. What the engine says it
holds (``stats()``): slabs of DRAM in whole pages, working KV (rows made ready at start,
and rows as they have grown), and weights that are there twice. Allowed is the model's
peak and 1.1 times that; the rest is what no account has.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from examples.benchmarks.common import arguments, real_tokens
from examples.benchmarks.plain import Plain
from examples.benchmarks.report import Run
from pcr_core import Engine, EngineConfig, SamplingParams

MIB = 2**20
DRAM = 256 * MIB
ACCOUNTS = ("dram", "working", "weights")
HEAD = ("dtype", "at once", "plain peak", "engine peak", "extra", "DRAM", "working KV",
        "weights twice", "rest", "extra / accounts", "loading: plain",
        "engine")  # fmt: skip
_LOOK = 0.05  # seconds between two looks at the accounts


def resident(field: str = "VmHWM") -> int:
    """Bytes of one kind of this process's memory, as the kernel counts them."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"this kernel does not report {field}")


def reset_peak() -> int:
    """Let ``VmHWM`` begin again from what is resident now; the peak so far."""
    before = resident()
    Path("/proc/self/clear_refs").write_text("5")
    return before


def kinds() -> dict[str, int]:
    """What is resident now: of no file, and of files."""
    return {"anonymous": resident("RssAnon"), "file": resident("RssFile")}


def run_plain(dtype: str, options: Any) -> dict[str, int]:
    """Stock transformers, one prompt after the other."""
    source = options.model or str(next((options.folder / "models").glob("[!.]*")))
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    plain = Plain(source, dtype)
    loading = reset_peak()
    for which in range(options.prompts):
        plain.cold(real_tokens(tokenizer, options.tokens, which))
    return {"peak": resident(), "loading": loading, **kinds()}


def run_engine(dtype: str, options: Any) -> dict[str, int]:
    """The engine, so many prompts at once."""
    config = EngineConfig(
        model=options.model,
        cache_dir=options.folder,
        dtype=dtype,
        threads=options.threads,
        dram_bytes=DRAM,
    )
    count = options.at_once[0]
    answer = 1 if count == 1 else 48  # rows grow while they run together
    params = SamplingParams(max_tokens=answer, min_tokens=answer)
    with Engine(config) as engine:
        loading = reset_peak()
        most = dict.fromkeys(ACCOUNTS, 0)
        for first in range(0, options.prompts, count):
            together = range(first, min(first + count, options.prompts))
            waiting = [
                engine.submit(
                    real_tokens(engine.tokenizer, options.tokens, which), params
                )
                for which in together
            ]
            while not all(completion.done for completion in waiting):
                note(most, engine)
                time.sleep(_LOOK)
            note(most, engine)
        evictions = engine.stats().cache.dram_evictions
        found = {"peak": resident(), "loading": loading, **kinds()}
    return {**found, **most, "evictions": evictions}


def note(most: dict[str, int], engine: Engine) -> None:
    """Keep the largest figure that each account has shown."""
    stats = engine.stats()
    seen = (stats.cache.dram_allocated, stats.working_bytes, stats.weight_bytes)
    for name, size in zip(ACCOUNTS, seen, strict=True):
        most[name] = max(most[name], size)


def in_child(
    side: str, dtype: str, at_once: int, options: Any, prompts: int | None = None
) -> dict[str, int]:
    """What one side reports."""
    command = [
        sys.executable, "-m", "examples.benchmarks.memory", "--side", side,
        "--dtypes", dtype, "--tokens", str(options.tokens),
        "--threads", str(options.threads), "--folder", str(options.folder),
        "--prompts", str(prompts or options.prompts), "--at-once", str(at_once),
        *(["--model", options.model] if options.model else []),
    ]  # fmt: skip
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def row_of(
    dtype: str, at_once: int, engine: dict[str, int], plain: dict[str, int]
) -> list[str]:
    """One row of the table, in MiB."""
    extra = engine["peak"] - plain["peak"]
    accounts = [engine[name] for name in ACCOUNTS]
    sizes = [plain["peak"], engine["peak"], extra, *accounts, extra - sum(accounts)]
    loading = [plain["loading"], engine["loading"]]
    return [
        dtype,
        str(at_once),
        *in_mib(sizes),
        f"{extra / sum(accounts):.2f}",
        *in_mib(loading),
    ]


def in_mib(sizes: Sequence[int]) -> list[str]:
    """For people."""
    return [f"{size / MIB:.0f}" for size in sizes]


def main() -> None:
    parser = arguments((__doc__ or "").splitlines()[0])
    parser.add_argument("--side", choices=("plain", "engine"), help="internal")
    parser.add_argument("--folder", type=Path, help="keeps the start-up probe's files")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 4])
    options = parser.parse_args()
    if options.side:
        torch.set_num_threads(options.threads)
        side = run_plain if options.side == "plain" else run_engine
        transformers.utils.logging.disable_progress_bar()
        print(json.dumps(side(options.dtypes[0], options)))
        return
    rows = []
    with Run("memory", options) as run, tempfile.TemporaryDirectory() as folder:
        run.vouch()  # bytes, not seconds
        options.folder = options.folder or Path(folder)
        for dtype in options.dtypes:
            in_child("engine", dtype, 1, options, prompts=1)  # converts, probes
            plain = in_child("plain", dtype, 1, options)
            found = run.figures[dtype] = {"plain": plain, "engine": {}}
            for at_once in options.at_once:
                engine = in_child("engine", dtype, at_once, options)
                found["engine"][at_once] = engine
                rows.append(row_of(dtype, at_once, engine, plain))
        title = f"MiB, {options.prompts} prompts, DRAM budget {DRAM // MIB}"
        run.table(HEAD, rows, title)


if __name__ == "__main__":
    main()
