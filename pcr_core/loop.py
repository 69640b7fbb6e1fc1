"""What the engine thread does, one step at a time.

A step computes some of one prompt and gives every running request a token.
``EngineLoop`` brings tiers and model together. It has no thread and no lock: whoever
calls ``step`` is the engine thread, which lets tests drive it deterministically.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pcr_core.answer_store import AnswerStore
from pcr_core.decoding import Decoded, decoded
from pcr_core.document_use import DocumentTotals
from pcr_core.documents import ForgetReceipt
from pcr_core.errors import (
    CancelledError,
    DeviceMemoryError,
    EngineClosedError,
    ModelError,
    PcrError,
)
from pcr_core.explain.lookup import Lookup
from pcr_core.ledger import Ledger, Removal
from pcr_core.model.generation import Generation, room_for
from pcr_core.model.runner import Runner
from pcr_core.prefilling import Prefilling
from pcr_core.request import Request
from pcr_core.scheduler import Order, Scheduler, Standing
from pcr_core.tiers import TierManager

_log = logging.getLogger("pcr_core.engine")


@dataclass(frozen=True)
class Batching:
    """How much runs at a time, and in what order.

    Attributes:
        rows: Requests that generate at the same time.
        prefill_tokens: Prompt tokens computed per step beside them.
        order, max_overtakes: See ``Scheduler``.
        store_answers: See ``EngineConfig``.
    """

    rows: int = 8
    prefill_tokens: int = 512
    order: Order = "fcfs"
    max_overtakes: int = 32
    store_answers: bool = False


class EngineLoop:
    """Serves requests. Engine thread only.

    Args:
        runner: Runs the model.
        tokenizer: Its tokenizer.
        end_ids: Tokens that end a generation.
        tiers: The tier manager.
        record: Called with each finished request and the tokens it generated.
        batching: How much runs at a time.
        clock: Seconds, on the scale of ``Request.deadline``.

    Attributes:
        tiers: The tier manager.
        finished, cancelled, failed: Requests that ended so.
        preempted: How often a running request was put back into the queue.
        closing: Says whether all work is to end; asked while a request is prefilled.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Any,
        end_ids: Sequence[int],
        tiers: TierManager,
        record: Callable[[Request, int], None] = lambda request, generated: None,
        batching: Batching | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.tiers = tiers
        self.finished = 0
        self.cancelled = 0
        self.failed = 0
        self.preempted = 0
        self._batching = batching or Batching()
        self._runner = runner
        self._tokenizer = tokenizer
        self._end_ids = end_ids
        self._ledger = Ledger(tiers, runner.forget)
        self._record = record
        self._clock = clock
        self._scheduler = Scheduler(
            self._batching.order, self._batching.max_overtakes, self._standing
        )
        self._prefilling: Prefilling | None = None
        self._running: list[Generation] = []  # the oldest first
        self._suspended: dict[Request, Generation] = {}
        self._answers = AnswerStore(
            self._runner, tiers, self._generation, lambda: self.closing()
        )
        self._seen = (-1, -1)
        self._chosen: tuple[tuple[int, int], Request | None] | None = None
        self.closing: Callable[[], bool] = lambda: False

    @property
    def busy(self) -> bool:
        """Whether ``step`` has anything to do."""
        return bool(self._running or self._prefilling or len(self._scheduler))

    @property
    def running(self) -> int:
        """Requests that have a row."""
        return len(self._running) + (self._prefilling is not None)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._scheduler)

    @property
    def documents(self) -> tuple[DocumentTotals, ...]:
        """What finished requests have reused of each document, the latest first."""
        return self._ledger.documents

    def add(self, request: Request) -> None:
        """Enqueue a request."""
        request.usable = self._runner.usable_chunks(len(request.tokens))
        self._ledger.admit(request)
        self._scheduler.add(request)

    def lookup(self, request: Request) -> Lookup:
        """What is known about a prompt, for ``explain``. Changes nothing."""
        size = len(request.tokens)
        request.usable = self._runner.usable_chunks(size)
        resident = self._runner.resident(request.tokens)
        return self._ledger.lookup(request, self._runner.must_compute(size), resident)

    def cached(self, request: Request) -> int:
        """How many leading tokens need not be computed. Changes nothing."""
        size = len(request.tokens)
        usable = request.keys[: self._runner.usable_chunks(size)]
        states = self.tiers.match(usable)
        stored = next((i for i, one in enumerate(states) if one == "none"), len(states))
        resident = self._runner.resident(request.tokens)
        return max(stored * self.tiers.chunk_tokens, resident)

    def begin_forget(self, document: bytes) -> Removal:
        """Forget a document in memory, and start on the store; see ``Ledger``."""
        return self._ledger.begin_forget(document, self._to_be_stored())

    def end_forget(self, document: str, removal: Removal) -> ForgetReceipt:
        """Finish it, once the job has ended; see ``Ledger``."""
        return self._ledger.end_forget(document, removal, self._to_be_stored())

    def hint(self, request: Request) -> None:
        """Prepare for a request that may come; it is not run."""
        request.usable = self._runner.usable_chunks(len(request.tokens))
        self.tiers.hint(request)

    def step(self) -> int:
        """Compute some of one prompt, and one token of every running request.

        A request's own failure ends that request only; a waiting request that was
        cancelled or is late ends at once.

        Returns:
            How many requests have left the queue in this step, less those put back.
        """
        before = len(self._scheduler)
        self.tiers.poll()
        self._drop_unwanted()
        self._ledger.catch_up(self._to_be_stored())
        running = list(self._running)
        self._admit()
        self._look_ahead()
        if self._prefilling is not None:
            advance: Callable[[], None] = self._advance
            if running:
                advance = self._advance_beside
            self._guard(self._prefilling.request, advance)
        self._make_room(running)
        self._decode([one for one in running if one in self._running])
        return before - len(self._scheduler)

    def idle(self) -> bool:
        """Use a moment without requests; returns whether another would help too."""
        self.tiers.poll()
        self._ledger.catch_up(self._to_be_stored())
        self._look_ahead()
        if self._answers.advance(self._batching.prefill_tokens):
            return True
        return self.tiers.prepare()

    def abandon(self, error: BaseException) -> None:
        """Fail every request that has not ended, and free what they hold.

        In this order: what an error has left behind may not be freed any more.
        """
        begun = [generation.request for generation in self._running]
        if self._prefilling is not None:
            begun.append(self._prefilling.request)
        for request in [*begun, *self._scheduler.drain()]:
            request.completion.fail(error)
        self._suspended.clear()
        frees: list[Callable[[], None]] = [self._answers.close]
        frees += [partial(self._let_go, request) for request in begun]
        for free in frees:
            try:
                free()
            except Exception:
                _log.exception("what a request held could not be freed")

    # --- the queue ---

    def _to_be_stored(self) -> list[Request]:
        """Requests of which something may still be stored."""
        found = [*self._scheduler.waiting(), *self._answers.waiting()]
        found += [generation.request for generation in self._running]
        if self._prefilling is not None:
            found.append(self._prefilling.request)
        return found

    def _standing(self, request: Request) -> Standing:
        keys = request.keys[: request.usable]
        ready = not self.tiers.is_reading(keys)
        if self._batching.order == "fcfs":
            return Standing(ready)
        states = self.tiers.match(keys)
        there = sum(state != "none" for state in states)
        size = len(request.tokens)
        cached = min(there * self.tiers.chunk_tokens, size - 1)
        return Standing(ready, cached, size - cached)

    def _drop_unwanted(self) -> None:
        now = self._clock()
        gone = self._scheduler.drop(lambda r: r.completion.cancelled or r.is_late(now))
        for request in gone:
            self._guard(request, partial(request.raise_if_unwanted, now))

    def _look_ahead(self) -> None:
        """Protect and fetch what the queue needs, if queue or tiers have changed."""
        seen = (self._scheduler.version, self.tiers.version)
        if seen != self._seen:
            self.tiers.look_ahead(self._scheduler.upcoming(self.tiers.window))
            self._seen = seen
            self._chosen = None  # reads may have begun

    def _next(self) -> Request | None:
        """Who is next. Not asked anew at every step while there is no memory for it."""
        seen = (self._scheduler.version, self.tiers.version)
        if self._chosen is None or self._chosen[0] != seen:
            self._chosen = seen, self._scheduler.peek()
        return self._chosen[1]

    def _admit(self) -> None:
        """Begin with the next request, if there is a row for it and no other begins."""
        if self._prefilling is not None or len(self._running) >= self._batching.rows:
            return
        request = self._next()
        if request is None or (self._running and not self._fits(request)):
            return
        self._answers.pause()
        self._scheduler.take(request)
        self._guard(request, partial(self._begin, request))

    def _fits(self, request: Request) -> bool:
        """Whether there is memory for its row beside the others."""
        suspended = self._suspended.get(request)
        room = room_for(request) if suspended is None else suspended.room
        return self._runner.fits(room)

    def _generation(self, request: Request) -> Generation:
        return Generation(self._runner, self._tokenizer, request, self._end_ids)

    # --- a request's beginning ---

    def _begin(self, request: Request) -> None:
        self._check(request)
        self._ledger.note(request)
        generation = self._suspended.pop(request, None) or self._generation(request)
        try:
            generation.open()
            self._prefilling = Prefilling(
                generation, self.tiers, lambda: self._checkpoint(request)
            )
        except BaseException:
            generation.close()
            raise

    def _advance_beside(self) -> None:
        """Compute a part of it, unless that would keep running rows waiting for SSD."""
        prefilling = self._prefilling
        assert prefilling is not None
        if prefilling.is_late():
            self._checkpoint(prefilling.request)
        else:
            self._advance(self._batching.prefill_tokens)

    def _advance(self, budget: int | None = None) -> None:
        prefilling = self._prefilling
        assert prefilling is not None
        if not prefilling.advance(budget):
            return
        prefilling.finish()
        self._prefilling = None
        generation = prefilling.generation
        self._running.append(generation)
        self._join(generation)
        self._finish_if_done(generation)

    def _join(self, first: Generation) -> None:
        """Let the others of its group go on from its prompt, as rows allow."""
        group = first.request.group
        if group is None or first.token_ids[1:]:
            return
        for request in self._scheduler.waiting():
            if request.group is not group or request in self._suspended:
                continue
            if len(self._running) >= self._batching.rows or not self._fits(request):
                return
            if not self._scheduler.may_take(request):
                return
            self._scheduler.take(request)
            self._guard(request, partial(self._begin_beside, request, first))

    def _begin_beside(self, request: Request, first: Generation) -> None:
        self._check(request)
        generation = self._generation(request)
        self._running.append(generation)
        generation.open_beside(first)
        self._finish_if_done(generation)

    def _check(self, request: Request) -> None:
        """Raise if nobody waits for a request any more."""
        request.raise_if_unwanted(self._clock())

    def _checkpoint(self, request: Request) -> None:
        self._check(request)
        if self.closing():
            raise EngineClosedError("the engine is closed; build a new one")

    # --- running requests ---

    def _make_room(self, running: Sequence[Generation]) -> None:
        """Have every row hold one token more; the youngest may have to give way."""
        for generation in running:
            while generation in self._running:
                try:
                    generation.make_room()
                    break
                except DeviceMemoryError as error:
                    if self._put_back_youngest():
                        continue
                    self._fail(generation.request, error)

    def _put_back_youngest(self) -> bool:
        """Free the youngest request's row; False if there is but one."""
        if self.running < 2:
            return False
        if self._prefilling is not None:
            generation, prefilling = self._prefilling.generation, self._prefilling
            self._prefilling = None
            prefilling.close()
        else:
            generation = self._running.pop()
        generation.suspend()
        self._suspended[generation.request] = generation
        self._scheduler.put_back(generation.request)
        self.preempted += 1
        return True

    def _decode(self, running: Sequence[Generation]) -> None:
        for generation in running:
            self._guard(generation.request, partial(self._check, generation.request))
        wanted = [one for one in running if one in self._running]
        for one in decoded(self._runner, wanted):
            self._guard(one.generation.request, partial(self._accept, one))

    def _accept(self, one: Decoded) -> None:
        one.accept()
        self._finish_if_done(one.generation)

    def _finish_if_done(self, generation: Generation) -> None:
        if generation.finished:
            result = generation.result()
            request = generation.request
            self._let_go(request)
            self.finished += 1
            self._record(request, len(result.token_ids))
            self._ledger.count(request, result.documents)
            if self._batching.store_answers:
                self._answers.add(request, result.token_ids)
            request.completion.finish(result)

    # --- failures ---

    def _guard(self, request: Request, work: Callable[[], None]) -> None:
        """Run a request's work; turn what it raises into that request's failure."""
        try:
            work()
        except Exception as error:
            self._fail(request, error)

    def _fail(self, request: Request, error: Exception) -> None:
        """Count a request's failure, free what it holds, and tell whoever waits."""
        if isinstance(error, CancelledError):
            self.cancelled += 1
        else:
            self.failed += 1
        if not isinstance(error, PcrError):
            _log.error("a request failed unexpectedly", exc_info=error)
            cause, error = error, ModelError(f"the request failed: {_words(error)}")
            error.__cause__ = cause
        self._let_go(request)
        request.completion.fail(error)

    def _let_go(self, request: Request) -> None:
        """Free what a request holds, whatever that is."""
        self._scheduler.done(request)
        self._suspended.pop(request, None)
        if self._prefilling is not None and self._prefilling.request is request:
            prefilling, self._prefilling = self._prefilling, None
            prefilling.close()
            prefilling.generation.close()
        for one in [one for one in self._running if one.request is request]:
            self._running.remove(one)
            one.close()


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
