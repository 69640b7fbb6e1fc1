"""Every experiment, one after the other, each in a process of its own.

    make bench                                        all of them: some hours
    make bench ARGS="first_token policies"            only these
    make bench ARGS="--quick"                         all, just to see that they run

What an experiment prints goes to the terminal and to ``OUT/NAME.txt``; its raw figures
to ``OUT/NAME.json`` and its plots beside them. One that fails, or that was disturbed by
other work, does not stop the others; the list at the end tells.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from examples.benchmarks.common import print_table

DISTURBED = 3  # exit status of a run whose tables are withheld


@dataclass(frozen=True)
class Experiment:
    """One command.

    Attributes:
        name: Module in this package.
        about: What it answers.
        quick: Options with which it ends within about a minute.
        models: Whether it runs a model, and so takes ``--model`` and ``--threads``.
    """

    name: str
    about: str
    quick: str = ""
    models: bool = True


FEW = "--requests 4 --document-tokens 60 --output 2"
SHORT = "--rounds 1 --tokens 300 --dtypes float32"
EXPERIMENTS = (
    Experiment("first_token", "time to first token, cold and hit by tier", SHORT),
    Experiment("decode", "tokens per second, one row to eight", SHORT),
    Experiment("sampling", "choosing a token", "--rounds 1"),
    Experiment("exact_modes", "what exactness costs", SHORT),
    Experiment(
        "forward_variants",
        "the forward, piece by piece",
        f"{SHORT} --hits 1 --steps 2",
    ),
    Experiment(
        "profile_forward",
        "where a forward's time goes",
        "--tokens 300 --dtypes float32 --hits 2 --steps 2",
    ),
    Experiment("chunk_sizes", "which chunk size", SHORT),
    Experiment("overlap", "copies beside compute", SHORT),
    Experiment("slow_disk", "reads layer by layer from a slow disk", SHORT),
    Experiment("prefetch", "reads while requests wait", SHORT),
    Experiment("memory", "peak memory", f"{SHORT} --prompts 4 --at-once 1 2"),
    Experiment(
        "speculation",
        "prefill beside the search",
        f"{SHORT} --questions 2 --others 1000",
    ),
    Experiment(
        "serve_load", "latency over the request rate", f"{FEW} --loads 1 --disk 30"
    ),
    Experiment("windows", "how far to look ahead", f"{FEW} --windows 0 4"),
    Experiment("reordering", "cached first, under overload", f"{FEW} --loads 1.5"),
    Experiment("capacity_check", "prediction beside measurement", f"{FEW} --loads 1"),
    Experiment(
        "beside_vllm",
        "vLLM on the CPU, stock transformers",
        f"{SHORT} --systems ours transformers",
    ),
    Experiment("quality", "answers with reuse and without", "--questions 3"),
    Experiment(
        "peers",
        "llama.cpp, vLLM, LMCache, kvboost, transformers",
        f"{SHORT} --systems ours transformers --requests 3 --probes 2",
    ),
    Experiment("policies", "hit rates by policy", "--seeds 1", models=False),
    Experiment("policy_budgets", "hit rates by budget", "--seeds 1", models=False),
    Experiment("index_scale", "the index at scale", "--sizes 2000", models=False),
    Experiment("store_open", "opening a folder", "--chunks 2000", models=False),
    Experiment("huge_pages", "pages of the DRAM tier", "--rounds 1", models=False),
)


def command(experiment: Experiment, options: argparse.Namespace) -> list[str]:
    """What runs one experiment."""
    module = f"examples.benchmarks.{experiment.name}"
    found = [sys.executable, "-m", module, "--out", str(options.out)]
    found += shlex.split(experiment.quick) if options.quick else []
    found += ["--noisy"] if options.noisy else []
    if experiment.models and options.model is not None:
        found += ["--model", options.model]
    if experiment.models and options.threads is not None:
        found += ["--threads", str(options.threads)]
    return found


def run(experiment: Experiment, options: argparse.Namespace) -> list[str]:
    """Run one; its row of the list."""
    asked = command(experiment, options)
    print(f"\n$ {shlex.join(asked)}", flush=True)
    start = time.monotonic()
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with (
        (options.out / f"{experiment.name}.txt").open("w") as kept,
        subprocess.Popen(asked, text=True, **piped) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            kept.write(line)
    status = process.returncode
    told = {0: "done", DISTURBED: "disturbed: no table"}.get(status, f"failed {status}")
    return [experiment.name, told, f"{time.monotonic() - start:.0f}"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run what was asked for; 1 if something failed or was disturbed."""
    names = {experiment.name: experiment for experiment in EXPERIMENTS}
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        epilog="\n".join(f"  {e.name:16}{e.about}" for e in EXPERIMENTS),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all below")
    parser.add_argument("--out", type=Path, default=Path(".bench/results"))
    parser.add_argument("--model", help="path or hub id; default: the packaged model")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--quick", action="store_true", help="few rounds, short input")
    parser.add_argument("--noisy", action="store_true", help="show all figures")
    options = parser.parse_args(argv)
    unknown = [name for name in options.names if name not in names]
    if unknown:
        parser.error(f"no experiment {unknown[0]!r}; there are: {', '.join(names)}")
    options.out.mkdir(parents=True, exist_ok=True)
    wanted = [names[name] for name in options.names] or list(EXPERIMENTS)
    rows = [run(experiment, options) for experiment in wanted]
    print()
    print_table(("experiment", "", "seconds"), rows)
    return int(any(row[1] != "done" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
