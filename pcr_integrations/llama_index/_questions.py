"""The questions of one batch: retrieved in turn, answered side by side."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from llama_index.core import instrumentation
from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.response.schema import (
    AsyncStreamingResponse,
    StreamingResponse,
)
from llama_index.core.callbacks.schema import CBEventType, EventPayload
from llama_index.core.instrumentation.events.query import (
    QueryEndEvent,
    QueryStartEvent,
)
from llama_index.core.query_engine import TransformQueryEngine
from llama_index.core.schema import NodeWithScore, QueryBundle
from tqdm.auto import tqdm

from pcr_core import RequestError
from pcr_integrations.llama_index._turnstile import Turnstile, one_turnstile

_log = logging.getLogger("pcr_integrations.llama_index")
# Documented, but not exported in the sense of type checkers.
_dispatcher = instrumentation.get_dispatcher(__name__)  # type: ignore[attr-defined]

Ask = Callable[[QueryBundle], Coroutine[Any, Any, Any]]
Nodes = list[NodeWithScore]


@dataclass(frozen=True, slots=True)
class Style:
    """How the methods of a query engine are reached from a loop.

    Attributes:
        retrieve: Gives the nodes of a question.
        query: Asks a question whole.
    """

    retrieve: Callable[[BaseQueryEngine, QueryBundle], Awaitable[Nodes]]
    query: Callable[[BaseQueryEngine, QueryBundle], Awaitable[Any]]


async def _retrieve_in_thread(engine: BaseQueryEngine, question: QueryBundle) -> Nodes:
    return await asyncio.to_thread(engine.retrieve, question)


async def _query_in_thread(engine: BaseQueryEngine, question: QueryBundle) -> Any:
    return await asyncio.to_thread(engine.query, question)


async def _aretrieve(engine: BaseQueryEngine, question: QueryBundle) -> Nodes:
    if not hasattr(engine, "aretrieve"):  # BaseQueryEngine has none
        return await _retrieve_in_thread(engine, question)
    nodes: Nodes = await engine.aretrieve(question)
    return nodes


async def _aquery(engine: BaseQueryEngine, question: QueryBundle) -> Any:
    return await engine.aquery(question)


# A retriever's async client belongs to the loop it was first used on, so a caller
# without a loop gets the methods without one.
CALLED = Style(_retrieve_in_thread, _query_in_thread)
AWAITED = Style(_aretrieve, _aquery)


@dataclass(frozen=True, slots=True)
class Limits:
    """How many questions may be where at once.

    Attributes:
        generations: In generation; ``None`` for all of them.
        retrievals: In retrieval.

    Raises:
        RequestError: For a limit that is not a whole number above 0.
    """

    generations: int | None
    retrievals: int

    def __post_init__(self) -> None:
        for name, limit in (
            ("max_concurrency", self.generations),
            ("retrieval_workers", self.retrievals),
        ):
            allowed = limit is None and name == "max_concurrency"
            if not allowed and (type(limit) is not int or limit < 1):
                raise RequestError(f"{name} is a whole number above 0, not {limit!r}")


def bundles(questions: Iterable[str | QueryBundle]) -> list[QueryBundle]:
    """Check questions and give them the form query engines take.

    Raises:
        RequestError: For one question instead of many, or one that is no text.
    """
    if isinstance(questions, (str, QueryBundle)):
        raise RequestError("batch_query takes a list of questions, not one question")
    found = []
    for number, question in enumerate(questions):
        if isinstance(question, str):
            question = QueryBundle(question)
        if not isinstance(question, QueryBundle):
            raise RequestError(
                f"question {number} is a {type(question).__name__}; a question is a "
                "text or a QueryBundle"
            )
        found.append(question)
    return found


def asker(engine: BaseQueryEngine, style: Style, limits: Limits) -> Ask:
    """Return what answers one question, as early as this query engine allows.

    Raises:
        RequestError: If it is no query engine.
    """
    if not isinstance(engine, BaseQueryEngine):
        raise RequestError(
            f"batch_query takes a query engine, not {type(engine).__name__}; "
            "index.as_query_engine(llm=...) makes one"
        )
    if _has_two_steps(engine):
        return _TwoSteps(engine, style, limits).query
    _log.warning(
        "%s does not offer retrieve() and synthesize(), so batch_query asks it whole: "
        "each question is retrieved right before it is answered",
        type(engine).__name__,
    )
    return _Whole(engine, style, limits).query


async def answer_all(
    questions: Sequence[QueryBundle], ask: Ask, *, show_progress: bool
) -> list[Any]:
    """Ask all at once and return the answers in order; the first error ends it."""
    progress = tqdm(
        total=len(questions),
        desc="answering",
        unit="question",
        disable=not show_progress,
    )
    with progress as bar:
        async with one_turnstile() as turnstile:

            async def ask_one(question: QueryBundle) -> Any:
                try:
                    return await ask(question)
                finally:
                    _advance(bar, turnstile)

            return await _all_or_none(questions, ask_one)


async def _all_or_none(questions: Sequence[QueryBundle], ask: Ask) -> list[Any]:
    """As ``asyncio.gather``, but what goes on behind an error is cancelled."""
    tasks = [asyncio.create_task(ask(question)) for question in questions]
    try:
        return await asyncio.gather(*tasks)
    except BaseException as error:
        _say_which(error, tasks, questions)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def keeping_errors(ask: Ask) -> Ask:
    """As ``ask``, with an error in the place of an answer."""

    async def asked(question: QueryBundle) -> Any:
        try:
            return await ask(question)
        except Exception as error:
            return error

    return asked


def _has_two_steps(engine: BaseQueryEngine) -> bool:
    # That one would transform the question twice, once for each step.
    if isinstance(engine, TransformQueryEngine):
        return False
    return _overrides(engine, "retrieve") and (
        _overrides(engine, "asynthesize") or _overrides(engine, "synthesize")
    )


def _overrides(engine: BaseQueryEngine, name: str) -> bool:
    return getattr(type(engine), name) is not getattr(BaseQueryEngine, name)


class _Whole:
    """A query engine that retrieves and answers in one call."""

    def __init__(self, engine: BaseQueryEngine, style: Style, limits: Limits) -> None:
        self._engine = engine
        self._style = style
        self._generations = _gate(limits.generations)

    async def query(self, question: QueryBundle) -> Any:
        async with self._generations:
            return await _read_out(await self._style.query(self._engine, question))


class _TwoSteps:
    """A query engine whose retrieval can run ahead; with the events of ``aquery``."""

    def __init__(self, engine: BaseQueryEngine, style: Style, limits: Limits) -> None:
        self._engine = engine
        self._style = style
        self._retrievals = _gate(limits.retrievals)
        self._generations = _gate(limits.generations)

    @_dispatcher.span
    async def query(self, question: QueryBundle) -> Any:
        manager = self._engine.callback_manager
        _dispatcher.event(QueryStartEvent(query=question))
        with manager.as_trace("query"):
            asked: dict[str, Any] = {EventPayload.QUERY_STR: question.query_str}
            with manager.event(CBEventType.QUERY, payload=asked) as event:
                async with self._retrievals:
                    nodes = await self._style.retrieve(self._engine, question)
                async with self._generations:
                    response = await _read_out(await self._synthesize(question, nodes))
                event.on_end(payload={EventPayload.RESPONSE: response})
        _dispatcher.event(QueryEndEvent(query=question, response=response))
        return response

    async def _synthesize(self, question: QueryBundle, nodes: Nodes) -> Any:
        if _overrides(self._engine, "asynthesize"):
            return await self._engine.asynthesize(question, nodes)
        return await asyncio.to_thread(self._engine.synthesize, question, nodes)


def _gate(limit: int | None) -> contextlib.AbstractAsyncContextManager[Any]:
    return contextlib.nullcontext() if limit is None else asyncio.Semaphore(limit)


async def _read_out(response: Any) -> Any:
    """Read a stream to its end: one that outlives the batch would be cancelled."""
    if isinstance(response, AsyncStreamingResponse):
        return await response.get_response()
    if isinstance(response, StreamingResponse):
        return await asyncio.to_thread(response.get_response)
    return response


def _advance(bar: Any, turnstile: Turnstile) -> None:
    reused = turnstile.reused()
    if reused is not None:
        bar.set_postfix_str(f"{reused:.0%} of prompts reused", refresh=False)
    bar.update()


def _say_which(
    error: BaseException,
    tasks: Sequence[asyncio.Task[Any]],
    questions: Sequence[QueryBundle],
) -> None:
    """Note on ``error`` which question it belongs to (Python 3.11 and newer)."""
    for number, (task, question) in enumerate(zip(tasks, questions, strict=True)):
        failed = task.done() and not task.cancelled() and task.exception() is error
        if failed and hasattr(error, "add_note"):
            error.add_note(f"while answering question {number}: {question.query_str!r}")
            return
