"""The code with one of its waits removed, for tests that must notice.

The list is explained in ``test_overlap``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pcr_core.model.cuda_streams import CudaLane, CudaStopwatch
from pcr_core.model.layerwise_cache import LayerwiseCache
from pcr_core.model.runner import Runner
from pcr_core.model.streams import Copy, Lane, Streams
from pcr_core.model.transfers import Copied, Transfers

Change = Callable[[Streams], Streams]
Mutation = Callable[[pytest.MonkeyPatch], "Change | None"]
"""Changes the code, or returns what it does to an engine's streams."""


class Without:
    """A lane one of whose waits does nothing."""

    def __init__(self, lane: Lane, wait: str) -> None:
        self.ahead = lane.ahead
        self.copy = lane.copy
        self.fence, self.wait, self.drain = lane.fence, lane.wait, lane.drain
        nothing: Any = {"drain": lambda: [], "wait": lambda layer: None}
        setattr(self, wait, nothing.get(wait, lambda: None))


def without(lane: str, wait: str) -> Mutation:
    def change(streams: Streams) -> Streams:
        mutant: Any = {lane: Without(getattr(streams, lane), wait)}
        return dataclasses.replace(streams, **mutant)

    return lambda patch: change


def patched(owner: Any, name: str, mutant: Any) -> Mutation:
    def mutate(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(owner, name, mutant)

    return mutate


def filled_too_early(patch: pytest.MonkeyPatch) -> None:
    run = Runner._run_segment

    def mutant(self: Any, row: Any, tokens: Any, segment: Any, stores: Any, io: Any):
        end = row.cache.end

        def early(count: int) -> Copied:
            for index in stores if count else ():
                io.filled(index)
            return end(count)

        row.cache.end = early
        try:
            return run(self, row, tokens, segment, stores, io)
        finally:
            del row.cache.end

    patch.setattr(Runner, "_run_segment", mutant)


def broken_and_not_drained(patch: pytest.MonkeyPatch) -> None:
    end = LayerwiseCache.end

    def mutant(self: LayerwiseCache, tokens: int) -> Copied:
        return end(self, tokens) if tokens else Copied([], [], 0.0)

    patch.setattr(LayerwiseCache, "end", mutant)


def not_begun_and_not_drained(patch: pytest.MonkeyPatch) -> None:
    begin, end = LayerwiseCache.begin, LayerwiseCache.end

    def failing(self: Any, *arguments: Any) -> None:
        self.begun = False
        begin(self, *arguments)
        self.begun = True

    def mutant(self: Any, tokens: int) -> Copied:
        return end(self, tokens) if self.begun else Copied([], [], 0.0)

    patch.setattr(LayerwiseCache, "begin", failing)
    patch.setattr(LayerwiseCache, "end", mutant)


def event_before_the_copies(patch: pytest.MonkeyPatch) -> None:
    copy = CudaLane.copy

    def mutant(self: CudaLane, layer: int, copies: Sequence[Copy]) -> None:
        early = self._stopwatch.mark(self._stream)
        copy(self, layer, copies)
        self._done[layer] = early

    patch.setattr(CudaLane, "copy", mutant)


def event_behind_the_first_copy(patch: pytest.MonkeyPatch) -> None:
    copy = CudaLane.copy

    def mutant(self: CudaLane, layer: int, copies: Sequence[Copy]) -> None:
        copy(self, layer, copies[:1])
        early = self._done[layer]
        copy(self, layer, copies[1:])
        self._done[layer] = early

    patch.setattr(CudaLane, "copy", mutant)


ANYWHERE: dict[str, Mutation] = {
    "load.fence": without("load", "fence"),
    "load.wait": without("load", "wait"),
    "load.drain": without("load", "drain"),
    "offload.fence": without("offload", "fence"),
    "offload.drain": without("offload", "drain"),
    "drain, then filled": filled_too_early,
    "arrival.wait": patched(Transfers, "_await", lambda self, layer: None),
    "arrival.layers": patched(Transfers, "_has_arrived", lambda self, layer: True),
    "a broken forward is drained": broken_and_not_drained,
    "a forward that cannot begin is drained": not_begun_and_not_drained,
}
OF_CUDA_LANES: dict[str, Mutation] = {
    "wait_stream": patched(CudaLane, "fence", lambda self: None),
    "wait_event": patched(CudaLane, "wait", lambda self, layer: None),
    "synchronize": patched(CudaStopwatch, "seconds", lambda self, mark: 0.0),
    "event before the copies": event_before_the_copies,
    "event behind the first copy": event_behind_the_first_copy,
}


def mutated(name: str, patch: pytest.MonkeyPatch) -> Change:
    """Remove a wait; returns what else is to be done to an engine's streams."""
    change = {**ANYWHERE, **OF_CUDA_LANES}[name](patch)
    return change or (lambda streams: streams)
