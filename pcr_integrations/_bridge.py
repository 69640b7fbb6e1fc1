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
    Mapping,
    Sequence,
)
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pcr_core import CancelledError, QueueFullError, RequestError
from pcr_integrations._constraints import constrained
from pcr_integrations._options import CallOptions
from pcr_integrations._response_template import template_reply
from pcr_integrations._tool_calls import (
    ParsedReply,
    ToolCallFilter,
    limited,
    parse_reply,
)
from pcr_integrations._tools import ChatTurn, ask_for_format, tell_of_tools
from pcr_integrations.documents._submit import explain, submit

if TYPE_CHECKING:
    from pcr_core import Completion, Engine, Explanation, Result


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
        prompt, tools = self._prompt(engine)
        if isinstance(prompt, str):
            completion = submit(engine, prompt, options.params)
            return Running(engine, completion, options)
        params = constrained(engine, options)
        completion = submit(engine, prompt, params, tools)

        def parse() -> ParsedReply | None:
            return template_reply(engine, completion.result().token_ids, prompt, tools)

        return Running(engine, completion, options, parse)

    def explain(self) -> Explanation:
        """Say what of its prompt would be reused, the known documents named.

        Raises:
            PcrError: As ``start``.
        """
        engine = self.open_engine()
        prompt, tools = self._prompt(engine)
        return explain(engine, prompt, tools)

    def _prompt(
        self, engine: Engine
    ) -> tuple[str | list[ChatTurn], list[Mapping[str, Any]] | None]:
        """What the engine is given: a text or turns, and tools for the template.

        Raises:
            RequestError: If a text is to have what only chat messages can have.
        """
        prompt, options = self.render(engine), self.options
        if not isinstance(prompt, str):
            asked = ask_for_format(prompt, options.response_format, options.tools)
            return tell_of_tools(engine, asked, options.tools)
        if options.tools is not None or options.response_format is not None:
            raise RequestError(
                "tools and response_format need chat messages; a text prompt takes "
                "neither"
            )
        return prompt, None

    async def astart(self) -> Running:
        """Submit it from a thread; a task cancelled meanwhile leaves nothing behind."""
        return await _from_thread(self.start)


@dataclass(frozen=True, slots=True)
class Running:
    """A submitted call; iterate or wait once, in a thread or on a loop."""

    engine: Engine
    completion: Completion
    options: CallOptions
    parse: Callable[[], ParsedReply | None] = lambda: None
    """Reads the whole answer with the tokenizer's own parser, once there is one."""

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
        return ReplyReader(self.options, self.parse)

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

    def __init__(
        self,
        options: CallOptions,
        parse: Callable[[], ParsedReply | None] = lambda: None,
    ) -> None:
        self._use = options.tools
        self._parse = parse
        self._filter = ToolCallFilter(self._use) if self._use is not None else None

    def whole(self, text: str) -> ParsedReply:
        """Take a whole answer apart."""
        if self._use is None:
            return ParsedReply(text)
        own = self._parse()
        return limited(own, self._use) if own else parse_reply(text, self._use)

    def feed(self, piece: str) -> str:
        """Take the next piece of a stream; return what can be shown of it."""
        return piece if self._filter is None else self._filter.feed(piece)

    def finish(self) -> ParsedReply:
        """Return what the stream held back: the rest of the text, and the calls."""
        if self._use is None or self._filter is None:
            return ParsedReply("")
        rest = self._filter.finish()
        own = self._parse()
        if own is None:
            return rest
        # What was held back is the calls, unless the filter saw them itself.
        text = rest.text if rest.calls or rest.invalid else ""
        return replace(limited(own, self._use), text=text)


class Batch:
    """Calls of one caller, who may be gone before the last one. Any thread."""

    def __init__(self) -> None:
        self._under_way: list[Running] = []  # and some that have ended
        self._changed = threading.Condition()
        self._over = False

    def start(self, call: Call) -> Running:
        """As ``call.start()``, but where the queue is full it waits for room.

        It waits for the oldest call of this batch, so it raises ``QueueFullError`` only
        where the queue is full of somebody else's requests.

        Raises:
            CancelledError: If the batch was cancelled; nothing was submitted.
        """
        while True:
            oldest = self._oldest()
            try:
                running = call.start()
            except QueueFullError:
                if oldest is None:
                    raise
                self._wait_for_end(oldest.completion)
            else:
                self.add(running)
                return running

    async def astart(self, call: Call) -> Running:
        """As ``start``, from a thread; a task cancelled meanwhile leaves nothing."""
        return await _from_thread(lambda: self.start(call))

    def add(self, running: Running) -> None:
        """Take in a call; one that comes after ``cancel()`` is cancelled at once."""
        with self._changed:
            self._under_way.append(running)
            over = self._over
        if over:
            running.release()

    def cancel(self) -> None:
        """Cancel what still runs, and what is yet to come."""
        with self._changed:
            self._over = True
            for running in self._under_way:
                running.release()
            self._changed.notify_all()

    def _oldest(self) -> Running | None:
        """The oldest call that has not ended."""
        with self._changed:
            if self._over:
                raise CancelledError(
                    "the batch this call belongs to is over; nothing was run"
                )
            self._under_way = [r for r in self._under_way if not r.completion.done]
            return next(iter(self._under_way), None)

    def _wait_for_end(self, completion: Completion) -> None:
        """Wait until a call has ended, or this batch was cancelled."""

        def look_again() -> None:
            with self._changed:
                self._changed.notify_all()

        completion.subscribe(look_again)
        with self._changed:
            self._changed.wait_for(lambda: self._over or completion.done)


async def _from_thread(start: Callable[[], Running]) -> Running:
    """Start a call in a thread; if the task is cancelled meanwhile, so is the call."""
    one = Batch()

    def started() -> Running:
        running = start()
        one.add(running)
        return running

    try:
        return await asyncio.to_thread(started)
    except BaseException:
        one.cancel()
        raise
