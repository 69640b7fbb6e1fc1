"""One request: what the caller asks for, and holds while waiting."""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pcr_core.documents import DocumentSpan
from pcr_core.errors import CancelledError, DeadlineExceededError
from pcr_core.index.chunk import ChunkKey
from pcr_core.result import Result
from pcr_core.sampling_params import SamplingParams

_log = logging.getLogger("pcr_core.engine")
_LISTENER_FAILED = "a listener of a completion failed"

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]


class _State(enum.Enum):
    RUNNING = enum.auto()
    FINISHED = enum.auto()
    FAILED = enum.auto()


class Completion:
    """A request under way, seen by the caller. Any thread.

    The engine thread feeds it. ``take()`` hands each piece of text out once; a
    ``stream()`` has all of them, and there may be several.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._pieces: list[str] = []
        self._taken = 0
        self._state = _State.RUNNING
        self._result: Result | None = None
        self._error: BaseException | None = None
        self._cancelled = False
        self._listeners: list[Callable[[], None]] = []

    # --- the caller's side ---

    @property
    def done(self) -> bool:
        """True once there is a result or an error."""
        return self._state is not _State.RUNNING

    @property
    def cancelled(self) -> bool:
        """True once ``cancel()`` was called."""
        return self._cancelled

    def cancel(self) -> None:
        """Ask the engine to stop within one step. Twice, or late, is harmless."""
        self._cancelled = True

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the end and return the result.

        A ``KeyboardInterrupt`` while waiting cancels the request, so that an
        interrupted notebook cell leaves nothing running.

        Raises:
            TimeoutError: After ``timeout`` seconds; the request goes on.
            CancelledError: If it was cancelled.
            PcrError: Whatever the engine failed with.
        """
        try:
            with self._changed:
                if not self._changed.wait_for(lambda: self.done, timeout):
                    raise TimeoutError(
                        f"no result after {timeout} s; the request goes on"
                    )
        except KeyboardInterrupt:
            self.cancel()
            raise
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def stream(self) -> CompletionStream:
        """Return an iterator over the text, as it is generated.

        Each one begins with the first piece. Closing it early, or letting go of it,
        cancels the request.
        """
        return CompletionStream(self)

    def take(self) -> list[str]:
        """Return the text generated since the last call, without waiting."""
        with self._changed:
            new = self._pieces[self._taken :]
            self._taken += len(new)
        return new

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Have ``listener`` called after every change, on the engine thread.

        It must return at once; what it raises is logged. An event loop passes
        ``lambda: loop.call_soon_threadsafe(event.set)``. If the request is already
        over, it is called now, on the caller's thread.
        """
        with self._changed:
            self._listeners.append(listener)
            over = self.done
        if over:
            try:
                listener()
            except Exception:
                _log.exception(_LISTENER_FAILED)

    def wait_for_piece(self, index: int) -> str | None:
        """Wait for one piece of the text; ``None`` if the text ends before it.

        Raises:
            PcrError: Whatever the engine failed with, behind the last piece.
        """
        with self._changed:
            self._changed.wait_for(lambda: len(self._pieces) > index or self.done)
            if len(self._pieces) > index:
                return self._pieces[index]
        if self._error is not None:
            raise self._error
        return None

    # --- the engine's side ---

    def emit(self, text: str) -> None:
        """Append generated text (engine thread)."""
        if text:
            self._change(lambda: self._pieces.append(text))

    def finish(self, result: Result) -> None:
        """End with a result (engine thread)."""

        def apply() -> None:
            self._result, self._state = result, _State.FINISHED

        self._change(apply)

    def fail(self, error: BaseException) -> None:
        """End with an error (engine thread, or the thread that closes the engine)."""

        def apply() -> None:
            self._error, self._state = error, _State.FAILED

        self._change(apply)

    def _change(self, apply: Callable[[], None]) -> None:
        with self._changed:
            if self.done:
                return
            apply()
            self._changed.notify_all()
            listeners = tuple(self._listeners)
        for listener in listeners:
            _call(listener)


class CompletionStream(Iterator[str]):
    """The text of a completion, piece by piece. One thread at a time.

    Not a generator: closing one that has not begun would do nothing.
    """

    def __init__(self, completion: Completion) -> None:
        self._completion = completion
        self._index = 0
        self._open = True

    def __next__(self) -> str:
        if not self._open:
            raise StopIteration
        try:
            piece = self._completion.wait_for_piece(self._index)
        except BaseException:
            self.close()
            raise
        if piece is None:
            self._open = False
            raise StopIteration
        self._index += 1
        return piece

    def close(self) -> None:
        """End; cancels the request unless it is over."""
        if self._open:
            self._open = False
            if not self._completion.done:
                self._completion.cancel()

    def __del__(self) -> None:
        self.close()


def _call(listener: Callable[[], None]) -> None:
    """Other requests must not suffer from a listener, such as one of a closed loop.

    Whatever it raises: the engine thread would end of a ``SystemExit``.
    """
    try:
        listener()
    except BaseException:
        _log.exception(_LISTENER_FAILED)


@dataclass(slots=True, eq=False)
class Request:
    """The engine's side of a completion.

    Attributes:
        tokens: Prompt token ids.
        keys: Chunk keys of every full chunk of the prompt, root first.
        params: Sampling parameters.
        constraint: The compiled form of ``params.constraint``, or ``None``.
        completion: Where text, result and errors go.
        spans: Where documents stand in the prompt.
        usable: How many leading chunks may be read rather than computed.
        remembered: Whether its prompt may be kept for ``explain``.
        epoch: ``TierManager.epoch`` when it was submitted: what is forgotten later, it
            must not bring back.
        submitted: ``time.perf_counter()`` at submit.
        priority: The higher, the sooner it runs.
        deadline: When its answer is worth nothing any more, in seconds of
            ``time.perf_counter``; ``None`` for never.
        group: Requests of one group have the same prompt and share its prefill.
        owner: The engine, kept alive until the request is over.
    """

    tokens: list[int]
    keys: Sequence[ChunkKey]
    params: SamplingParams
    constraint: Any = None
    completion: Completion = field(default_factory=Completion)
    spans: Sequence[DocumentSpan] = ()
    usable: int = 0
    remembered: bool = True
    epoch: int = 0
    submitted: float = field(default_factory=time.perf_counter)
    priority: int = 0
    deadline: float | None = None
    group: object = None
    owner: object = None

    def raise_if_cancelled(self) -> None:
        """Raise ``CancelledError`` once the caller has cancelled."""
        if self.completion.cancelled:
            raise CancelledError("the request was cancelled")

    def is_late(self, now: float) -> bool:
        """Whether its deadline has passed at ``now``."""
        return self.deadline is not None and now >= self.deadline

    def raise_if_unwanted(self, now: float) -> None:
        """Raise if nobody waits for it any more.

        Raises:
            CancelledError: If the caller has cancelled.
            DeadlineExceededError: If its deadline has passed.
        """
        self.raise_if_cancelled()
        if self.is_late(now):
            raise DeadlineExceededError(
                "the deadline passed before the answer was complete; allow more time, "
                "raise the priority, or ask for fewer tokens"
            )
