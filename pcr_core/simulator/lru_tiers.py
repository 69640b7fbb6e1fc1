"""Where each request of a trace finds its chunks: DRAM, SSD or nowhere.

Both tiers are least recently used first, a request's leaves before their parents, and
SSD has a copy of all that is computed (``write_policy="write_through"``). Such a tier
holds the most recently used chunks, whatever its size: a larger one holds all that a
smaller one does (Mattson's inclusion, IBM Systems Journal 1970), so that more memory
never finds less. ``replay`` says the same of DRAM with the policy ``lru``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from itertools import takewhile
from math import inf
from typing import NamedTuple

from pcr_core.simulator.optimum import usable_chunks
from pcr_core.trace import Trace, TraceRequest


class Found(NamedTuple):
    """Leading chunks of a prompt by the tier that has them.

    Attributes:
        dram: The first ones.
        ssd: Those behind them.
    """

    dram: int
    ssd: int


def find_all(trace: Trace, dram_chunks: float, ssd_chunks: float) -> list[Found]:
    """Play a trace from empty tiers; what each request finds.

    What a prompt and its answer fill beyond the named chunks is unique to the request;
    the engine keeps it, too, so it takes room here.

    Args:
        trace: The requests.
        dram_chunks: Chunks that DRAM holds; ``inf`` for all.
        ssd_chunks: Chunks that SSD holds.
    """
    dram, ssd = _Recent(dram_chunks), _Recent(ssd_chunks)
    found = []
    for index, request in enumerate(trace.requests):
        path = request.chunks[: usable_chunks(request, trace.chunk_tokens)]
        in_dram = dram.leading(path)
        found.append(Found(in_dram, max(0, ssd.leading(path) - in_dram)))
        stored = (*request.chunks, *_unique(trace, request, index))
        dram.use(stored)
        ssd.use(stored)
    return found


def _unique(trace: Trace, request: TraceRequest, index: int) -> Iterator[Hashable]:
    """Chunks of query and answer; the last token generated has no KV."""
    tokens = request.prompt_tokens + max(0, request.output_tokens - 1)
    for place in range(len(request.chunks), tokens // trace.chunk_tokens):
        yield (index, place)


class _Recent:
    """The most recently used chunks."""

    def __init__(self, capacity: float) -> None:
        self._capacity = capacity
        self._chunks: OrderedDict[Hashable, None] = OrderedDict()

    def leading(self, path: Sequence[Hashable]) -> int:
        """How many chunks of a path are here; a parent is never older than a child."""
        return sum(1 for _ in takewhile(self._chunks.__contains__, path))

    def use(self, path: Sequence[Hashable]) -> None:
        """Keep a path, its root as the most recent; the least recent chunks go."""
        for key in reversed(path):
            self._chunks[key] = None
            self._chunks.move_to_end(key)
        while len(self._chunks) > self._capacity:
            self._chunks.popitem(last=False)


UNLIMITED = inf
"""Capacity of a tier that keeps everything."""
