"""The way from any thread to the engine's thread, and the end of it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from pcr_core.errors import EngineClosedError, QueueFullError
from pcr_core.request import Completion, Request

T = TypeVar("T")

Call = tuple[Callable[[], Any], "Future[Any]"]


class Door:
    """The one way in for foreign threads: requests, and calls to run over there.

    A condition rather than a queue, so that closing and refusing are decided under the
    same lock as putting: nothing can slip in behind a closed door and wait forever.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._changed = threading.Condition()
        self._requests: list[Request] = []
        self._calls: list[Call] = []
        self._unended: list[Completion] = []
        self._waiting = 0
        self._woken = False
        self._closed: BaseException | None = None

    def put(self, requests: Sequence[Request]) -> None:
        """Enqueue all, or none and raise ``QueueFullError`` or ``EngineClosedError``.

        More than ``capacity`` at once are taken when nothing is waiting.
        """
        with self._changed:
            self._refuse_if_closed()
            if self._waiting and self._waiting + len(requests) > self._capacity:
                raise QueueFullError(
                    f"{self._waiting} requests are waiting already (max_queue="
                    f"{self._capacity}); try again after some have finished"
                )
            self._waiting += len(requests)
            self._requests.extend(requests)
            self._unended = [one for one in self._unended if not one.done]
            self._unended.extend(request.completion for request in requests)
            self._changed.notify()

    def put_when_possible(
        self, requests: Sequence[Request], before: Sequence[Completion]
    ) -> None:
        """As ``put``, if need be after others of the same caller have ended.

        Args:
            requests: See ``put``.
            before: What the caller has put in already.

        Raises:
            QueueFullError: If the queue is full of other callers' requests.
        """
        while True:
            try:
                self.put(requests)
                return
            except QueueFullError:
                waiting = next((one for one in before if not one.done), None)
                if waiting is None:
                    raise
                waiting.result()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Have ``function`` run on the engine thread, between two steps."""
        future: Future[T] = Future()
        with self._changed:
            self._refuse_if_closed()
            self._calls.append((function, future))
            self._changed.notify()
        return future

    def wake(self) -> None:
        """Have the engine thread look around: there is something to poll."""
        with self._changed:
            self._woken = True
            self._changed.notify()

    def take(
        self, *, block: bool, timeout: float | None = None
    ) -> tuple[list[Request], list[Call], bool]:
        """Everything that came in, and whether the door has been closed.

        Args:
            block: Wait until something comes in or ``wake`` is called.
            timeout: For so many seconds at most.
        """
        with self._changed:
            if block:
                self._changed.wait_for(
                    lambda: (
                        self._requests or self._calls or self._closed or self._woken
                    ),
                    timeout,
                )
            self._woken = False
            requests, self._requests = self._requests, []
            calls, self._calls = self._calls, []
            return requests, calls, self._closed is not None

    def put_back(self, requests: Sequence[Request], calls: Sequence[Call]) -> None:
        """Lay down what was taken and could not be attended to."""
        with self._changed:
            self._requests[:0] = requests
            self._calls[:0] = calls

    def left(self, count: int) -> None:
        """So many requests have left the queue."""
        if count:
            with self._changed:
                self._waiting -= count

    def close(self, reason: BaseException) -> None:
        """Let nobody in any more; wakes the engine thread."""
        with self._changed:
            self._closed = self._closed or reason
            self._changed.notify_all()

    @property
    def idle(self) -> bool:
        """Whether every request that came in has ended."""
        with self._changed:
            self._unended = [one for one in self._unended if not one.done]
            return not self._unended

    @property
    def closed(self) -> bool:
        """Whether it is closed."""
        return self._closed is not None

    def _refuse_if_closed(self) -> None:
        if self._closed is not None:
            raise EngineClosedError(str(self._closed)) from self._closed


def leave(door: Door, pid: int) -> None:
    """Let the thread of a forgotten engine end, without waiting for it."""
    if os.getpid() == pid:
        door.close(EngineClosedError("the engine is closed; build a new one"))


def end(door: Door, thread: threading.Thread, pid: int) -> None:
    """Close the engine and wait until everything is stored and freed."""
    leave(door, pid)
    if os.getpid() == pid and threading.current_thread() is not thread:
        thread.join()
