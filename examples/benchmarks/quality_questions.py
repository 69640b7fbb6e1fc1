"""Questions with two or three documents each, found by a real search, as prompts."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from examples.benchmarks.answer_scores import contains
from examples.corpus import Plot, PlotIndex, Question, load_corpus, split_passages

Search = Callable[[str, int], Sequence[Plot]]
"""A question and a number to the best documents, best first."""
Message = dict[str, str]

INSTRUCTIONS = "You answer questions about passages."
LONGEST_ANSWER = 8
"""Words. Longer reference answers are retellings, not answers."""


@dataclass(frozen=True)
class Asked:
    """A question, its reference answers, and its documents, best first."""

    question: str
    answers: tuple[str, ...]
    documents: tuple[Plot, ...]


def beginnings(plots: Sequence[Plot], words: int) -> list[Plot]:
    """The same documents, each cut at the last sentence end within ``words`` words."""
    return [Plot(plot.id, split_passages(plot.text, words=words)[0]) for plot in plots]


def answerable(question: Question, text: str) -> bool:
    """Whether an answer is short and stands in the text."""
    return any(
        len(answer.split()) <= LONGEST_ANSWER and contains(text, answer)
        for answer in question.answers
    )


def with_gold(found: Sequence[Plot], gold: Plot) -> tuple[Plot, ...]:
    """The documents found; the right one takes the last one's place if it is not there.

    What reuse does to answers is the question here, not how well the search works.
    """
    return tuple(found) if gold in found else (*found[:-1], gold)


def ask_all(
    questions: Sequence[Question], plots: Sequence[Plot], search: Search, count: int
) -> list[Asked]:
    """The first ``count`` answerable questions, by turns with two and three documents.

    Raises:
        SystemExit: If there are fewer.
    """
    by_id = {plot.id: plot for plot in plots}
    usable = [q for q in questions if answerable(q, by_id[q.plot_id].text)]
    if len(usable) < count:
        raise SystemExit(
            f"only {len(usable)} questions can be answered from these documents; take "
            "more of them (--documents), longer ones (--words) or fewer --questions"
        )
    return [
        Asked(
            question.text,
            tuple(a for a in question.answers if len(a.split()) <= LONGEST_ANSWER),
            with_gold(search(question.text, k), by_id[question.plot_id]),
        )
        for question, k in zip(usable[:count], itertools.cycle((2, 3)), strict=False)
    ]


def real_questions(documents: int, words: int, count: int) -> list[Asked]:
    """Questions of NarrativeQA over the beginnings of their plots, found by MiniLM."""
    from examples.corpus import MiniLM

    corpus = load_corpus(plots=documents, questions=10**6, words=(0, 10**6))
    plots = beginnings(corpus.plots, words)
    index = PlotIndex(plots, MiniLM())

    def search(question: str, k: int) -> list[Plot]:
        return [plot for plot, _ in index.search(question, k=k)]

    return ask_all(corpus.questions, plots, search, count)


def messages(asked: Asked, documents: Sequence[Plot]) -> list[Message]:
    """Instructions, the documents in this order, the question."""
    passages = "\n\n".join(f"Passage: {plot.text}" for plot in documents)
    question = f"Question: {asked.question}\nAnswer in a few words."
    return [
        {"role": "system", "content": INSTRUCTIONS},
        {"role": "user", "content": f"{passages}\n\n{question}"},
    ]


# --- orders ---


def by_digest(documents: Sequence[Plot]) -> Sequence[Plot]:
    """The same order wherever the same documents meet, as ``order="stable"`` has it."""

    def digest(plot: Plot) -> bytes:
        return hashlib.blake2b(plot.text.encode(), digest_size=16).digest()

    return sorted(documents, key=digest)


def most_cached(
    documents: Sequence[Plot], cached: Callable[[list[Sequence[Plot]]], Sequence[int]]
) -> Sequence[Plot]:
    """The order of which most is cached, the first of several: ``order="cache"``.

    Args:
        documents: Best first.
        cached: Leading tokens cached of the prompts with documents in these orders.
    """
    orders: list[Sequence[Plot]] = list(itertools.permutations(documents))
    found = cached(orders)
    return orders[max(range(len(orders)), key=found.__getitem__)]
