"""What a prefill is told about its chunks, and whom it tells. Engine thread only."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from pcr_core.model.prefill_plan import Segment
from pcr_core.model.transfers import Arrival, ChunkTensors, Run, in_runs


def _nothing_pending(index: int) -> None:
    raise ValueError(f"chunk {index} is pending, but nobody said how to settle it")


def _nothing_arriving(index: int) -> None:
    raise ValueError(f"chunk {index} is lost, but nobody said what to do about it")


@dataclass(frozen=True, slots=True)
class Head:
    """A stored chunk that begins like one of the prompt, and goes on differently.

    Attributes:
        chunk: The stored chunk.
        tokens: How many leading tokens are the same.
    """

    chunk: ChunkTensors
    tokens: int


@dataclass(frozen=True, slots=True)
class ChunkIO:
    """The chunks of one prefill, by index within the prompt.

    The callbacks may change the collections, all of which are looked at again before
    each forward: a pending chunk may become a source, a sink, or neither, and it may do
    so at any time; a source stays one until it is lost. A chunk that is in none of them
    is computed and not kept.

    Attributes:
        sources: Chunks to read: complete, or arriving.
        sinks: Chunks to fill where they are computed whole.
        filled: Called with the index of each sink once its bytes are complete.
        between: Called before each forward; may raise to stop the prefill.
        pending: Chunks whose reads are under way; nothing past one is computed.
        settle: Called with the index of a pending chunk when all before it is in
            place; when it returns, the chunk is pending no more. May raise to stop
            the prefill.
        arriving: Those sources whose layers are still being read.
        lost: Called with the index of a source that turned out to be lost during a
            forward; when it returns, the chunk is a source no more. The forward is
            repeated without it.
        heads: Chunks that are not stored, but whose first tokens are, as the first
            tokens of another; for prefills that may be cut anywhere.
    """

    sources: Mapping[int, ChunkTensors]
    sinks: Mapping[int, ChunkTensors]
    filled: Callable[[int], None]
    between: Callable[[], None]
    pending: Collection[int] = ()
    settle: Callable[[int], None] = _nothing_pending
    arriving: Mapping[int, Arrival] = field(default_factory=dict)
    lost: Callable[[int], None] = _nothing_arriving
    heads: Mapping[int, Head] = field(default_factory=dict)

    def loads(self, segment: Segment, chunk_tokens: int) -> list[Run]:
        """What a forward copies in."""
        runs = in_runs(self.sources, segment.loads, chunk_tokens, self.arriving)
        front = segment.start // chunk_tokens
        head = self.heads.get(front)
        if head is not None and front not in segment.loads:
            count = min(head.tokens, segment.start - front * chunk_tokens)
            if count:
                runs.append(Run(front * chunk_tokens, 1, head.chunk, count))
        return runs

    def stores(self, stop: int, filled: Collection[int]) -> list[int]:
        """Sinks before chunk ``stop`` that are not filled yet: all there is of them.

        Among them may be chunks that a row was opened with and that DRAM has lost.
        """
        return [i for i in sorted(self.sinks) if i < stop and i not in filled]
