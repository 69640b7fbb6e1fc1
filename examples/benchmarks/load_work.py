"""The requests of a load test: the simulator's streams, in real text.

A stream says who asks when about which two documents. A document of the recipe's length
is a stretch of the corpus, wrapped around, that begins where no other does; a query is
one of the corpus' questions, cut or filled up to length, with a number of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from examples.corpus import load_corpus
from pcr_core.simulator.workloads import RECIPES, Recipe, draw

_STRIDE = 7919  # a prime: starts spread over the corpus and do not meet soon
_ALL = 10_000


@dataclass(frozen=True)
class Arrival:
    """One request.

    Attributes:
        at: Seconds after the start, one request a second on average.
        prompt: Token ids.
    """

    at: float
    prompt: list[int]


def recipe_for(
    name: str, requests: int | None, document_tokens: float | None
) -> Recipe:
    """A recipe by name, scaled: half the requests for half the documents.

    So what comes back is about the same share of any number of requests.
    """
    recipe = RECIPES[name]
    if requests is not None:
        documents = max(3, round(recipe.documents * requests / recipe.requests))
        recipe = replace(recipe, requests=requests, documents=documents)
    if document_tokens is not None:
        recipe = replace(recipe, document_tokens=document_tokens)
    return recipe


def make_arrivals(tokenizer: Any, recipe: Recipe, seed: int) -> list[Arrival]:
    """The stream as prompts ``[document 1][document 2][query]``."""
    corpus = load_corpus(plots=_ALL, questions=1000, words=(0, _ALL))
    text = _ids(tokenizer, "\n\n".join(plot.text for plot in corpus.plots))
    questions = [question.text for question in corpus.questions]

    def document(number: int, length: int) -> list[int]:
        start = number * _STRIDE % len(text)
        repeats = -(-(start + length) // len(text))
        return (text * repeats)[start : start + length]

    found = []
    for index, visit in enumerate(draw(recipe, seed)):
        question = f"{index}. {questions[index % len(questions)]}"
        query = (_ids(tokenizer, question) * recipe.query_tokens)[: recipe.query_tokens]
        documents = zip(visit.documents, visit.lengths, strict=True)
        prefix = [token for one in documents for token in document(*one)]
        found.append(Arrival(visit.arrival, [*prefix, *query]))
    return found


def _ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids
