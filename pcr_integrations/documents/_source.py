"""One retriever as the language models see it: what it hands over, what comes of it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from pcr_core import ConfigError, Document, PcrError
from pcr_integrations._counters import Counters
from pcr_integrations.documents._hints import HINTS
from pcr_integrations.documents._layouts import Layout
from pcr_integrations.documents._learning import Handed, Learner, Prediction
from pcr_integrations.documents._order import (
    Order,
    Permutation,
    arrange,
    by_text,
    candidates,
)
from pcr_integrations.documents._question_first import QuestionFirst, warn
from pcr_integrations.documents._registry import registry
from pcr_integrations.documents._text_index import SHORTEST

if TYPE_CHECKING:
    from pcr_core import Engine


@dataclass(frozen=True, slots=True)
class Item:
    """A document on its way from a retriever to a chain.

    Attributes:
        forms: The texts it may have in a prompt, the usual one first, each with an id.
        score: How well it fits, the higher the better, or ``None``.
    """

    forms: tuple[Document, ...]
    score: float | None = None

    @property
    def text(self) -> str:
        """Its usual text, without the white space around it."""
        return self.forms[0].text.strip() if self.forms else ""


@dataclass(frozen=True, slots=True)
class Handover:
    """What became of one retrieval.

    Attributes:
        query: What was searched for.
        ids: Ids of the documents, in the order handed over.
        order: For each of them, its place in the retriever's own order.
        cached_tokens: With ``order="cache"``, how many leading tokens of the expected
            prompt were stored; ``None`` if that was not asked or not known.
        predicted: Whether the prompt's beginning was known, and the engine told.
    """

    query: str
    ids: tuple[str, ...]
    order: Permutation
    cached_tokens: int | None
    predicted: bool


@dataclass(frozen=True, slots=True)
class RetrieverStats(Counters):
    """Counters of one retriever wrapper. ``print`` shows a table.

    Attributes:
        retrievals: Retrievals.
        documents: Documents handed over.
        reordered: Retrievals whose order was changed.
        predicted: Prompts whose beginning was predicted and prefetched.
        confirmed: Prompts that began so.
        wrong: Prompts that began otherwise; each has cost a hint.
        unused: Predictions that no prompt came for.
    """

    retrievals: int = 0
    documents: int = 0
    reordered: int = 0
    predicted: int = 0
    confirmed: int = 0
    wrong: int = 0
    unused: int = 0


class DocumentSource:
    """What a retriever wrapper does as soon as it has documents. Any thread.

    ``hand_over`` registers them, orders them, and tells the engine how the next prompt
    will begin. ``predict`` says the same of documents that may change yet.

    Args:
        name: What to call it in a warning.
        order: See the wrappers.
        score_tolerance: See the wrappers.

    Raises:
        ConfigError: For an unknown order or a negative tolerance.
    """

    def __init__(
        self, name: str, order: str = "retrieval", score_tolerance: float | None = None
    ) -> None:
        if order not in get_args(Order):
            raise ConfigError(
                f"order={order!r} is unknown; use 'retrieval' (as they come), 'stable' "
                "(by their text) or 'cache' (what is stored first)"
            )
        if score_tolerance is not None and not score_tolerance >= 0:
            raise ConfigError(
                f"score_tolerance must be 0 or more, not {score_tolerance!r}; None "
                "leaves scores out of account"
            )
        self._name, self._order, self._tolerance = name, order, score_tolerance
        self._lock = threading.Lock()
        self._learner = Learner()
        self._question_first = QuestionFirst()
        self._retrievals = self._documents = self._reordered = 0
        self._last: Handover | None = None

    def hand_over(self, query: str, items: Sequence[Item]) -> Handover:
        """Note documents that are about to go into a prompt, and prepare for it.

        Tokenises with ``order="cache"``, and waits for the engine's running step then.

        Args:
            query: What was searched for.
            items: The documents, in the retriever's order.

        Returns:
            Among others, the order in which they are to go on.
        """
        registry().add((form for item in items for form in item.forms), self)
        order, cached = self._arrange(items)
        texts = [items[i].text for i in order if len(items[i].text) >= SHORTEST]
        with self._lock:
            prediction = self._learner.predict(texts)
            self._learner.expect(Handed(query, texts, prediction))
            ids = tuple(items[i].forms[0].id for i in order if items[i].forms)
            done = Handover(query, ids, order, cached, prediction is not None)
            self._retrievals += 1
            self._documents += len(items)
            self._reordered += order != tuple(range(len(items)))
            self._last = done
        engine = None if prediction is None else prediction.engine()
        if prediction is not None and engine is not None:
            HINTS.send(engine, prediction.prompt, prediction.tools)
        return done

    def arranged(self, items: Sequence[Item]) -> list[Item]:
        """Return documents in the order in which they would be handed over now.

        Notes nothing. Asks the engine with ``order="cache"``.
        """
        return [items[index] for index in self._arrange(items)[0]]

    def predict(self, items: Sequence[Item]) -> Prediction | None:
        """Return how the prompt would begin if these documents went into it.

        Nothing is noted, and no engine is told.
        """
        with self._lock:
            return self._learner.predict([item.text for item in items])

    def note(self, engine: Engine, layout: Layout) -> None:
        """Learn from a prompt with documents of this source."""
        with self._lock:
            handed = self._learner.note(engine, layout)
            query = "" if handed is None else handed.query
            front = self._question_first.finding(layout.front, layout.texts[0], query)
        if front is not None:
            warn(front, self._name)

    @property
    def last(self) -> Handover | None:
        """The last handover in any thread."""
        return self._last

    @property
    def stats(self) -> RetrieverStats:
        """Counters as they are now."""
        with self._lock:
            learner = self._learner
            return RetrieverStats(
                self._retrievals,
                self._documents,
                self._reordered,
                learner.predicted,
                learner.confirmed,
                learner.wrong,
                learner.unused,
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> DocumentSource:
        return self  # copies of a wrapper feed the same chain

    def __reduce__(self) -> tuple[type[DocumentSource], tuple[Any, ...]]:
        return type(self), (self._name, self._order, self._tolerance)

    def _arrange(self, items: Sequence[Item]) -> tuple[Permutation, int | None]:
        scores = [item.score for item in items]
        if self._order == "stable":
            wish = by_text([item.text for item in items])
            return arrange(wish, scores, self._tolerance), None
        if self._order == "cache" and items:
            return self._most_cached(items, scores)
        return tuple(range(len(items))), None

    def _most_cached(
        self, items: Sequence[Item], scores: Sequence[float | None]
    ) -> tuple[Permutation, int | None]:
        texts = [item.text for item in items]
        with self._lock:
            earlier = self._learner.sequences()
            orders = candidates(texts, earlier, scores, self._tolerance)
            guesses = [
                self._learner.predict([texts[i] for i in order]) for order in orders
            ]
        known = [guess for guess in guesses if guess is not None]
        engine = known[0].engine() if known else None
        if engine is None or len(known) < len(orders):
            return orders[0], None
        try:
            cached = engine.cached_tokens(
                [guess.prompt for guess in known], tools=known[0].tools
            )
        except PcrError:
            return orders[0], None  # the request will say what is wrong
        best = max(range(len(orders)), key=cached.__getitem__)
        return orders[best], cached[best]


class SourceReports:
    """What a wrapper tells of its source. A mixin; ``_source`` is the wrapper's own."""

    _source: DocumentSource

    @property
    def stats(self) -> RetrieverStats:
        """Retrievals and predictions so far."""
        return self._source.stats

    @property
    def last(self) -> Handover | None:
        """The last retrieval in any thread: its ids, and how they were reordered."""
        return self._source.last
