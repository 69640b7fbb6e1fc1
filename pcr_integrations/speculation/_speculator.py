"""When to compute ahead of a search that has not ended: RAGCache's algorithm 2.

The dynamic speculative pipelining of RAGCache (arXiv 2404.12457, section 5.3), with the
rules of its algorithm 2: a prefill starts when the candidates have changed and nothing
is being computed; a changed order ends the one that runs. Two rules are ours: some
stages must agree first, and enough of the search must be left.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pcr_core import ConfigError
from pcr_integrations._background import Post
from pcr_integrations.speculation._ledger import Ledger
from pcr_integrations.speculation._pace import Clock, Pace
from pcr_integrations.speculation._plan import Plan, Planner
from pcr_integrations.speculation._prefill import Order, Prefill
from pcr_integrations.speculation._stats import SpeculationStats
from pcr_integrations.speculation._worker import WORKER

Name = Callable[[Any], Hashable]


@dataclass(frozen=True, slots=True)
class When:
    """When a prefill may start; see ``Speculator``."""

    agreeing: int
    lead: float
    pace: Pace

    def too_late(self, stage: int) -> bool:
        """Whether too little of the search is left after a stage, the first being 0."""
        left = self.pace.left(stage)
        return left is not None and left < self.lead


def _itself(document: Any) -> Hashable:
    named: Hashable = document
    return named


class Speculator:
    """Starts prefetch and prefill while a search in stages is still running.

    Any thread; searches may run side by side. Nothing here waits for the engine, raises
    into the search, or changes an answer: computed documents are reused like any other
    stored prefix, or they are not.

    Args:
        plan: Says how the prompt for some documents will begin: ``explicit(...)`` or
            ``Predicted(...)``.
        agreeing: Stages in a row that must have the same order before it is prefilled.
            1 prefills every new order at once, as RAGCache does.
        lead: Seconds that the search must still take, by what earlier searches took,
            for a prefill to start. A prefill in two parts costs one more forward than
            one in a piece, so what begins just before the end of the search makes the
            first token later. 0 starts always, as RAGCache does.
        name: Returns what makes two documents the same; they themselves by default.
        post: Where predicting and submitting is done; a thread of its own by default.

    Raises:
        clock: Seconds, rising.

    Raises:
        ConfigError: If ``agreeing`` is below 1 or ``lead`` below 0.
    """

    def __init__(
        self,
        plan: Planner,
        *,
        agreeing: int = 2,
        lead: float = 0.1,
        name: Name = _itself,
        post: Post | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        if agreeing < 1:
            raise ConfigError(f"agreeing must be 1 or more, not {agreeing}")
        if not lead >= 0:
            raise ConfigError(f"lead is in seconds, 0 or more, not {lead}")
        self._plan, self._name = plan, name
        self._when = When(agreeing, lead, Pace(clock))
        self._ledger = Ledger()
        self._post = post or WORKER.post

    def begin(self) -> Speculation:
        """Return what watches one search."""
        self._ledger.add(searches=1)
        return Speculation(self._plan, self._when, self._name, self._ledger, self._post)

    @property
    def stats(self) -> SpeculationStats:
        """Counters as they are now."""
        return self._ledger.stats

    def __deepcopy__(self, memo: dict[int, Any]) -> Speculator:
        return self  # copies of a wrapper serve the same chain

    def __reduce__(self) -> tuple[Any, ...]:
        when, name = self._when, self._name
        make = partial(Speculator, agreeing=when.agreeing, lead=when.lead, name=name)
        return partial(make, self._plan), ()

    def __repr__(self) -> str:
        counts = self.stats
        return (
            f"<Speculator: launched {counts.launched}, used {counts.used}, cancelled "
            f"{counts.cancelled}, {counts.wasted_tokens} tokens wasted>"
        )


class Speculation:
    """Watches one search. One thread calls ``stage`` and then ``finish``.

    A context manager: a search that ends without ``finish`` gives its work up.
    """

    def __init__(
        self, plan: Planner, when: When, name: Name, ledger: Ledger, post: Post
    ) -> None:
        self._plan, self._when, self._name = plan, when, name
        self._ledger, self._post = ledger, post
        self._lock = threading.Lock()
        self._order: Order | None = None
        self._agreed = 0
        self._stages: list[float] = []  # when each was over
        self._plans: dict[Order, Plan | None] = {}  # the worker's
        self._hinted: set[Order] = set()
        self._current: Prefill | None = None
        self._given_up: list[Prefill] = []
        self._over = False

    def stage(self, documents: Sequence[Any]) -> None:
        """Take note of the candidates after a stage that is not the last one."""
        order = tuple(map(self._name, documents))
        self._agreed = self._agreed + 1 if order == self._order else 1
        self._order = order
        self._stages.append(self._when.pace.clock())
        with self._lock:
            if self._current is not None and self._current.order != order:
                self._current.give_up(order)
                self._give_up()
            launched = self._current is not None
        if not order:
            return
        kept = list(documents)
        if order not in self._hinted:
            self._hinted.add(order)
            self._post(lambda: self._hint(order, kept))
        if launched or self._agreed < self._when.agreeing:
            return
        if self._when.too_late(len(self._stages) - 1):
            self._ledger.add(late=1)
            return
        self._post(lambda: self._launch(order, kept))

    def finish(self, documents: Sequence[Any]) -> None:
        """Take note of the result: what was computed for it goes on, the rest ends."""
        order = tuple(map(self._name, documents))
        if documents and not self._over:  # it was not given up
            self._when.pace.note(self._stages, self._when.pace.clock())
        with self._lock:
            self._over = True
            current, self._current = self._current, None
            earlier, self._given_up = self._given_up, []
        for prefill in earlier:
            prefill.judge(order)
        if current is not None:
            current.judge(order)
            hit = current.order == order
            self._ledger.add(used=int(hit), cancelled=int(not hit))

    def watcher(self, read: Callable[[Any], Sequence[Any]]) -> Callable[[Any], None]:
        """Return ``stage`` for a search that reports something else.

        Args:
            read: Returns the documents; what it raises is counted and goes no further.
        """

        def on_stage(found: Any) -> None:
            try:
                self.stage(read(found))
            except Exception as error:
                self._ledger.fail(error)

        return on_stage

    def __enter__(self) -> Speculation:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._over:
            self.finish(())

    def _give_up(self) -> None:
        assert self._current is not None
        self._given_up.append(self._current)
        self._current = None
        self._ledger.add(cancelled=1)

    # --- on the worker's thread ---

    def _planned(self, order: Order, documents: Sequence[Any]) -> Plan | None:
        """The plan for an order; asked for once, as it may tokenise and search."""
        if order not in self._plans:
            self._plans[order] = self._asked(documents)
        return self._plans[order]

    def _asked(self, documents: Sequence[Any]) -> Plan | None:
        try:
            plan = self._plan(documents)
        except Exception as error:  # a caller's own function may raise anything
            self._ledger.fail(error)
            return None
        if plan is None or not plan.steps:
            self._ledger.add(unknown=1)
            return None
        return plan

    def _is_stale(self, order: Order) -> bool:
        return self._over or order != self._order

    def _hint(self, order: Order, documents: Sequence[Any]) -> None:
        if self._is_stale(order):
            return
        plan = self._planned(order, documents)
        if plan is None:
            return
        last = plan.steps[-1]
        try:
            tools = {"tools": last.tools} if last.tools else {}
            plan.engine.prefetch(last.prompt, **tools)
            self._ledger.add(hints=1)
        except Exception as error:
            self._ledger.fail(error)

    def _launch(self, order: Order, documents: Sequence[Any]) -> None:
        if self._is_stale(order):
            return
        plan = self._planned(order, documents)
        if plan is None:
            return
        if not plan.engine.idle:
            again = partial(self._launch, order, documents)
            if not any(old.when_over(again) for old in self._given_up):
                self._ledger.add(busy=1)
            return
        prefill = Prefill(order, self._ledger, self._post)
        with self._lock:
            if self._is_stale(order) or self._current is not None:
                return
            self._current = prefill
            self._ledger.add(launched=1)
        prefill.begin(plan)
