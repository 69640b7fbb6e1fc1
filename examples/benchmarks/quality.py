"""Whether answers change with reuse, and with the order of documents.

    python -m examples.benchmarks.quality

Real questions (NarrativeQA), each with two or three documents found by a real search,
the right one among them. Two tables, because they say different things:

1. The same prompts, with and without reuse. Whatever differs is due to reuse.
2. The same documents in another order. That is another prompt, and what differs is due
   to the model.

Exact match and F1 as SQuAD normalises them; a small model seldom says a reference
answer word for word, so what tells more is how likely it finds one (negative
log-likelihood per token), whether it says the same, and how far the distributions of
the next token are apart. For these the model is made to say the reference answer, by a
grammar of its tokens, so that all runs are compared behind the same words. DRAM holds a
few prompts only: hits come from all tiers, and stop within documents.
"""

from __future__ import annotations

import argparse
import tempfile
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from examples.benchmarks.answer_scores import Difference, LogProbs, Quality, Reply
from examples.benchmarks.common import arguments
from examples.benchmarks.quality_questions import (
    INSTRUCTIONS,
    Asked,
    Message,
    by_digest,
    messages,
    most_cached,
    real_questions,
)
from examples.benchmarks.report import Run
from examples.benchmarks.stock_answers import Prompt, stock_answers
from examples.corpus import Plot
from pcr_core import Document, Engine, EngineConfig, Result, SamplingParams

Job = tuple[list[Message], SamplingParams]
Way = Callable[[Engine, Iterable[Job]], Iterator[Result]]
Order = Callable[[Engine, Asked], Sequence[Plot]]

_EVERYTHING = Document("everything", INSTRUCTIONS)
"""What every prompt begins with: who forgets it, forgets all."""


# --- ways to ask ---


def recomputed(engine: Engine, jobs: Iterable[Job]) -> Iterator[Result]:
    """One at a time; what one has stored is forgotten before the next."""
    for prompt, params in jobs:
        result = engine.submit(prompt, params, documents=[_EVERYTHING]).result()
        if result.usage.cached_tokens:
            raise SystemExit("the run without reuse has reused something: a bug")
        engine.forget(_EVERYTHING.id)
        yield result


def alone(engine: Engine, jobs: Iterable[Job]) -> Iterator[Result]:
    """One at a time."""
    for prompt, params in jobs:
        yield engine.submit(prompt, params).result()


def together(engine: Engine, jobs: Iterable[Job]) -> Iterator[Result]:
    """All at once: up to ``max_batch_size`` are decoded in one forward."""
    waiting = deque(engine.submit(prompt, params) for prompt, params in jobs)
    while waiting:
        yield waiting.popleft().result()


# --- orders of documents ---


def as_found(engine: Engine, asked: Asked) -> Sequence[Plot]:
    """Best first."""
    return asked.documents


def turned_round(engine: Engine, asked: Asked) -> Sequence[Plot]:
    """Best last."""
    return asked.documents[::-1]


def stable(engine: Engine, asked: Asked) -> Sequence[Plot]:
    """By their text."""
    return by_digest(asked.documents)


def by_cache(engine: Engine, asked: Asked) -> Sequence[Plot]:
    """What is cached first."""

    def cached(orders: list[Sequence[Plot]]) -> Sequence[int]:
        return engine.cached_tokens([messages(asked, order) for order in orders])

    return most_cached(asked.documents, cached)


@dataclass(frozen=True)
class Setting:
    """One run over all questions."""

    name: str
    exact: bool
    chunk_tokens: int
    way: Way = alone
    order: Order = as_found


REFERENCES = (
    Setting("recompute, exact", True, 32, recomputed),
    Setting("recompute, not exact", False, 32, recomputed),
)
"""Each for the settings of its mode."""
REUSE = (
    Setting("exact, chunks of 32, alone", True, 32),
    Setting("exact, chunks of 32, batched", True, 32, together),
    Setting("exact, chunks of 128, alone", True, 128),
    Setting("not exact, chunks of 32, alone", False, 32),
    Setting("not exact, chunks of 32, batched", False, 32, together),
    Setting("not exact, chunks of 128, alone", False, 128),
    Setting("not exact, chunks of 128, batched", False, 128, together),
)
ORDERS = (
    Setting("stable", True, 32, order=stable),
    Setting("cache", True, 32, order=by_cache),
    Setting("reversed", True, 32, order=turned_round),
)


# --- asking ---


def greedy(limit: int) -> SamplingParams:
    return SamplingParams(max_tokens=limit, temperature=0, repetition_penalty=1.0)


def forced(gold: Sequence[int], vocabulary: int) -> SamplingParams:
    """Say exactly these tokens, and how likely each of the vocabulary was."""
    return SamplingParams(
        max_tokens=len(gold),
        temperature=0,
        repetition_penalty=1.0,
        grammar="start: " + " ".join(f"<[{token}]>" for token in gold),
        top_logprobs=vocabulary,
    )


def distributions(result: Result, vocabulary: int) -> LogProbs:
    """``top_logprobs`` of the whole vocabulary as an array."""
    found = np.empty((len(result.token_ids), vocabulary))
    for row, by_token in zip(found, result.top_logprobs or (), strict=True):
        row[np.fromiter(by_token, int)] = np.fromiter(by_token.values(), float)
    return found


def gold_of(tokenizer: Any, asked: Asked) -> tuple[int, ...]:
    """Tokens of the reference answer."""
    ids = tokenizer(asked.answers[0], add_special_tokens=False)["input_ids"]
    return tuple(ids)


def ask(
    engine: Engine, questions: Sequence[Asked], setting: Setting, limit: int
) -> list[Reply]:
    """Answer all questions, then have all reference answers said."""
    vocabulary = engine.model.config.vocab_size
    prompts: list[list[Message]] = []

    def answers() -> Iterator[Job]:
        for asked in questions:
            prompts.append(messages(asked, setting.order(engine, asked)))
            yield prompts[-1], greedy(limit)

    said = list(setting.way(engine, answers()))
    golds = [gold_of(engine.tokenizer, asked) for asked in questions]
    jobs = [
        (prompt, forced(gold, vocabulary))
        for prompt, gold in zip(prompts, golds, strict=True)
    ]
    replies = []
    for own, gold, made in zip(said, golds, setting.way(engine, jobs), strict=True):
        if tuple(made.token_ids) != gold:
            raise SystemExit("the model did not say the reference answer: a bug")
        replies.append(
            Reply(
                text=own.text,
                tokens=tuple(own.token_ids),
                gold=distributions(made, vocabulary),
                gold_tokens=gold,
                prompt_tokens=own.usage.prompt_tokens + made.usage.prompt_tokens,
                reused=own.usage.cached_tokens + made.usage.cached_tokens,
            )
        )
    return replies


@dataclass(frozen=True)
class Ran:
    """What a setting gave, and the engine's counters."""

    replies: list[Reply]
    cache: dict[str, Any]


class Bench:
    """Runs settings of one dtype, each on an engine and a namespace of its own."""

    def __init__(
        self,
        questions: Sequence[Asked],
        options: argparse.Namespace,
        dtype: str,
        folder: Path,
    ) -> None:
        self._questions, self._options = questions, options
        self._dtype, self._folder = dtype, folder

    def run(self, setting: Setting) -> Ran:
        with Engine(self._config(setting)) as engine:
            replies = ask(engine, self._questions, setting, self._options.max_tokens)
            return Ran(replies, asdict(engine.stats().cache))

    def stock(self) -> list[Reply]:
        """The same prompts on stock transformers."""
        with Engine(self._config(REFERENCES[0])) as engine:
            ids = [
                engine.encode(messages(asked, asked.documents))
                for asked in self._questions
            ]
            tokenizer = engine.tokenizer
        golds = [gold_of(tokenizer, asked) for asked in self._questions]
        models = self._folder / "models"
        said = stock_answers(
            self._options.model or str(next(models.glob("[!.]*"))),
            self._dtype,
            self._options.threads,
            [Prompt(tuple(one), gold) for one, gold in zip(ids, golds, strict=True)],
            self._options.max_tokens,
        )
        return [
            Reply(
                tokenizer.decode(tokens, skip_special_tokens=True),
                tokens, dists, gold, 2 * len(one), 0,
            )
            for (tokens, dists), gold, one in zip(said, golds, ids, strict=True)
        ]  # fmt: skip

    def _config(self, setting: Setting) -> EngineConfig:
        return EngineConfig(
            model=self._options.model,
            cache_dir=self._folder,
            dtype=self._dtype,
            threads=self._options.threads,
            exact=setting.exact,
            chunk_tokens=setting.chunk_tokens,
            dram_bytes=self._options.dram,
            ssd_bytes=self._options.ssd,
            namespace=f"quality-{uuid.uuid4()}",
        )


# --- what it adds up to ---


def share(part: int, whole: int) -> str:
    return f"{part} of {whole}"


def quality_cells(quality: Quality) -> list[str]:
    return [
        f"{quality.reused:.0%}",
        f"{100 * quality.exact_match:.1f}",
        f"{100 * quality.f1:.1f}",
        f"{100 * quality.contains:.1f}",
        f"{quality.nll:.3f}",
    ]


def difference_cells(found: Difference) -> list[str]:
    return [
        share(found.same_answers, found.questions),
        share(found.same_bits, found.questions),
        small(found.kl_mean),
        small(found.kl_most),
        "0" if found.nll == found.nll_error == 0 else
        f"{found.nll:+.2g} ±{found.nll_error:.1g}",
    ]  # fmt: skip


def small(value: float) -> str:
    return f"{value:.1e}" if value else "0"


QUALITY = ("reused", "EM", "F1", "contains", "NLL")
DIFFERENCE = ("same answer", "same bits", "KL mean", "KL most", "NLL - reference's")


class Tables:
    """Rows of both tables, and the raw figures, as settings are run.

    Args:
        dtype: Of the model.
        questions: Which have been asked.
        done: Called after each row.

    Attributes:
        figures: By name of the setting.
    """

    def __init__(
        self,
        dtype: str,
        questions: Sequence[Asked],
        done: Callable[[], None] = lambda: None,
    ) -> None:
        self._dtype, self._done = dtype, done
        self._answers = [asked.answers for asked in questions]
        self.figures: dict[str, Any] = {}

    def row(
        self,
        name: str,
        replies: Sequence[Reply],
        reference: Sequence[Reply],
        cache: dict[str, Any] | None = None,
    ) -> list[str]:
        """One row: how good, and how far from the reference; ``cache``: counters."""
        quality = Quality.of(replies, self._answers)
        difference = Difference.between(reference, replies)
        self.figures[name] = {
            "quality": asdict(quality),
            "difference": asdict(difference),
            "texts": [reply.text for reply in replies],
            "nll": [reply.nll for reply in replies],
            "cache": cache,
        }
        self._done()
        cells = quality_cells(quality), difference_cells(difference)
        return [self._dtype, name, *cells[0], *cells[1]]


def measure(bench: Bench, tables: Tables) -> tuple[list[list[str]], list[list[str]]]:
    """Rows of the same prompts, and of other orders."""
    ran = {setting.exact: bench.run(setting).replies for setting in REFERENCES}
    exact = ran[True]
    same = [
        tables.row(setting.name, ran[setting.exact], exact) for setting in REFERENCES
    ]
    same.append(tables.row("stock transformers", bench.stock(), exact))
    for setting in REUSE:
        found, reference = bench.run(setting), ran[setting.exact]
        same.append(tables.row(setting.name, found.replies, reference, found.cache))
    others = [tables.row("as found, recomputed", exact, exact)]
    for setting in ORDERS:
        found = bench.run(setting)
        others.append(tables.row(setting.name, found.replies, exact, found.cache))
    return same, others


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--documents", type=int, default=16, help="that are searched")
    parser.add_argument("--words", type=int, default=120, help="of each document")
    parser.add_argument("--max-tokens", type=int, default=12, help="per answer")
    parser.add_argument("--dram", default="256MiB", help="budget of DRAM")
    parser.add_argument("--ssd", default="1GiB", help="budget of SSD")
    parser.set_defaults(dtypes=["float32"])
    options = parser.parse_args()
    with Run("quality", options) as run:
        run.vouch()  # no figure depends on the clock
        torch.set_num_threads(1)  # for the search: the engines have their own threads
        questions = real_questions(options.documents, options.words, options.questions)
        same: list[list[str]] = []
        others: list[list[str]] = []
        with tempfile.TemporaryDirectory() as folder:
            for dtype in options.dtypes:
                tables = Tables(dtype, questions, run.save)
                run.figures[dtype] = tables.figures
                found = measure(Bench(questions, options, dtype, Path(folder)), tables)
                same += found[0]
                others += found[1]
        show(run, same, others)


def show(run: Run, same: list[list[str]], others: list[list[str]]) -> None:
    run.table(
        ("dtype", "same prompts", *QUALITY, *DIFFERENCE),
        same,
        title="Reuse on and off; differences from the recomputing run of the same mode "
        "(of the first three rows: from the first)",
    )
    run.table(
        ("dtype", "order", *QUALITY, *DIFFERENCE),
        others,
        title="Documents in another order: other prompts, so these differences are the "
        "model's",
    )


if __name__ == "__main__":
    main()
