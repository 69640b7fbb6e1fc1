"""How good answers are, and how far two runs of the same model are apart.

Plain values and functions: no model, no engine.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

import numpy as np
from numpy.typing import NDArray

LogProbs = NDArray[np.float64]
"""Natural log-probabilities of the whole vocabulary, ``[places, vocabulary]``."""

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalised(text: str) -> str:
    """Lower case without punctuation, articles and surplus space, as SQuAD does it."""
    bare = text.lower().translate(_NO_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def exact_match(text: str, answer: str) -> float:
    """1 if both are the same once normalised, else 0."""
    return float(normalised(text) == normalised(answer))


def f1(text: str, answer: str) -> float:
    """Harmonic mean of precision and recall over normalised words, from 0 to 1."""
    mine, theirs = normalised(text).split(), normalised(answer).split()
    if not mine or not theirs:
        return float(mine == theirs)
    shared = sum((Counter(mine) & Counter(theirs)).values())
    return 2 * shared / (len(mine) + len(theirs))


def contains(text: str, answer: str) -> float:
    """1 if the words of the answer stand in the text in one piece, else 0."""
    return float(f" {normalised(answer)} " in f" {normalised(text)} ")


def best_of(
    score: Callable[[str, str], float], text: str, answers: Sequence[str]
) -> float:
    """The score against whichever reference it is highest for."""
    return max(score(text, answer) for answer in answers)


def divergences(reference: LogProbs, other: LogProbs) -> NDArray[np.float64]:
    """Kullback-Leibler divergence of ``other`` from ``reference`` by place, in nats.

    0 where all log-probabilities are equal; tiny negative values of rounding are 0.
    """
    by_place = (np.exp(reference) * (reference - other)).sum(axis=-1)
    found: NDArray[np.float64] = np.maximum(by_place, 0.0)
    return found


@dataclass(frozen=True)
class Reply:
    """What one question gave.

    Attributes:
        text: The greedy answer.
        tokens: Its tokens.
        gold: Log-probabilities of the whole vocabulary before each token of the
            reference answer, which the model was made to say.
        gold_tokens: That answer's tokens.
        prompt_tokens: Tokens of both prompts, for the greedy and the reference answer.
        reused: Those whose KV was reused.
    """

    text: str
    tokens: tuple[int, ...]
    gold: LogProbs
    gold_tokens: tuple[int, ...]
    prompt_tokens: int
    reused: int

    @property
    def nll(self) -> float:
        """Mean negative log-likelihood of the reference answer's tokens, in nats."""
        places = np.arange(len(self.gold_tokens))
        return -float(self.gold[places, list(self.gold_tokens)].mean())


@dataclass(frozen=True)
class Quality:
    """How good the answers of one run are: means over the questions.

    Attributes:
        exact_match, f1, contains: Of the greedy answers, from 0 to 1.
        nll: Of the reference answer, in nats per token.
        reused: Share of the prompt tokens whose KV was reused, from 0 to 1.
    """

    exact_match: float
    f1: float
    contains: float
    nll: float
    reused: float

    @classmethod
    def of(cls, replies: Sequence[Reply], answers: Sequence[Sequence[str]]) -> Quality:
        """Score replies, each against its references."""
        pairs = list(zip(replies, answers, strict=True))
        scores = [
            mean(best_of(score, reply.text, right) for reply, right in pairs)
            for score in (exact_match, f1, contains)
        ]
        prompts = sum(reply.prompt_tokens for reply in replies)
        return cls(
            *scores,
            nll=mean(reply.nll for reply in replies),
            reused=sum(reply.reused for reply in replies) / prompts,
        )


@dataclass(frozen=True)
class Difference:
    """How far a run is from another one on the same questions.

    Attributes:
        questions: How many.
        same_answers: Questions with the same greedy tokens.
        same_bits: Questions with the same greedy tokens, and of whose reference answer
            all log-probabilities are equal, bit for bit.
        kl_mean, kl_most: Divergence of the next-token distribution from the other
            run's, before each token of the reference answer, in nats.
        nll: Mean over questions of how much more this run's is, in nats per token.
        nll_error: Standard error of that mean; 0 for one question.
    """

    questions: int
    same_answers: int
    same_bits: int
    kl_mean: float
    kl_most: float
    nll: float
    nll_error: float

    @classmethod
    def between(cls, others: Sequence[Reply], replies: Sequence[Reply]) -> Difference:
        """Compare ``replies`` with ``others``, in the same order of questions."""
        pairs = list(zip(others, replies, strict=True))
        same = [one.tokens == two.tokens for one, two in pairs]
        bits = [np.array_equal(one.gold, two.gold) for one, two in pairs]
        apart = np.concatenate([divergences(one.gold, two.gold) for one, two in pairs])
        more = [two.nll - one.nll for one, two in pairs]
        error = stdev(more) / math.sqrt(len(more)) if len(more) > 1 else 0.0
        return cls(
            questions=len(pairs),
            same_answers=sum(same),
            same_bits=sum(a and b for a, b in zip(same, bits, strict=True)),
            kl_mean=float(apart.mean()),
            kl_most=float(apart.max()),
            nll=mean(more),
            nll_error=error,
        )
