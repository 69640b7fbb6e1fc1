"""Peak memory of an engine whose DRAM tier is full, beside plain transformers.

    python -m examples.benchmarks.memory

Each side is a process of its own that answers the same prompts; the peak is the
kernel's (``VmHWM``). Allowed is: the model's, the DRAM budget, the working KV, and 10 %
of the latter two.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from examples.benchmarks.common import arguments, real_tokens
from examples.benchmarks.first_token import ONE
from examples.benchmarks.plain import Plain
from examples.benchmarks.report import Run
from pcr_core import Engine, EngineConfig

MIB = 2**20
DRAM = 256 * MIB


def peak_bytes() -> int:
    """Largest resident size of this process so far."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("this kernel does not report VmHWM")


def run_plain(dtype: str, options: Any) -> dict[str, int]:
    source = next((options.folder / "models").glob("[!.]*"))
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source)
    plain = Plain(str(source), dtype)
    for which in range(options.prompts):
        plain.cold(real_tokens(tokenizer, options.tokens, which))
    return {"peak": peak_bytes()}


def run_engine(dtype: str, options: Any) -> dict[str, int]:
    config = EngineConfig(
        cache_dir=options.folder, dtype=dtype, threads=options.threads, dram_bytes=DRAM
    )
    with Engine(config) as engine:
        for which in range(options.prompts):
            engine.generate(real_tokens(engine.tokenizer, options.tokens, which), ONE)
        stats = engine.stats()
        return {
            "peak": peak_bytes(),
            "dram": stats.cache.dram_bytes,
            "evictions": stats.cache.dram_evictions,
            "working": stats.working_bytes,
        }


def in_child(side: str, dtype: str, options: Any) -> dict[str, int]:
    command = [
        sys.executable, "-m", "examples.benchmarks.memory", "--side", side,
        "--dtypes", dtype, "--tokens", str(options.tokens),
        "--threads", str(options.threads), "--folder", str(options.folder),
        "--prompts", str(options.prompts),
    ]  # fmt: skip
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--side", choices=("plain", "engine"), help="internal")
    parser.add_argument("--folder", type=Path, help="internal")
    parser.add_argument("--prompts", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.side:
        side = run_plain if options.side == "plain" else run_engine
        transformers.utils.logging.disable_progress_bar()
        print(json.dumps(side(options.dtypes[0], options)))
        return
    rows = []
    with Run("memory", options) as run, tempfile.TemporaryDirectory() as folder:
        run.vouch()  # bytes, not seconds
        options.folder = Path(folder)
        for dtype in options.dtypes:
            in_child("engine", dtype, options)  # converts the model, runs the probes
            engine, plain = (in_child(s, dtype, options) for s in ("engine", "plain"))
            extra = engine["peak"] - plain["peak"]
            allowed = 1.1 * (DRAM + engine["working"])
            run.figures[dtype] = {"engine": engine, "plain": plain, "extra": extra}
            figures = (plain["peak"], engine["peak"], extra, allowed, engine["working"])
            rows.append([dtype, *(f"{figure / MIB:.0f}" for figure in figures)])
        head = ("dtype", "plain peak", "engine peak", "extra", "allowed", "working KV")
        title = f"MiB, {options.prompts} prompts, DRAM budget {DRAM // MIB}"
        run.table(head, rows, title)


if __name__ == "__main__":
    main()
