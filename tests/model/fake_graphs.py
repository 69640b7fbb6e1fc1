"""CUDA graphs on a CPU, and without mercy.

What runs while one is recorded is kept as operations on the very tensors it had, and a
replay is those operations again, on those tensors: no line of the model's code runs. A
number that the host looked at, a tensor that was made from one, or memory that has
moved since then makes a wrong answer, as on a GPU. What a GPU refuses is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITS_FOR_THE_DEVICE = (
    "aten._local_scalar_dense",
    "aten.item",
    "aten.is_nonzero",
    "aten.nonzero",
    "aten.equal",
    "aten.masked_select",
    "aten.unique",
)
COMES_FROM_THE_HOST = ("aten.lift_fresh",)


def _tensors(found: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor)]


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


class Recording(TorchDispatchMode):
    """Runs and keeps operations.

    Attributes:
        names: Of the operations, in order, with the shapes they were given.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self._done: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = str(func)
        for refused in (*WAITS_FOR_THE_DEVICE, *COMES_FROM_THE_HOST):
            if name.startswith(f"{refused}."):
                raise RuntimeError(f"{name}: operation not permitted while capturing")
        given = kwargs or {}
        result = func(*args, **given)
        shapes = [tuple(tensor.shape) for tensor in _tensors((args, given))]
        self.names.append(f"{name} {shapes}")
        self._done.append((func, args, given, _tensors(result)))
        return result

    def replay(self) -> None:
        """The same operations on the same memory."""
        with torch.inference_mode():
            for func, args, kwargs, results in self._done:
                again = _tensors(func(*args, **kwargs))
                for to, source in zip(results, again, strict=True):
                    if not _same_memory(to, source):
                        to.copy_(source)


class FakeGraph:
    """Stands in for ``torch.cuda.CUDAGraph``."""

    def __init__(self, cuda: FakeCudaGraphs) -> None:
        self.recording: Recording | None = Recording()
        self._cuda = cuda

    def replay(self) -> None:
        assert self.recording is not None, "it was reset"
        assert self._cuda.stream == "compute", "replayed where nothing waits for it"
        self._cuda.replayed += 1
        self.recording.replay()

    def reset(self) -> None:
        self.recording = None


class _Stream:
    """Says what waits for what."""

    def __init__(self, cuda: FakeCudaGraphs, name: str) -> None:
        self._cuda, self.name = cuda, name

    def wait_stream(self, other: _Stream) -> None:
        self._cuda.story.append(f"{self.name} waits for {other.name}")


class FakeCudaGraphs:
    """``torch.cuda`` as far as ``CudaGraphs`` uses it.

    Attributes:
        graphs: All that were recorded.
        pools: The pool of each.
        story: Which stream waited for which, and when something was recorded.
        replayed: How often any was.
        stream: The current one.
    """

    def __init__(self) -> None:
        self.graphs: list[FakeGraph] = []
        self.pools: list[Any] = []
        self.story: list[str] = []
        self.replayed = 0
        self.stream = "compute"

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Stand in for ``torch.cuda``; classes by classes, as annotations name them."""
        cuda = self

        class Graph(FakeGraph):
            def __init__(self) -> None:
                super().__init__(cuda)

        class Stream(_Stream):
            def __init__(self, device: torch.device) -> None:
                super().__init__(cuda, "beside")

        stand_ins: dict[str, Callable[..., Any]] = {
            "CUDAGraph": Graph,
            "graph": self._recorded,
            "graph_pool_handle": object,
            "Stream": Stream,
            "device": nullcontext,
            "current_stream": lambda device: _Stream(self, self.stream),
            "stream": self._on,
        }
        for name, stand_in in stand_ins.items():
            patch.setattr(torch.cuda, name, stand_in)

    @property
    def recorded(self) -> list[Recording]:
        """What could be replayed now."""
        return [one.recording for one in self.graphs if one.recording is not None]

    @contextmanager
    def _on(self, stream: _Stream) -> Iterator[None]:
        before, self.stream = self.stream, stream.name
        self.story.append(f"on {stream.name}")
        try:
            yield
        finally:
            self.stream = before

    @contextmanager
    def _recorded(
        self, graph: FakeGraph, *, pool: Any, stream: _Stream, capture_error_mode: str
    ) -> Iterator[None]:
        assert capture_error_mode == "thread_local", "others may use the device"
        assert self.stream == "compute"
        assert graph.recording is not None
        self.story.append(f"record on {stream.name}")
        with graph.recording:
            yield
        self.graphs.append(graph)
        self.pools.append(pool)
