"""What the engine thread does: one step at a time, one request at a time.

``EngineLoop`` brings tiers and model together. It has no thread and no lock: whoever
calls ``step`` is the engine thread, which lets tests drive it deterministically.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from pcr_core.documents import ForgetReceipt
from pcr_core.errors import CancelledError, EngineClosedError, ModelError, PcrError
from pcr_core.explain.lookup import Lookup
from pcr_core.ledger import Ledger, Removal
from pcr_core.model.chunk_io import ChunkIO, Head
from pcr_core.model.generation import Generation
from pcr_core.model.runner import Runner
from pcr_core.request import Request
from pcr_core.scheduler import Scheduler
from pcr_core.tiers import Lease, TierManager

_log = logging.getLogger("pcr_core.engine")


class EngineLoop:
    """Serves requests. Engine thread only.

    Args:
        runner: Runs the model.
        tokenizer: Its tokenizer.
        end_ids: Tokens that end a generation.
        tiers: The tier manager.
        record: Called with each finished request and the tokens it generated.

    Attributes:
        tiers: The tier manager.
        finished, cancelled, failed: Requests that ended so.
        closing: Says whether all work is to end; asked while a request is prefilled.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Any,
        end_ids: Sequence[int],
        tiers: TierManager,
        record: Callable[[Request, int], None] = lambda request, generated: None,
    ) -> None:
        self.tiers = tiers
        self.finished = 0
        self.cancelled = 0
        self.failed = 0
        self._runner = runner
        self._tokenizer = tokenizer
        self._end_ids = end_ids
        self._ledger = Ledger(tiers, runner.forget)
        self._record = record
        self._scheduler = Scheduler()
        self._active: Generation | None = None
        self._seen = (-1, -1)
        self.closing: Callable[[], bool] = lambda: False

    @property
    def busy(self) -> bool:
        """Whether ``step`` has anything to do."""
        return self._active is not None or len(self._scheduler) > 0

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
        return self._ledger.begin_forget(document, self._scheduler.waiting())

    def end_forget(self, document: str, removal: Removal) -> ForgetReceipt:
        """Finish it, once the job has ended; see ``Ledger``."""
        return self._ledger.end_forget(document, removal, self._scheduler.waiting())

    def hint(self, request: Request) -> None:
        """Prepare for a request that may come; it is not run."""
        request.usable = self._runner.usable_chunks(len(request.tokens))
        self.tiers.hint(request)

    def step(self) -> int:
        """Prefill the next request, or decode one token of the running one.

        A request's own failure ends that request only; a waiting request that was
        cancelled ends at once.

        Returns:
            How many requests have left the queue in this step.
        """
        self.tiers.poll()
        gone = self._scheduler.drop_cancelled()
        for cancelled in gone:
            self._guard(cancelled, cancelled.raise_if_cancelled)
        self._ledger.catch_up(self._scheduler.waiting())
        if self._active is None:
            request = self._scheduler.next()
            if request is not None:
                self._guard(request, lambda: self._start(request))
                return len(gone) + 1
        self._look_ahead()
        if self._active is not None:
            self._guard(self._active.request, self._decode)
        return len(gone)

    def idle(self) -> bool:
        """Use a moment without requests; returns whether another would help too."""
        self.tiers.poll()
        self._ledger.catch_up(())
        self._look_ahead()
        return self.tiers.prepare()

    def abandon(self, error: BaseException) -> None:
        """Fail every request that has not ended."""
        requests = self._scheduler.drain()
        if self._active is not None:
            requests.insert(0, self._active.request)
            self._close_active()
        for request in requests:
            request.completion.fail(error)

    def _look_ahead(self) -> None:
        """Protect and fetch what the queue needs, if queue or tiers have changed."""
        seen = (self._scheduler.version, self.tiers.version)
        if seen != self._seen:
            self.tiers.look_ahead(self._scheduler.upcoming(self.tiers.window))
            self._seen = seen

    def _start(self, request: Request) -> None:
        request.raise_if_cancelled()
        self._ledger.note(request)
        generation = Generation(self._runner, self._tokenizer, request, self._end_ids)
        self._active = generation
        with self.tiers.lease(
            request.keys, request.tokens, request.usable, generation.resident
        ) as lease:
            lease.checkpoint = lambda: self._checkpoint(request)
            # Reads ahead are for requests that wait: those behind it, while it runs.
            self._look_ahead()
            self._prefill(generation, lease)
        generation.note_reads(lease.reads)
        self._finish_if_done(generation)

    def _prefill(self, generation: Generation, lease: Lease) -> None:
        heads = {i: Head(one.slot, one.tokens) for i, one in lease.heads.items()}
        io = ChunkIO(
            sources=lease.sources,
            arriving=lease.arriving,
            lost=lease.lost,
            sinks=lease.sinks,
            filled=lease.filled,
            between=lease.checkpoint,
            pending=lease.pending,
            settle=lease.settle,
            heads=heads,
        )
        try:
            for forward in generation.prefill(io, lease.tiers):
                new = forward.stop - forward.start
                self.tiers.prefill_times.observe(forward.start, new, forward.seconds)
            lease.reused = generation.cached_by_tier
        except ModelError:
            lease.discard()  # KV behind a failed forward or NaN logits is worthless
            raise

    def _checkpoint(self, request: Request) -> None:
        """Raise if nobody waits for a request any more."""
        request.raise_if_cancelled()
        if self.closing():
            raise EngineClosedError("the engine is closed; build a new one")

    def _decode(self) -> None:
        assert self._active is not None
        self._active.request.raise_if_cancelled()
        self._active.step()
        self._finish_if_done(self._active)

    def _finish_if_done(self, generation: Generation) -> None:
        if generation.finished:
            result = generation.result()
            self._close_active()
            self.finished += 1
            self._record(generation.request, len(result.token_ids))
            generation.request.completion.finish(result)

    def _guard(self, request: Request, work: Any) -> None:
        """Run a request's work; turn what it raises into that request's failure."""
        try:
            work()
        except CancelledError as error:
            self.cancelled += 1
            self._fail(request, error)
        except PcrError as error:
            self.failed += 1
            self._fail(request, error)
        except Exception as error:
            _log.exception("a request failed unexpectedly")
            self.failed += 1
            wrapped = ModelError(f"the request failed: {type(error).__name__}: {error}")
            wrapped.__cause__ = error
            self._fail(request, wrapped)

    def _fail(self, request: Request, error: BaseException) -> None:
        if self._active is not None and self._active.request is request:
            self._close_active()
        request.completion.fail(error)

    def _close_active(self) -> None:
        if self._active is not None:
            generation, self._active = self._active, None
            generation.close()
