"""The way into the engine's queue for the calls of a batch: in turn, and patient.

Alone, a call that finds the queue full fails at once. In a batch it is better to wait:
what fills the queue is, most likely, the batch itself. One thread submits all calls of
a batch, in the order they came, and waits when there is no room; that holds for calls
from threads and from any event loop alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from typing import TYPE_CHECKING

from pcr_core import CancelledError, QueueFullError
from pcr_integrations._bridge import Call, Running

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
        self._lock = threading.Lock()
        self._inside: list[Running] = []
        self._closed = False
        self._look_again = threading.Event()
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
        with self._lock:
            self._closed = True
            for running in self._inside:
                running.release()
        self._look_again.set()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def join(self) -> None:
        """Wait until nothing is being submitted any more."""
        self._thread.shutdown(wait=True)

    def reused(self) -> float | None:
        """Return which share of the prompt tokens answered so far was reused."""
        with self._lock:
            self._forget_ended()
            if not self._prompt_tokens:
                return None
            return self._cached_tokens / self._prompt_tokens

    def _enqueue(self, call: Call) -> Future[Running]:
        with self._lock:
            if self._closed:
                raise _over()
            return self._thread.submit(copy_context().run, self._admit, call)

    def _admit(self, call: Call) -> Running:
        """Submit, on the turnstile's thread; where the queue is full, wait for room."""
        while True:
            try:
                return self._let_in(call.start())
            except QueueFullError:
                oldest = self._oldest()
                if oldest is None:
                    raise  # the queue is full of somebody else's requests
                self._wait_for(oldest.completion)

    def _let_in(self, running: Running) -> Running:
        with self._lock:
            if self._closed:
                running.release()
                raise _over()
            self._inside.append(running)
            return running

    def _oldest(self) -> Running | None:
        with self._lock:
            if self._closed:
                raise _over()
            self._forget_ended()
            return next(iter(self._inside), None)

    def _wait_for(self, completion: Completion) -> None:
        """Wait until it is over, or this turnstile closed."""
        self._look_again.clear()
        completion.subscribe(
            lambda: self._look_again.set() if completion.done else None
        )
        if not self._closed:  # if it is closed from here on, the event is set
            self._look_again.wait()

    def _forget_ended(self) -> None:
        """Count the requests that are over, and let go of them."""
        waiting = []
        for running in self._inside:
            if not running.completion.done:
                waiting.append(running)
                continue
            with contextlib.suppress(Exception):  # its own waiter reports a failure
                usage = running.completion.result().usage
                self._prompt_tokens += usage.prompt_tokens
                self._cached_tokens += usage.cached_tokens
        self._inside = waiting


def _over() -> CancelledError:
    return CancelledError("the batch this call belongs to is over; nothing was run")


def _release(future: Future[Running]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.result().release()


_CURRENT: ContextVar[Turnstile | None] = ContextVar("pcr_turnstile", default=None)
