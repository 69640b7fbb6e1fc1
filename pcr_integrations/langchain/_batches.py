"""Many calls at once: all of them are in the engine's queue before one is waited for.

They begin one after another: the next as soon as the one before is in the queue, or is
over without having needed the engine. So the queue has the order of the inputs, and
whatever a call does before it needs the engine, and behind it, is its own business.
"""

from __future__ import annotations

import asyncio
import queue
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from langchain_core.runnables.config import ContextThreadPoolExecutor

from pcr_integrations._bridge import Batch, Call, Running
from pcr_integrations.langchain._errors import as_langchain_has_them

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Place:
    """A call's place in a batch; that of a call by itself is in a batch of its own.

    Attributes:
        batch: Everything that was started, to be cancelled together.
        begun: Called when the call is in the engine's queue.
    """

    batch: Batch = field(default_factory=Batch)
    begun: Callable[[], None] = lambda: None

    def start(self, call: Call) -> Running:
        """Submit a call; where the queue is full, wait for the oldest of the batch.

        Raises:
            PromptOverflowError: Before any compute.
            PcrError: Whatever else the engine refused it for.
        """
        with as_langchain_has_them():
            running = self.batch.start(call)
        self.begun()
        return running

    async def astart(self, call: Call) -> Running:
        """As ``start``, without blocking the loop."""
        with as_langchain_has_them():
            running = await self.batch.astart(call)
        self.begun()
        return running


_place: ContextVar[Place | None] = ContextVar("pcr_place_in_a_batch", default=None)


def take_place() -> Place:
    """Return this call's place; what it calls in turn has none in this batch."""
    place = _place.get()
    _place.set(None)
    return place or Place()


class Turns:
    """Which of ``count`` calls may begin: one after another, ``at_most`` at a time.

    Args:
        count: Number of calls.
        at_most: How many may be under way, or ``None`` for all of them.

    Raises:
        ValueError: If none may.
    """

    def __init__(self, count: int, at_most: int | None) -> None:
        if at_most is not None and at_most < 1:
            raise ValueError(f"max_concurrency must be at least 1, not {at_most}")
        self._waiting = deque(range(count))
        self._room = count if at_most is None else at_most
        self._beginning: int | None = None
        self._left = count

    @property
    def over(self) -> bool:
        """True once every call has ended."""
        return self._left == 0

    def next(self) -> int | None:
        """Return the call that is to begin now, or ``None``."""
        if self._beginning is not None or not self._waiting or not self._room:
            return None
        self._room -= 1
        self._beginning = self._waiting.popleft()
        return self._beginning

    def begun(self, index: int) -> None:
        """Note that a call is in the queue."""
        if self._beginning == index:
            self._beginning = None

    def ended(self, index: int) -> None:
        """Note that a call is over, whether it was in the queue or not."""
        self.begun(index)
        self._room += 1
        self._left -= 1


def run(
    calls: Sequence[Callable[[], T]], at_most: int | None
) -> Generator[tuple[int, T], None, None]:
    """Run each call in a thread; yield its index and value when it ends.

    Closing the generator, or a call that raises, cancels the rest and waits for its
    threads.
    """
    turns, batch = Turns(len(calls), at_most), Batch()
    if len(calls) < 2:  # not worth a thread
        yield from enumerate(call() for call in calls)
        return
    happened: queue.SimpleQueue[tuple[int, Future[T] | None]] = queue.SimpleQueue()
    with ContextThreadPoolExecutor(max_workers=at_most or len(calls)) as pool:
        try:
            while not turns.over:
                if (index := turns.next()) is not None:
                    place = Place(batch, partial(happened.put, (index, None)))
                    future = pool.submit(_in_place, place, calls[index])
                    future.add_done_callback(partial(_put, happened.put, index))
                index, ended = happened.get()
                if ended is None:
                    turns.begun(index)
                else:
                    turns.ended(index)
                    yield index, ended.result()
        finally:
            batch.cancel()


async def arun(
    calls: Sequence[Callable[[], Awaitable[T]]], at_most: int | None
) -> AsyncGenerator[tuple[int, T], None]:
    """As ``run``, each call in a task."""
    turns, batch = Turns(len(calls), at_most), Batch()
    happened: asyncio.Queue[tuple[int, asyncio.Task[T] | None]] = asyncio.Queue()
    tasks: list[asyncio.Task[T]] = []
    try:
        while not turns.over:
            if (index := turns.next()) is not None:
                place = Place(batch, partial(happened.put_nowait, (index, None)))
                task = asyncio.create_task(_ain_place(place, calls[index]))
                task.add_done_callback(partial(_put, happened.put_nowait, index))
                tasks.append(task)
            index, ended = await happened.get()
            if ended is None:
                turns.begun(index)
            else:
                turns.ended(index)
                yield index, ended.result()
    finally:
        batch.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _put(put: Callable[[tuple[int, Any]], None], index: int, ended: Any) -> None:
    put((index, ended))


def _in_place(place: Place, call: Callable[[], T]) -> T:
    _place.set(place)
    return call()


async def _ain_place(place: Place, call: Callable[[], Awaitable[T]]) -> T:
    _place.set(place)
    return await call()
