"""A stream of retrieval requests whose documents come back.

60 real documents of about 256 tokens; 25 sequences of 4 of them, of which 15 are in
families that share their first 1 to 3 documents; 100 requests for these sequences,
drawn by Zipf's law with exponent 1, each with a question of its own: about 1,076 tokens
a request. Knows nothing of caches or engines: it tells what a perfect one could reuse.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from examples.corpus import Plot, load_corpus

DOCUMENTS, SEQUENCES, LENGTH, REQUESTS = 60, 25, 4, 100
FAMILIES, MEMBERS = 5, 3  # the rest of the sequences are on their own
SHORTEST, LONGEST = 240, 272  # tokens of a document
SEED = 6  # 78 requests are "whole", 9 "part", 13 "new"; 81 % of all tokens reusable
ALL = 10_000  # documents, or words of one: more than there are
SYSTEM = "Answer the question about the texts below in a few words. Use only the texts."
_HERE = "<<documents>>"


@dataclass(frozen=True)
class Asked:
    """One request.

    Attributes:
        prompt: Token ids.
        prefix: Tokens before the question: what is worth keeping.
        kind: What came before it: ``"whole"``, the same documents in the same order;
            ``"part"``, at least the first of them; ``"new"``, the instructions at most.
        reusable: Leading tokens that were in an earlier request.
    """

    prompt: list[int]
    prefix: int
    kind: str
    reusable: int


def make_stream(
    tokenizer: Any, *, seed: int = SEED, requests: int = REQUESTS
) -> list[Asked]:
    """The requests in the order in which they arrive.

    Args:
        tokenizer: Of a model with a chat template.
        seed: The same seed gives the same stream.
        requests: How many.
    """
    rng = random.Random(seed)
    head, tail = _frame(tokenizer)
    corpus = load_corpus(plots=ALL, questions=requests, words=(0, ALL))
    documents = _documents(tokenizer, corpus.plots, rng)
    sequences = draw_sequences(rng)
    weights = [1 / rank for rank in range(1, len(sequences) + 1)]
    drawn = rng.choices(sequences, weights, k=requests)
    prompts = []
    for sequence, question in zip(drawn, corpus.questions, strict=True):
        texts = itertools.chain.from_iterable(documents[i] for i in sequence)
        prefix = [*head, *texts]
        prompts.append((prefix, [*_ids(tokenizer, question.text), *tail]))
    return _judged(drawn, prompts)


def draw_sequences(rng: random.Random) -> list[tuple[int, ...]]:
    """Different sequences of documents, in the order of their popularity."""
    found: list[tuple[int, ...]] = []
    for _ in range(FAMILIES):
        first = rng.sample(range(DOCUMENTS), LENGTH)
        shared = first[: rng.randint(1, LENGTH - 1)]
        found += [_ending(rng, shared) for _ in range(MEMBERS)]
    while len(found) < SEQUENCES:
        found.append(_ending(rng, []))
    rng.shuffle(found)
    return found


def _ending(rng: random.Random, shared: Sequence[int]) -> tuple[int, ...]:
    others = [i for i in range(DOCUMENTS) if i not in shared]
    return (*shared, *rng.sample(others, LENGTH - len(shared)))


def _judged(drawn: Sequence[tuple[int, ...]], prompts: Sequence[Any]) -> list[Asked]:
    seen: list[tuple[tuple[int, ...], list[int]]] = []
    found = []
    for sequence, (prefix, question) in zip(drawn, prompts, strict=True):
        prompt = prefix + question
        shared = [_common(sequence, other) for other, _ in seen]
        best = max(shared, default=0)
        kind = "whole" if best == LENGTH else "part" if best else "new"
        reusable = max((_common(prompt, other) for _, other in seen), default=0)
        found.append(Asked(prompt, len(prefix), kind, reusable))
        seen.append((sequence, prompt))
    return found


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common prefix."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))


def _frame(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What the chat template puts before the documents and after the question."""
    text = tokenizer.apply_chat_template(
        [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": _HERE},
        ],
        tokenize=False,
        add_generation_prompt=True,
    )
    head, tail = text.split(_HERE)
    return _ids(tokenizer, head), _ids(tokenizer, tail)


def _documents(tokenizer: Any, plots: Sequence[Plot], rng: random.Random) -> Any:
    """The beginnings of real texts, as token ids, each ended by an empty line."""
    end = _ids(tokenizer, "\n\n")
    found = []
    for plot in plots:
        ids = _ids(tokenizer, plot.text)
        size = rng.randint(SHORTEST, LONGEST) - len(end)
        if len(ids) >= size:
            found.append(ids[:size] + end)
    if len(found) < DOCUMENTS:
        raise SystemExit(f"the corpus has only {len(found)} documents of this length")
    return found[:DOCUMENTS]


def _ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids
