"""Real questions over real documents, answered with and without reuse: ``make demo``.

Four steps, in at most five minutes on two cores:

1. Index the documents; answer half of the questions through a LlamaIndex query engine
   and half through a LangChain chain, both on one engine. Documents come back, and the
   KV of what was seen before comes from DRAM.
2. Ask again in a fresh process on the same cache folder: the KV comes from SSD.
3. Answer every prompt on an engine that has nothing to reuse, and compare the answers.
4. Summarise.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console

from examples.answers import Answer, differing, summarize
from examples.corpus import Corpus, MiniLM, PlotIndex, load_corpus
from examples.pipelines import Ask, langchain_pipeline, llama_index_pipeline
from examples.report import (
    live_table,
    make_console,
    progress,
    summary_table,
)
from pcr_core import Engine, EngineConfig

FEWEST = 2  # questions that are asked even when the time is over
# Shares of the time left that the first two steps may take; the rest is the third's.
FIRST_SHARE, RESTART_SHARE = 0.4, 0.35


class Clock:
    """How much of the demo's time has gone, and how much is left."""

    def __init__(self, seconds: float) -> None:
        self._start = time.monotonic()
        self._seconds = seconds

    @property
    def gone(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    @property
    def left(self) -> float:
        """Seconds until the end; negative after it."""
        return self._seconds - self.gone

    def part(self, share: float) -> Clock:
        """A clock for the next ``share`` of the time that is left."""
        return Clock(share * self.left)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line of the demo. ``--restarted`` is for its own second process."""
    parser = argparse.ArgumentParser(prog="demo", description=__doc__.splitlines()[0])
    parser.add_argument("--questions", type=int, default=32, help="how many to ask")
    parser.add_argument("--documents", type=int, default=8, help="how many to search")
    parser.add_argument("--top", type=int, default=2, help="documents per prompt")
    parser.add_argument("--max-tokens", type=int, default=16, help="per answer")
    parser.add_argument("--seconds", type=float, default=270, help="time limit")
    parser.add_argument("--model", help="hub id, folder or .gguf file (a small one)")
    parser.add_argument("--cache-dir", type=Path, default=Path(".demo-cache"))
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--namespace", default="", help=argparse.SUPPRESS)
    parser.add_argument("--restarted", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def engine_config(options: argparse.Namespace) -> EngineConfig:
    """The configuration of both processes. The namespace is new in every run."""
    return EngineConfig(
        model=options.model,
        cache_dir=options.cache_dir,
        namespace=options.namespace,
        dram_bytes="1GiB",
        ssd_bytes="2GiB",
        exact=True,
        resident_rows=0,  # it shows the tiers that outlive a request
        threads=options.threads,
    )


def build_index(corpus: Corpus, console: Console) -> PlotIndex:
    """Embed every passage, with a progress bar."""
    embed = MiniLM()
    with progress(console) as bar:

        def batches(groups: list[list[str]]) -> Iterable[list[str]]:
            return bar.track(groups, description="embedding passages")

        return PlotIndex(corpus.plots, embed, batches=batches)


def pipelines(
    engine: Engine, index: PlotIndex, options: argparse.Namespace
) -> tuple[Ask, Ask]:
    """A LlamaIndex query engine and a LangChain chain on one engine."""
    sizes = {"k": options.top, "max_tokens": options.max_tokens}
    return (
        llama_index_pipeline(engine, index, **sizes),
        langchain_pipeline(engine, index, **sizes),
    )


def ask_all(
    questions: Iterable[str], asks: Sequence[Ask], clock: Clock
) -> Iterator[Answer]:
    """Ask in turn through each framework, until the time is over."""
    for number, question in enumerate(questions):
        if number >= FEWEST and clock.left <= 0:
            return
        yield asks[number % len(asks)](question)


# --- the three runs ---


def run_first(
    console: Console, corpus: Corpus, options: argparse.Namespace, clock: Clock
) -> list[Answer]:
    """Answer everything on one engine, then make what it stored durable."""
    index = build_index(corpus, console)
    console.print(
        f"{len(corpus.plots)} documents in {index.passages} passages, "
        f"{len(corpus.questions)} questions, {options.top} documents per prompt"
    )
    texts = [question.text for question in corpus.questions]
    answers: list[Answer] = []
    title = "1. One process: what comes back is in DRAM"
    with Engine(engine_config(options)) as engine:
        asks = pipelines(engine, index, options)
        until = clock.part(FIRST_SHARE)
        with live_table(console, title, len(texts)) as show:
            for answer in ask_all(texts, asks, until):
                answers.append(answer)
                show(answer)
        engine.flush()
    if len(answers) < len(texts):
        console.print(
            f"stopped after {len(answers)} of {len(texts)} questions to keep within "
            f"{options.seconds:.0f} s: this machine is slow or busy"
        )
    return answers


def run_restarted(
    console: Console, asked: int, options: argparse.Namespace, clock: Clock
) -> list[Answer]:
    """Ask the same questions in a fresh process and show its answers as they come."""
    command = [sys.executable, "-m", "examples.demo", "--restarted"]
    copied = ("documents", "top", "max_tokens", "cache_dir", "namespace", "threads")
    for name in copied:
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    command += ["--questions", str(options.questions)]
    command += ["--seconds", str(clock.part(RESTART_SHARE).left)]
    if options.model:
        command += ["--model", options.model]
    answers: list[Answer] = []
    title = "2. A fresh process on the same folder: the first time is from SSD"
    with (
        live_table(console, title, asked) as show,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child,
    ):
        assert child.stdout is not None
        for line in child.stdout:
            answers.append(Answer(**json.loads(line)))
            show(answers[-1])
            if len(answers) == asked:
                break
        child.stdout.close()
    if not answers:
        raise SystemExit("the second process gave no answer; its error is above")
    return answers


def answer_as_child(corpus: Corpus, options: argparse.Namespace) -> None:
    """The second process: answers as JSON lines on standard output."""
    clock = Clock(options.seconds)
    index = PlotIndex(corpus.plots, MiniLM())
    texts = [question.text for question in corpus.questions]
    with (
        Engine(engine_config(options)) as engine,
        # The first process stops reading when it has seen as many as it asked itself.
        contextlib.suppress(BrokenPipeError),
    ):
        asks = pipelines(engine, index, options)
        for answer in ask_all(texts, asks, clock):
            print(json.dumps(dataclasses.asdict(answer)), flush=True)


def run_uncached(
    console: Console,
    corpus: Corpus,
    asked: int,
    options: argparse.Namespace,
    clock: Clock,
) -> list[Answer]:
    """Answer the same prompts with nothing to reuse: a namespace for each question."""
    index = PlotIndex(corpus.plots, MiniLM())
    texts = [question.text for question in corpus.questions[:asked]]
    loaded: dict[str, Any] = {}  # the first engine's model, for the others
    answers: list[Answer] = []
    title = "3. Without cache, for comparison"
    with live_table(console, title, len(texts)) as show:
        for number, question in enumerate(texts):
            if number >= FEWEST and clock.left <= 0:
                break
            alone = {"namespace": str(uuid.uuid4()), "ssd_bytes": 0}
            config = engine_config(options).model_copy(update=alone)
            with Engine(config, **loaded) as engine:
                loaded = {"model": engine.model, "tokenizer": engine.tokenizer}
                answer = pipelines(engine, index, options)[number % 2](question)
            if answer.computed != answer.prompt_tokens:
                raise SystemExit("the comparison run has reused something: a bug")
            answers.append(answer)
            show(answer)
    return answers


# --- what it adds up to ---


def figures(
    options: argparse.Namespace,
    first: Sequence[Answer],
    restarted: Sequence[Answer],
    uncached: dict[str, Answer],
) -> dict[str, Any]:
    """Everything worth keeping of a run, ready for JSON."""
    both = [*first, *restarted]
    return {
        "machine": {"cores": os.cpu_count(), "processor": platform.machine()},
        "model": options.model or "SmolLM2-135M-Instruct",
        "questions": len(first),
        "asked_again_after_restart": len(restarted),
        "compared_without_cache": len(uncached),
        "answers_compared": sum(a.question in uncached for a in both),
        "answers_that_differ": len(differing(both, uncached)),
        "summary": summarize(both, uncached),
        "answers": {
            "first": [dataclasses.asdict(a) for a in first],
            "restarted": [dataclasses.asdict(a) for a in restarted],
            "uncached": [dataclasses.asdict(a) for a in uncached.values()],
        },
    }


def conclude(console: Console, results: dict[str, Any], *, elapsed: float) -> None:
    """Print the summary and the verdict."""
    console.print()
    console.print(summary_table(results["summary"]))
    console.print(
        f"{results['answers_that_differ']} of {results['answers_compared']} answers "
        f"with reuse differ from the answer without cache. {elapsed:.0f} s in all."
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit status, 1 if an answer differs."""
    options = parse_arguments(argv)
    # One team of torch threads for the engine; the embedder, on this thread, does
    # without: two teams on the same cores slow each other down (docs/architecture.md).
    torch.set_num_threads(1)
    clock = Clock(options.seconds)
    corpus = load_corpus(plots=options.documents, questions=options.questions)
    if options.restarted:
        transformers.utils.logging.disable_progress_bar()
        answer_as_child(corpus, options)
        return 0
    options.namespace = f"demo-{uuid.uuid4()}"
    console = make_console()
    first = run_first(console, corpus, options, clock)
    # From here models load in a second, under a bar of our own.
    transformers.utils.logging.disable_progress_bar()
    restarted = run_restarted(console, len(first), options, clock)
    alone = run_uncached(console, corpus, len(first), options, clock)
    uncached = {answer.question: answer for answer in alone}
    results = figures(options, first, restarted, uncached)
    conclude(console, results, elapsed=clock.gone)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1, ensure_ascii=False))
    return 1 if results["answers_that_differ"] else 0


if __name__ == "__main__":
    sys.exit(main())
