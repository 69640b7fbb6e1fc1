"""Prefill beside a slow search: time to first token with and without speculation.

    python -m examples.benchmarks.speculation

Passages of real texts in an IVF index, real questions, top-k 1, 3 and 5. Around the
passages' vectors the index has as many others as make its search slow (``--others``);
half of its lists are searched, on one thread, in four stages. Longer
searches, as in an index of many millions of vectors or a remote one, are made by a
pause after each stage (``--pauses``, in seconds, each measured). What a prompt has
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
from dataclasses import asdict, dataclass, field
from functools import partial
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

MODES: dict[str, dict[str, Any] | None] = {
    "off": None,
    "default": {},
    "RAGCache": {"agreeing": 1, "lead": 0.0},
}
"""Settings of a speculator: what the wrappers do, and the paper's rules."""
_WORDS_PER_TOKEN = 0.75
NEAR = 0.3
"""Cosine of a vector that fills the index and the passage that it lies about."""


@dataclass(frozen=True)
class Library:
    """What is searched, and what is asked.

    Attributes:
        passages: The documents.
        index: Their vectors.
        questions: Texts and vectors, ``[dimensions]``.
    """

    passages: Sequence[str]
    index: StagedFaissIndex
    questions: Sequence[tuple[str, Any]]

    def stages(self, vector: Any, k: int, pause: float) -> Iterator[tuple[Stage, Any]]:
        """Each stage, and which passages it has found so far."""
        for stage in self.index.stages(vector, k):
            time.sleep(pause)
            found = stage.ids[0]
            yield stage, found[(found >= 0) & (found < len(self.passages))].tolist()


@dataclass
class Sample:
    """One pause, one top-k, one mode, all rounds."""

    speculator: Speculator | None
    seconds: list[float] = field(default_factory=list)
    search: list[float] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)

    @property
    def stats(self) -> SpeculationStats:
        return SpeculationStats() if self.speculator is None else self.speculator.stats

    def raw(self) -> dict[str, Any]:
        return {**vars(self), "speculator": asdict(self.stats)}


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
    asked = [(one.text, embed([one.text])[0]) for one in corpus.questions]
    questions = np.stack([vector for _, vector in asked])
    index = build_index(vectors, questions, options.others, options.lists)
    return Library(passages, StagedFaissIndex(index), asked)


def build_index(vectors: Any, asked: Any, others: int, lists: int) -> Any:
    """The passages first, then vectors that lie about them, at a distance.

    They fill the lists in which the passages are, as more texts of their kind would.
    Their noise is at a right angle to every question, so that none is among the best.
    """
    faiss.omp_set_num_threads(1)
    random = np.random.default_rng(0)
    basis = np.linalg.qr(np.transpose(asked))[0]

    def about(count: int) -> Any:
        noise = random.standard_normal((count, vectors.shape[1]), np.float32)
        noise -= (noise @ basis) @ basis.T
        faiss.normalize_L2(noise)
        centres = vectors[random.integers(len(vectors), size=count)]
        return NEAR * centres + (1 - NEAR**2) ** 0.5 * noise

    index = faiss.index_factory(vectors.shape[1], f"IVF{lists},Flat")
    index.cp.min_points_per_centroid = 1
    index.train(np.concatenate([vectors, about(min(others, 100 * lists))]))
    index.add(vectors)
    while index.ntotal < len(vectors) + others:
        index.add(about(min(100_000, len(vectors) + others - index.ntotal)))
    index.nprobe = lists // 2
    return index


def prompt_of(books: Library, numbers: Sequence[int]) -> str:
    """How a prompt with these passages begins."""
    found = "\n\n".join(books.passages[number] for number in numbers)
    return f"Answer the question from these texts.\n\n{found}"


def named(books: Library, number: int) -> Document:
    return Document(id=str(number), text=books.passages[number])


def speculator_of(engine: Engine, books: Library, rules: dict[str, Any]) -> Speculator:
    plan = explicit(engine, partial(prompt_of, books), partial(named, books))
    return Speculator(plan, **rules)


def ask(
    engine: Engine,
    books: Library,
    question: int,
    k: int,
    speculator: Speculator | None,
    pause: float,
) -> tuple[float, float, list[int]]:
    """Search, then generate one token; seconds to it, seconds of the search."""
    text, vector = books.questions[question]
    seen: set[int] = set()
    start = time.perf_counter()
    watched = None if speculator is None else speculator.begin()
    for stage, found in books.stages(vector, k, pause):
        seen.update(found)
        if watched is not None:
            watched.finish(found) if stage.last else watched.stage(found)
    searched = time.perf_counter()
    prompt = f"{prompt_of(books, found)}\n\nQuestion: {text}\nAnswer:"
    documents = [named(books, number) for number in found]
    result = engine.generate(prompt, SamplingParams(max_tokens=1), documents=documents)
    end = time.perf_counter()
    for number in seen:
        engine.forget(str(number))
    return end - start, searched - start, result.token_ids


def measure(
    dtype: str, options: Any, books: Library, folder: Path
) -> dict[str, Sample]:
    """Every pause, top-k and mode, side by side in each round."""
    config = EngineConfig(
        model=options.model,
        cache_dir=folder,
        dtype=dtype,
        threads=options.threads,
        dram_bytes="512MiB",
        ssd_bytes=0,
    )
    cases = list(itertools.product(options.pauses, options.topk))
    with Engine(config) as engine:
        runs = {
            f"{case} {mode}": Sample(
                None if rules is None else speculator_of(engine, books, rules)
            )
            for case in cases
            for mode, rules in MODES.items()
        }
        ask(engine, books, 0, min(options.topk), None, 0.0)
        for _, case in itertools.product(range(options.rounds), cases):
            for mode in MODES:
                run = runs[f"{case} {mode}"]
                one_round(engine, books, case, run)
                assert run.answers == runs[f"{case} off"].answers
    return runs


def one_round(
    engine: Engine, books: Library, case: tuple[float, int], run: Sample
) -> None:
    """Every question once."""
    pause, k = case
    asked = [
        ask(engine, books, question, k, run.speculator, pause)
        for question in range(len(books.questions))
    ]
    run.seconds.append(statistics.fmean(one[0] for one in asked))
    run.search.append(statistics.fmean(one[1] for one in asked))
    run.answers += [one[2] for one in asked]


def rows_of(dtype: str, options: Any, runs: dict[str, Sample]) -> list[list[str]]:
    rows = []
    cases = itertools.product(options.pauses, options.topk)
    for case, mode in itertools.product(cases, MODES):
        pause, k = case
        run, off = runs[f"{case} {mode}"], runs[f"{case} off"]
        total = run.stats
        rows.append(
            [
                dtype,
                f"{pause:g}",
                f"{k}",
                mode,
                Spread.of(run.search).ms(),
                Spread.of(run.seconds).ms(),
                ratios(run.seconds, off.seconds).ratio(),
                f"{total.used} of {total.launched}, {total.late} late",
                f"{total.wasted_tokens} of {total.computed_tokens}",
            ]
        )
    return rows


HEAD = (
    "dtype", "pause, s", "top-k", "speculation", "search, ms",
    "search to first token, ms", "ratio to off", "used of launched", "tokens wasted",
)  # fmt: skip


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--topk", type=int, nargs="+", default=[1, 3, 5])
    parser.add_argument("--questions", type=int, default=4)
    parser.add_argument("--lists", type=int, default=256, help="half are searched")
    parser.add_argument("--others", type=int, default=1_000_000, help="more vectors")
    parser.add_argument("--pauses", type=float, nargs="+", default=[0.0, 0.1, 0.3])
    parser.set_defaults(tokens=1500, rounds=3, dtypes=["float32"])
    options = parser.parse_args()
    rows: list[list[str]] = []
    with Run("speculation", options) as run:
        books = library(options)
        print(f"{len(books.passages)} passages, {len(books.questions)} questions")
        for dtype in options.dtypes:
            with tempfile.TemporaryDirectory() as folder:
                runs = measure(dtype, options, books, Path(folder))
            run.figures[dtype] = {name: one.raw() for name, one in runs.items()}
            rows += rows_of(dtype, options, runs)
        run.table(HEAD, rows)


if __name__ == "__main__":
    main()
