"""Prefill beside a slow search: time to first token with and without speculation.

    python -m examples.benchmarks.speculation

Passages of real texts in an IVF index, real questions, top-k 1, 3 and 5. The search
goes in four stages, and each takes ``--delay`` seconds longer than this small index
needs, as one of many millions of vectors, or a remote one, would. What a prompt has
left in the cache is forgotten before the next one, so all that is gained is the prefill
that fits beside the search. Times run from the start of the search to the first token.
Ratios are taken within a round; each answer is compared with the one without
speculation.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch

from examples.benchmarks.common import Spread, arguments, ratios
from examples.benchmarks.report import Run
from examples.corpus import MiniLM, load_corpus, split_passages
from pcr_core import Document, Engine, EngineConfig, SamplingParams
from pcr_integrations.retrieval import Stage, StagedFaissIndex
from pcr_integrations.speculation import SpeculationStats, Speculator, explicit

MODES = {"off": None, "agreeing 2": 2, "agreeing 1": 1}
_WORDS_PER_TOKEN = 0.75


@dataclass(frozen=True)
class Library:
    """What is searched, and what is asked.

    Attributes:
        passages: The documents.
        index: Their vectors.
        questions: Texts and vectors, ``[dimensions]``.
        delay: Seconds added to each stage.
    """

    passages: Sequence[str]
    index: StagedFaissIndex
    questions: Sequence[tuple[str, Any]]
    delay: float

    def stages(self, vector: Any, k: int) -> Iterator[Stage]:
        """Search slowly."""
        for stage in self.index.stages(vector, k):
            time.sleep(self.delay)
            yield stage


@dataclass
class Sample:
    """One mode, one top-k, all rounds."""

    seconds: list[float] = field(default_factory=list)
    search: list[float] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    stats: list[SpeculationStats] = field(default_factory=list)


def library(options: Any) -> Library:
    """Embed passages and questions; nothing of torch runs here afterwards."""
    torch.set_num_threads(1)
    words = int(options.tokens / max(options.topk) * _WORDS_PER_TOKEN)
    corpus = load_corpus(plots=24, questions=options.questions, words=(100, 2000))
    passages = [
        part for plot in corpus.plots for part in split_passages(plot.text, words=words)
    ]
    embed = MiniLM()
    vectors = np.concatenate([embed([text]) for text in passages])
    index = faiss.index_factory(vectors.shape[1], f"IVF{options.lists},Flat")
    index.cp.min_points_per_centroid = 1
    index.train(vectors)
    index.add(vectors)
    index.nprobe = options.lists // 2
    asked = [(one.text, embed([one.text])[0]) for one in corpus.questions]
    return Library(passages, StagedFaissIndex(index), asked, options.delay)


def ask(
    engine: Engine,
    books: Library,
    question: int,
    k: int,
    agreeing: int | None,
) -> tuple[float, float, list[int], SpeculationStats]:
    """Search, then generate one token; seconds to it, seconds of the search."""
    text, vector = books.questions[question]

    def prompt_of(numbers: Sequence[int]) -> str:
        found = "\n\n".join(books.passages[number] for number in numbers)
        return f"Answer the question from these texts.\n\n{found}"

    def named(number: int) -> Document:
        return Document(id=str(number), text=books.passages[number])

    plan = explicit(engine, prompt_of, named)
    speculator = Speculator(plan, agreeing=agreeing or 1)
    seen: set[int] = set()
    start = time.perf_counter()
    with speculator.begin() as speculation:
        for stage in books.stages(vector, k):
            found = [number for number in stage.ids[0].tolist() if number >= 0]
            seen.update(found)
            if agreeing and not stage.last:
                speculation.stage(found)
        speculation.finish(found)
    searched = time.perf_counter()
    prompt = f"{prompt_of(found)}\n\nQuestion: {text}\nAnswer:"
    once = SamplingParams(max_tokens=1)
    result = engine.generate(prompt, once, documents=[named(one) for one in found])
    end = time.perf_counter()
    for number in seen:
        engine.forget(str(number))
    return end - start, searched - start, result.token_ids, speculator.stats


def measure(
    dtype: str, options: Any, books: Library, folder: Path
) -> dict[str, Sample]:
    """Every top-k and mode, side by side in each round."""
    config = EngineConfig(
        model=options.model,
        cache_dir=folder,
        dtype=dtype,
        threads=options.threads,
        dram_bytes="512MiB",
        ssd_bytes=0,
    )
    runs = {f"{k} {mode}": Sample() for k in options.topk for mode in MODES}
    with Engine(config) as engine:
        ask(engine, books, 0, min(options.topk), None)
        for _, k in itertools.product(range(options.rounds), options.topk):
            for mode, agreeing in MODES.items():
                run, seconds, search = runs[f"{k} {mode}"], [], []
                for question in range(len(books.questions)):
                    one = ask(engine, books, question, k, agreeing)
                    seconds.append(one[0])
                    search.append(one[1])
                    run.answers.append(one[2])
                    run.stats.append(one[3])
                run.seconds.append(statistics.fmean(seconds))
                run.search.append(statistics.fmean(search))
                assert run.answers == runs[f"{k} off"].answers
    return runs


def rows_of(dtype: str, options: Any, runs: dict[str, Sample]) -> list[list[str]]:
    rows = []
    for k, mode in itertools.product(options.topk, MODES):
        run, off = runs[f"{k} {mode}"], runs[f"{k} off"]
        total = {
            name: sum(getattr(one, name) for one in run.stats)
            for name in ("launched", "used", "computed_tokens", "wasted_tokens")
        }
        rows.append(
            [
                dtype,
                f"{k}",
                mode,
                Spread.of(run.search).ms(),
                Spread.of(run.seconds).ms(),
                ratios(run.seconds, off.seconds).ratio(),
                f"{total['used']} of {total['launched']}",
                f"{total['wasted_tokens']} of {total['computed_tokens']}",
            ]
        )
    return rows


HEAD = (
    "dtype", "top-k", "speculation", "search, ms", "search to first token, ms",
    "ratio to off", "prefills used", "tokens wasted",
)  # fmt: skip


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--topk", type=int, nargs="+", default=[1, 3, 5])
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--lists", type=int, default=32, help="half are searched")
    parser.add_argument("--delay", type=float, default=0.2, help="seconds a stage")
    options = parser.parse_args()
    rows: list[list[str]] = []
    with Run("speculation", options) as run:
        books = library(options)
        print(
            f"{len(books.passages)} passages, {len(books.questions)} questions, "
            f"{options.delay} s added to each stage"
        )
        for dtype in options.dtypes:
            with tempfile.TemporaryDirectory() as folder:
                runs = measure(dtype, options, books, Path(folder))
            run.figures[dtype] = {name: vars(one) for name, one in runs.items()}
            rows += rows_of(dtype, options, runs)
        run.table(HEAD, rows)


if __name__ == "__main__":
    main()
