"""From a call to a completion and back, for threads and for event loops.

The engine knows no asyncio. On a loop, everything that computes before the engine's
queue (loading the model, tokenising) runs in a thread, and waiting goes through
``Completion.subscribe``. Nothing that belongs to a loop outlives one call, so a wrapper
works in any number of loops and threads at once. Whoever stops listening — a closed
stream, a cancelled task, a timeout, Ctrl-C — cancels the request.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Generator,
    Sequence,
)
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pcr_core import QueueFullError, RequestError
from pcr_integrations._options import CallOptions
from pcr_integrations._tool_calls import ParsedReply, ToolCallFilter, parse_reply
from pcr_integrations._tools import ChatTurn, ask_for_format, tell_of_tools
from pcr_integrations.documents._submit import submit

if TYPE_CHECKING:
    from pcr_core import Completion, Engine, Result, SamplingParams


@dataclass(frozen=True, slots=True)
class Call:
    """One request as a wrapper sees it.

    Attributes:
        open_engine: Returns the engine; may load the model.
        render: Returns the prompt for that engine: text for the model as it is, or the
            turns of a chat.
        options: What the call asks for.
    """

    open_engine: Callable[[], Engine]
    render: Callable[[Engine], str | Sequence[ChatTurn]]
    options: CallOptions

    def start(self) -> Running:
        """Submit it. Blocks while the model loads and the prompt is tokenised.

        Raises:
            PcrError: If the engine cannot be built or refuses the request.
        """
        engine, options = self.open_engine(), self.options
        prompt = self.render(engine)
        if isinstance(prompt, str):
            completion = submit(engine, prompt, _for_text(options))
        else:
            asked = ask_for_format(prompt, options.response_format)
            turns, tools = tell_of_tools(engine, asked, options.tools)
            completion = submit(engine, turns, options.params, tools)
        return Running(engine, completion, self.options)

    async def astart(self) -> Running:
        """Submit it from a thread; a task cancelled meanwhile leaves nothing behind."""
        batch = Batch()
        try:
            await asyncio.to_thread(lambda: batch.add(self.start()))
        except BaseException:
            batch.cancel()
            raise
        return batch.started[0]


@dataclass(frozen=True, slots=True)
class Running:
    """A submitted call; iterate or wait once, in a thread or on a loop."""

    engine: Engine
    completion: Completion
    options: CallOptions

    def result(self) -> Result:
        """Wait for the end.

        Raises:
            TimeoutError: After ``options.timeout`` seconds; the request is cancelled.
            PcrError: Whatever the engine failed with.
        """
        try:
            self.wait()
        finally:
            self.release()
        return self.completion.result()

    async def aresult(self) -> Result:
        """As ``result``, without blocking the loop."""
        try:
            changed = _loop_event(self.completion)
            await _within(self.options.timeout, _until_done(self.completion, changed))
        finally:
            self.release()
        return self.completion.result()

    def pieces(self) -> Generator[str, None, None]:
        """Yield text as it is generated; closing the iterator cancels the request.

        Raises:
            TimeoutError: If nothing comes for ``options.timeout`` seconds.
            PcrError: Whatever the engine failed with.
        """
        changed = threading.Event()
        self.completion.subscribe(changed.set)
        changed.set()  # text may have come before the subscription
        try:
            over = False
            while not over:
                if not changed.wait(self.options.timeout):
                    raise _late(self.options.timeout)
                changed.clear()
                over = self.completion.done  # before take(), so that no text is left
                yield from self.completion.take()
        finally:
            self.release()
        self.completion.result()

    async def apieces(self) -> AsyncGenerator[str, None]:
        """As ``pieces``, without blocking the loop."""
        try:
            changed = _loop_event(self.completion)
            over = False
            while not over:
                await _within(self.options.timeout, changed.wait())
                changed.clear()
                over = self.completion.done
                for piece in self.completion.take():
                    yield piece
        finally:
            self.release()
        self.completion.result()

    def reader(self) -> ReplyReader:
        """Return what takes the answer apart."""
        return ReplyReader(self.options)

    def texts(self, reader: ReplyReader) -> Generator[str, None, None]:
        """As ``pieces``, but only what ``reader`` lets through."""
        with contextlib.closing(self.pieces()) as pieces:
            for piece in pieces:
                if text := reader.feed(piece):
                    yield text

    async def atexts(self, reader: ReplyReader) -> AsyncGenerator[str, None]:
        """As ``texts``, without blocking the loop."""
        async with contextlib.aclosing(self.apieces()) as pieces:
            async for piece in pieces:
                if text := reader.feed(piece):
                    yield text

    def wait(self) -> None:
        """Wait until it is over, whether well or not.

        Raises:
            TimeoutError: After ``options.timeout`` seconds; the request goes on.
        """
        completion, ended = self.completion, threading.Event()
        completion.subscribe(lambda: ended.set() if completion.done else None)
        if not ended.wait(self.options.timeout):
            raise _late(self.options.timeout)

    def release(self) -> None:
        """Cancel the request unless it is over."""
        if not self.completion.done:
            self.completion.cancel()


def _loop_event(completion: Completion) -> asyncio.Event:
    """Return an event of the running loop, set at every change of ``completion``."""
    loop, changed = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        # A closed loop has no waiter left to wake; the listener must not raise.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(changed.set)

    completion.subscribe(wake)
    changed.set()  # text may have come before the subscription
    return changed


async def _until_done(completion: Completion, changed: asyncio.Event) -> None:
    while not completion.done:
        await changed.wait()
        changed.clear()


async def _within(timeout: float | None, waiting: Awaitable[object]) -> None:
    try:
        await (waiting if timeout is None else asyncio.wait_for(waiting, timeout))
    except asyncio.TimeoutError:  # not the built-in one before Python 3.11
        raise _late(timeout) from None


def _late(timeout: float | None) -> TimeoutError:
    return TimeoutError(
        f"the engine gave nothing for {timeout} s, so the request was cancelled; a "
        "long prompt or a long queue needs a larger timeout=, or none"
    )


class ReplyReader:
    """Splits an answer into text and tool calls, whole or piece by piece."""

    def __init__(self, options: CallOptions) -> None:
        self._use = options.tools
        self._filter = ToolCallFilter(self._use) if self._use is not None else None

    def whole(self, text: str) -> ParsedReply:
        """Take a whole answer apart."""
        return ParsedReply(text) if self._use is None else parse_reply(text, self._use)

    def feed(self, piece: str) -> str:
        """Take the next piece of a stream; return what can be shown of it."""
        return piece if self._filter is None else self._filter.feed(piece)

    def finish(self) -> ParsedReply:
        """Return what the stream held back: the rest of the text, and the calls."""
        return ParsedReply("") if self._filter is None else self._filter.finish()


def _for_text(options: CallOptions) -> SamplingParams:
    """Return the sampling parameters of a call whose prompt is text.

    Raises:
        RequestError: If it asks for what only chat messages can have.
    """
    if options.tools is not None or options.response_format is not None:
        raise RequestError(
            "tools and response_format need chat messages; a text prompt takes neither"
        )
    return options.params


class Batch:
    """Calls started by one thread for a caller that may be gone before the last one.

    Attributes:
        started: Submitted so far, in the order of the prompts.
    """

    def __init__(self) -> None:
        self.started: list[Running] = []
        self._lock = threading.Lock()
        self._cancelled = False

    def add(self, running: Running) -> None:
        """Take in a call; one that comes after ``cancel()`` is cancelled at once."""
        with self._lock:
            self.started.append(running)
            if self._cancelled:
                running.release()

    def cancel(self) -> None:
        """Cancel what still runs, and what is yet to come."""
        with self._lock:
            self._cancelled = True
            for running in self.started:
                running.release()

    def submit_all(
        self,
        open_engine: Callable[[], Engine],
        prompts: Sequence[str],
        options: CallOptions,
    ) -> None:
        """Submit every prompt before any is waited for: the queue sees them all.

        Only where the engine's queue is full, the oldest of this batch is waited for.

        Raises:
            PcrError: The first failure to submit; ``cancel()`` is the caller's duty.
        """
        params = _for_text(options)
        engine = open_engine()
        for prompt in prompts:
            completion = self._submit(engine, prompt, params)
            self.add(Running(engine, completion, options))

    async def asubmit_all(
        self,
        open_engine: Callable[[], Engine],
        prompts: Sequence[str],
        options: CallOptions,
    ) -> None:
        """As ``submit_all``, from a thread, and ``cancel()`` is done where it fails."""
        try:
            await asyncio.to_thread(self.submit_all, open_engine, prompts, options)
        except BaseException:
            self.cancel()
            raise

    def _submit(
        self, engine: Engine, prompt: str, params: SamplingParams
    ) -> Completion:
        while True:
            try:
                return submit(engine, prompt, params)
            except QueueFullError:
                oldest = next((r for r in self.started if not r.completion.done), None)
                if oldest is None:
                    raise  # the queue is full of somebody else's requests
                oldest.wait()
