"""The way into the engine's queue for the calls of a batch: in turn, and patient.

Alone, a call that finds the queue full fails at once. In a batch it is better to wait:
what fills the queue is, most likely, the batch itself. One thread submits all calls of
a batch, in the order they came, and waits when there is no room; that holds for calls
from threads and from any event loop alike.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from functools import partial
from typing import TYPE_CHECKING

from pcr_core import CancelledError, PcrError
from pcr_integrations._bridge import Batch, Call, Running

if TYPE_CHECKING:
    from pcr_core import Completion


def start(call: Call) -> Running:
    """Submit ``call``: through the turnstile of the batch it belongs to, if any.

    Raises:
        PcrError: As ``Call.start``.
    """
    turnstile = _CURRENT.get()
    return call.start() if turnstile is None else turnstile.start(call)


async def astart(call: Call) -> Running:
    """As ``start``, without blocking the loop."""
    turnstile = _CURRENT.get()
    return await (call.astart() if turnstile is None else turnstile.astart(call))


@contextlib.asynccontextmanager
async def one_turnstile() -> AsyncIterator[Turnstile]:
    """Send the calls of this context through one turnstile; cancel what is left."""
    turnstile = Turnstile()
    token = _CURRENT.set(turnstile)
    try:
        yield turnstile
    finally:
        _CURRENT.reset(token)
        turnstile.close()
        await asyncio.to_thread(turnstile.join)


class Turnstile:
    """Submits calls one after the other. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pcr-turnstile")
        self._batch = Batch()
        self._prompt_tokens = 0
        self._cached_tokens = 0

    def start(self, call: Call) -> Running:
        """Submit ``call`` behind those that came before it.

        Raises:
            CancelledError: If the batch is over.
            QueueFullError: If the queue is full of requests that are not of this batch.
            PcrError: As ``Call.start``.
        """
        return self._enqueue(call).result()

    async def astart(self, call: Call) -> Running:
        """As ``start``; a task cancelled meanwhile leaves nothing behind."""
        future = self._enqueue(call)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(_release)  # it may be past the turnstile already
            raise

    def close(self) -> None:
        """Cancel what runs, and refuse what comes; returns at once."""
        self._batch.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def join(self) -> None:
        """Wait until nothing is being submitted any more."""
        self._thread.shutdown(wait=True)

    def reused(self) -> float | None:
        """Return which share of the prompt tokens answered so far was reused."""
        if not self._prompt_tokens:
            return None
        return self._cached_tokens / self._prompt_tokens

    def _enqueue(self, call: Call) -> Future[Running]:
        try:
            return self._thread.submit(copy_context().run, self._admit, call)
        except RuntimeError:  # it is shut down
            raise CancelledError(
                "the batch this call belongs to is over; nothing was run"
            ) from None

    def _admit(self, call: Call) -> Running:
        """Submit, on the turnstile's thread."""
        running = self._batch.start(call)
        running.completion.subscribe(partial(self._count, running.completion))
        return running

    def _count(self, completion: Completion) -> None:
        """Take note of an answer. Engine thread."""
        if completion.done:
            with contextlib.suppress(PcrError):  # its own waiter reports a failure
                usage = completion.result().usage
                self._prompt_tokens += usage.prompt_tokens
                self._cached_tokens += usage.cached_tokens


def _release(future: Future[Running]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.result().release()


_CURRENT: ContextVar[Turnstile | None] = ContextVar("pcr_turnstile", default=None)
