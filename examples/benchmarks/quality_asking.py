"""Asks an engine the same questions in several ways, and stock transformers."""

from __future__ import annotations

import argparse
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from examples.benchmarks.answer_scores import LogProbs, Reply
from examples.benchmarks.quality_questions import (
    INSTRUCTIONS,
    Asked,
    Message,
    by_digest,
    messages,
    most_cached,
)
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
        with Engine(self._config(Setting("stock", True, 32))) as engine:
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
