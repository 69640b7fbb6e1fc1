"""What no policy can beat: a cache without a limit, and one that knows the future."""

from __future__ import annotations

from math import inf

from pcr_core.index.chunk import ChunkKey
from pcr_core.index.node import Node
from pcr_core.index.policies import Rank
from pcr_core.trace import Trace, TraceRequest


def usable_chunks(request: TraceRequest, chunk_tokens: int) -> int:
    """How many leading chunks may be read: the last token always runs."""
    return min(len(request.chunks), (request.prompt_tokens - 1) // chunk_tokens)


def infinite_reuse(trace: Trace) -> float:
    """Share of the prompt tokens that a cache without a limit would serve, 0 to 1."""
    seen: set[ChunkKey] = set()
    hits = 0
    for request in trace.requests:
        usable = usable_chunks(request, trace.chunk_tokens)
        hits += sum(key in seen for key in request.chunks[:usable])
        seen.update(request.chunks)
    tokens = sum(request.prompt_tokens for request in trace.requests)
    return hits * trace.chunk_tokens / tokens


class FarthestUse:
    """Evicts the chunk whose next use is farthest in the future (Belady's MIN).

    Among policies that keep every new chunk it has the most hits. A chunk is used
    whenever its children are, so this order is leaf-first, and evicting leaves only
    costs it nothing.

    Args:
        trace: What will be requested; each request must be committed once, in order.
    """

    epoch = 0

    def __init__(self, trace: Trace) -> None:
        self._ahead: dict[ChunkKey, list[int]] = {}
        for index in reversed(range(len(trace.requests))):
            for key in trace.requests[index].chunks:
                self._ahead.setdefault(key, []).append(index)

    def rank(self, node: Node) -> Rank:
        """Return how near the next use is."""
        ahead = self._ahead[node.key]
        return (-ahead[-1] if ahead else -inf, node.last_used)

    def used(self, node: Node) -> None:
        """One use has passed."""
        self._ahead[node.key].pop()

    def evicted(self, node: Node) -> None:
        """Nothing to note."""
