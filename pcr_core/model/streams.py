"""Copy streams: KV moves between DRAM and the device while the model computes.

Three queues run beside each other: compute, load (DRAM to device) and offload (device
to DRAM). A forward queues its copies layer by layer and says what must wait for what;
it never looks at a clock. Each direction is a ``Lane``: one that copies at once, on
the compute queue (no overlap), or one that copies beside it. So the overlap modes are
nothing but a choice of two lanes (PCR, arXiv 2603.23049, section on layer-wise overlap,
and its ablation none/up/down/both).

Races between these queues are the commonest cause of wrong output in systems like this
one. Every wait is therefore explicit, and each has a test that fails without it
(``simulated_streams`` delays copies as far as the waits allow, and poisons meanwhile).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch

Overlap = Literal["none", "up", "down", "both"]
OVERLAPS: tuple[Overlap, ...] = ("none", "up", "down", "both")


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy of some chunks' keys or values of one layer.

    Attributes:
        target, source: ``[chunks, kv_heads, tokens, dim]``, of one dtype. On the DRAM
            side each chunk of it is contiguous.
    """

    target: torch.Tensor
    source: torch.Tensor


class Span(NamedTuple):
    """When a layer's copies ran, in seconds of ``time.perf_counter``."""

    layer: int
    start: float
    stop: float


class Lane(Protocol):
    """Copies in one direction, in the order they were queued. Engine thread only.

    Attributes:
        ahead: How many layers it is worth queueing before they are needed.
    """

    ahead: int

    def fence(self) -> None:
        """Copies queued from now on come after what compute has queued until now."""

    def copy(self, layer: int, copies: Sequence[Copy]) -> None:
        """Queue the copies of a layer. Their memory is lent until ``drain``."""

    def wait(self, layer: int) -> None:
        """What compute queues from now on comes after the copies of ``layer``."""

    def drain(self) -> list[Span]:
        """Block until every copy is done; returns when each ran."""


class Stopwatch(Protocol):
    """Tells when the compute queue came by. Engine thread only."""

    def begin(self) -> Any:
        """A forward begins: this place in the compute queue."""

    def mark(self) -> Any:
        """This place in the compute queue."""

    def seconds(self, mark: Any) -> float:
        """When compute came by there, in seconds of ``time.perf_counter``.

        On a GPU it blocks until compute has come by.
        """


class HostStopwatch:
    """Where compute runs on the caller's thread: a mark is the time itself."""

    def begin(self) -> float:
        """Now."""
        return time.perf_counter()

    def mark(self) -> float:
        """Now."""
        return time.perf_counter()

    def seconds(self, mark: float) -> float:
        """The mark."""
        return mark


@dataclass(frozen=True, slots=True)
class Streams:
    """The queues of one engine.

    Attributes:
        mode: Which directions run beside compute: ``"up"`` is load, ``"down"`` offload.
        load, offload: The two lanes.
        stopwatch: Times compute.
    """

    mode: Overlap
    load: Lane
    offload: Lane
    stopwatch: Stopwatch


class InlineLane:
    """Copies at once, on the compute queue of a CPU: no overlap, no extra copy.

    The DRAM slots themselves are read and written; a layer is copied just before it is
    used, so that attention finds it in the processor's cache.
    """

    ahead = 0

    def __init__(self) -> None:
        self._spans: list[Span] = []

    def fence(self) -> None:
        """Nothing: compute on a CPU is done when its call returns."""

    def copy(self, layer: int, copies: Sequence[Copy]) -> None:
        """Copy now."""
        start = time.perf_counter()
        for one in copies:
            one.target.copy_(one.source)
        self._spans.append(Span(layer, start, time.perf_counter()))

    def wait(self, layer: int) -> None:
        """Nothing: it is done."""

    def drain(self) -> list[Span]:
        """Return when the copies ran."""
        spans, self._spans = self._spans, []
        return spans


class WorkerLane:
    """Copies on a thread of its own, beside compute on a CPU.

    With plain memory copies, which release the interpreter, and not with torch's: they
    would start a second team of OpenMP threads, and two teams slow each other down.

    Args:
        name: Of the thread.
    """

    ahead = 1 << 30

    def __init__(self, name: str) -> None:
        self._changed = threading.Condition()
        self._queued: deque[tuple[int, Sequence[Copy]]] = deque()
        self._undone: dict[int, int] = {}  # layer -> its copies not done
        self._spans: list[Span] = []
        self._error: BaseException | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def fence(self) -> None:
        """Nothing: compute on a CPU is done when its call returns."""

    def copy(self, layer: int, copies: Sequence[Copy]) -> None:
        """Queue the copies for the thread."""
        with self._changed:
            self._queued.append((layer, copies))
            self._undone[layer] = self._undone.get(layer, 0) + 1
            self._changed.notify_all()

    def wait(self, layer: int) -> None:
        """Block until the layer's copies are done.

        Raises:
            RuntimeError: If one of them failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: layer not in self._undone)
            self._raise()

    def drain(self) -> list[Span]:
        """Block until everything is done.

        Raises:
            RuntimeError: If a copy failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._undone)
            spans, self._spans = self._spans, []
            self._raise()
            return spans

    def close(self) -> None:
        """Finish what is queued and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise RuntimeError(f"a copy of KV failed: {error}") from error

    def _run(self) -> None:
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Do the next copies; ``False`` at the end.

        A function of its own, so that an idle thread holds nobody's memory.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._queued or self._closing)
            if not self._queued:
                return False
            layer, copies = self._queued.popleft()
        start, error = time.perf_counter(), _copied(copies)
        with self._changed:
            self._spans.append(Span(layer, start, time.perf_counter()))
            self._error = self._error or error
            self._undone[layer] -= 1
            if not self._undone[layer]:
                del self._undone[layer]
            self._changed.notify_all()
        return True


def _copied(copies: Sequence[Copy]) -> BaseException | None:
    """Copy; returns what went wrong, for whoever waits."""
    try:
        for one in copies:
            np.copyto(_array(one.target), _array(one.source))
    except Exception as error:
        return error.with_traceback(None)  # its frames hold the memory
    return None


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _array(tensor: torch.Tensor) -> Any:
    """The same memory as a numpy array; numpy has no bfloat16, so as words."""
    return tensor.view(_WORDS[tensor.element_size()]).numpy()


@contextmanager
def streams_opened(device: torch.device, mode: Overlap) -> Iterator[Streams]:
    """Make the queues of a device; their threads end with the block.

    Args:
        device: Where the model is.
        mode: What is to run beside compute.
    """
    if device.type == "cuda":
        from pcr_core.model.cuda_streams import cuda_streams

        yield cuda_streams(device, mode)
        return
    with ExitStack() as threads:

        def lane(direction: Overlap) -> Lane:
            if mode not in (direction, "both"):
                return InlineLane()
            worker = WorkerLane(f"pcr-copy-{direction}")
            threads.callback(worker.close)
            return worker

        yield Streams(mode, lane("up"), lane("down"), HostStopwatch())


def inline_streams(device: torch.device) -> Streams:
    """The queues without overlap, for which no thread is needed."""
    if device.type == "cuda":
        from pcr_core.model.cuda_streams import cuda_streams

        return cuda_streams(device, "none")
    return Streams("none", InlineLane(), InlineLane(), HostStopwatch())
