"""Steps that are recorded once and replayed: what a GPU needs no host for.

At a decode step's few tokens a GPU waits for the host, which starts hundreds of small
kernels one by one. A recorded step is started as one. It repeats the same operations on
the same addresses, so whatever changes from step to step must be the contents of
tensors that stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol

import torch

_WARM_UPS = 2
"""Before a recording: libraries allocate what they need on their first calls."""


class Graphs(Protocol):
    """Runs steps, recorded where the device can. Engine thread only."""

    def run(self, name: Hashable, step: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Run a step, or replay what it did when it was first run under its name.

        Args:
            name: Under one name all steps do the same operations on the same memory.
            step: May be called several times, or not at all.

        Returns:
            What ``step`` returned, with this run's contents; the next run, of whatever
            name, may overwrite them.

        Raises:
            Exception: What ``step`` raises, or what keeps it from being recorded.
        """
        ...

    def drop(self) -> None:
        """Forget all recordings; to be called before any of their memory moves."""
        ...


class NoGraphs:
    """Runs every step as it is."""

    def run(self, name: Hashable, step: Callable[[], torch.Tensor]) -> torch.Tensor:
        """See ``Graphs``."""
        return step()

    def drop(self) -> None:
        """There are none."""


class _Recorded(NamedTuple):
    graph: Any
    result: torch.Tensor


class CudaGraphs:
    """CUDA graphs of one device, with a memory pool of their own.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._recorded: dict[Hashable, _Recorded] = {}
        self._pool: Any = None

    def run(self, name: Hashable, step: Callable[[], torch.Tensor]) -> torch.Tensor:
        """See ``Graphs``."""
        found = self._recorded.get(name)
        if found is None:
            with torch.cuda.device(self._device):
                found = self._recorded[name] = self._record(step)
        found.graph.replay()
        return found.result

    def _record(self, step: Callable[[], torch.Tensor]) -> _Recorded:
        """On a stream beside all other work, where nothing else can get into it."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        beside = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._warm_up(step, beside)
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on using the device, to page-lock memory for one.
        with torch.cuda.graph(
            graph,
            pool=self._pool,
            stream=beside,
            capture_error_mode="thread_local",
        ):
            result = step()
        return _Recorded(graph, result)

    def _warm_up(self, step: Callable[[], torch.Tensor], beside: Any) -> None:
        compute = torch.cuda.current_stream(self._device)
        beside.wait_stream(compute)
        with torch.cuda.stream(beside):
            for _ in range(_WARM_UPS):
                step()
        compute.wait_stream(beside)

    def drop(self) -> None:
        """See ``Graphs``."""
        for found in self._recorded.values():
            found.graph.reset()
        self._recorded = {}
        self._pool = None  # an abandoned pool is not taken up again


def graphs_for(device: torch.device) -> Graphs | None:
    """What records steps on a device; ``None`` where nothing does."""
    return CudaGraphs(device) if device.type == "cuda" else None
