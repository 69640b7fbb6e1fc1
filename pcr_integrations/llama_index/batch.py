"""Many questions to one query engine, with retrieval ahead of generation."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any, Literal, TypeVar, overload

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.response.schema import PydanticResponse, Response
from llama_index.core.schema import QueryBundle

from pcr_integrations.llama_index._questions import (
    AWAITED,
    CALLED,
    Limits,
    Style,
    answer_all,
    asker,
    bundles,
    keeping_errors,
)

Answer = Response | PydanticResponse
Question = str | QueryBundle
T = TypeVar("T")

_THREADS = 32
"""Questions at once to a query engine that is asked whole, and so in a thread each."""


@overload
def batch_query(
    query_engine: BaseQueryEngine,
    questions: Iterable[Question],
    *,
    show_progress: bool = ...,
    return_exceptions: Literal[False] = ...,
    max_concurrency: int | None = ...,
    retrieval_workers: int = ...,
) -> list[Answer]: ...


@overload
def batch_query(
    query_engine: BaseQueryEngine,
    questions: Iterable[Question],
    *,
    show_progress: bool = ...,
    return_exceptions: bool,
    max_concurrency: int | None = ...,
    retrieval_workers: int = ...,
) -> list[Answer | Exception]: ...


def batch_query(
    query_engine: BaseQueryEngine,
    questions: Iterable[Question],
    *,
    show_progress: bool = True,
    return_exceptions: bool = False,
    max_concurrency: int | None = None,
    retrieval_workers: int = 1,
) -> Any:
    """Answer many questions; the engine's queue sees every prompt as early as it can.

    A loop over ``query_engine.query`` hands the engine one prompt at a time. Here the
    documents of later questions are retrieved while earlier answers are generated, and
    every prompt is submitted as soon as it is known, in the order of the questions. So
    the engine can read ahead from SSD, keep what the queue will need, compute shared
    beginnings once, and run several answers side by side. The answers are those of
    ``query_engine.query``.

    Works from a notebook and from a thread, whether an event loop runs there or not.
    ``Ctrl-C`` cancels everything.

    Args:
        query_engine: Retrieval runs ahead if it offers ``retrieve`` and ``synthesize``,
            as ``index.as_query_engine()`` does, and has a ``PCRLLM``. Any other is
            asked whole, up to 32 questions at once, and a log line says so. What it
            streams is read to the end.
        questions: Texts or ``QueryBundle`` objects.
        show_progress: Show a bar: questions answered, and how much of their prompts
            was reused.
        return_exceptions: Put the error of a question in the place of its answer and go
            on. Otherwise the first error cancels the rest and is raised; a note on it
            names the question.
        max_concurrency: Questions in generation at once; ``None`` for all of them. A
            full queue of the engine is waited for, not failed at.
        retrieval_workers: Questions in retrieval at once. More than 1 needs a retriever
            that may be called from several threads.

    Returns:
        One answer per question, in the order of the questions.

    Raises:
        RequestError: If the arguments are not of these kinds.
        Exception: The first error of a question, unless ``return_exceptions``.

    Example:
        >>> batch_query(index.as_query_engine(), ["Who?", "When?"])  # doctest: +SKIP
    """
    answers = _answers(
        CALLED,
        query_engine,
        questions,
        Limits(max_concurrency, retrieval_workers),
        show_progress=show_progress,
        return_exceptions=return_exceptions,
    )
    return _on_a_loop_of_its_own(answers)


@overload
async def abatch_query(
    query_engine: BaseQueryEngine,
    questions: Iterable[Question],
    *,
    show_progress: bool = ...,
    return_exceptions: Literal[False] = ...,
    max_concurrency: int | None = ...,
    retrieval_workers: int = ...,
) -> list[Answer]: ...


@overload
async def abatch_query(
    query_engine: BaseQueryEngine,
    questions: Iterable[Question],
    *,
    show_progress: bool = ...,
    return_exceptions: bool,
    max_concurrency: int | None = ...,
    retrieval_workers: int = ...,
) -> list[Answer | Exception]: ...


async def abatch_query(
    query_engine: BaseQueryEngine,
    questions: Iterable[Question],
    *,
    show_progress: bool = True,
    return_exceptions: bool = False,
    max_concurrency: int | None = None,
    retrieval_workers: int = 1,
) -> Any:
    """As ``batch_query``, on the caller's event loop, with the engine's async methods.

    A task that is cancelled while it waits here cancels every request of the batch.
    """
    answers = _answers(
        AWAITED,
        query_engine,
        questions,
        Limits(max_concurrency, retrieval_workers),
        show_progress=show_progress,
        return_exceptions=return_exceptions,
    )
    return await answers()


def _answers(
    style: Style,
    query_engine: BaseQueryEngine,
    questions: Iterable[Question],
    limits: Limits,
    *,
    show_progress: bool,
    return_exceptions: bool,
) -> Callable[[], Coroutine[Any, Any, list[Any]]]:
    """Check the arguments now; return what answers the questions on a loop."""
    asked = bundles(questions)
    ask = asker(query_engine, style, limits)
    if return_exceptions:
        ask = keeping_errors(ask)
    return partial(answer_all, asked, ask, show_progress=show_progress)


def _on_a_loop_of_its_own(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run ``main`` on a new loop in a new thread, and wait.

    In a new thread, since in a notebook this one has a loop that runs; and everywhere,
    since ``asyncio.run`` would take away the one that LlamaIndex may have put here.
    """
    handle: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = Future()
    outcome: Future[T] = Future()

    async def supervised() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        loop.set_default_executor(ThreadPoolExecutor(_THREADS, "pcr-batch"))
        handle.set_result((loop, task))
        return await main()

    def body() -> None:
        try:
            outcome.set_result(asyncio.run(supervised()))
        except BaseException as error:
            outcome.set_exception(error)

    thread = threading.Thread(
        target=copy_context().run, args=(body,), name="pcr-batch-loop"
    )
    thread.start()
    try:
        return outcome.result()
    finally:
        if not outcome.done():  # this thread was interrupted
            loop, task = handle.result()
            with contextlib.suppress(RuntimeError):  # it may have ended just now
                loop.call_soon_threadsafe(task.cancel)
        thread.join()
