"""Streams under LlamaIndex' event decorators, with an end that is certain.

``llm_chat_callback`` and ``llm_completion_callback`` wrap a generator into one that
fires events, but leave closing the inner one to the garbage collector. A handler that
keeps the exception event keeps its traceback, hence the inner generator, and an
abandoned request would go on computing. Here both are closed when the outer one is.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import aclosing, closing
from typing import Any, TypeVar

Response = TypeVar("Response")
Decorator = Callable[..., Any]


def with_events(
    decorator: Decorator,
    source: Generator[Response, None, None],
    call: tuple[Any, ...],
    options: dict[str, Any],
) -> Generator[Response, None, None]:
    """Fire the start event now, the others while the returned generator is read.

    Args:
        decorator: What ``llm_chat_callback()`` or ``llm_completion_callback()`` gave.
        source: The stream; not started yet.
        call: The LLM and the positional arguments that events report.
        options: The keyword arguments that events report.
    """

    def endpoint(*args: Any, **kwargs: Any) -> Generator[Response, None, None]:
        return source

    return _closing_both(decorator(endpoint)(*call, **options), source)


async def with_async_events(
    decorator: Decorator,
    source: AsyncGenerator[Response, None],
    call: tuple[Any, ...],
    options: dict[str, Any],
) -> AsyncGenerator[Response, None]:
    """As ``with_events``, for a coroutine that gives an async generator."""

    async def endpoint(*args: Any, **kwargs: Any) -> AsyncGenerator[Response, None]:
        return source

    return _aclosing_both(await decorator(endpoint)(*call, **options), source)


def _closing_both(
    outer: Generator[Response, None, None], source: Generator[Response, None, None]
) -> Generator[Response, None, None]:
    with closing(source), closing(outer):
        yield from outer


async def _aclosing_both(
    outer: AsyncGenerator[Response, None], source: AsyncGenerator[Response, None]
) -> AsyncGenerator[Response, None]:
    async with aclosing(source), aclosing(outer):
        async for response in outer:
            yield response
