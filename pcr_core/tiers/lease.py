"""A lease: one request's transaction on DRAM, and the only way to pin a chunk."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Protocol

from pcr_core.index.chunk import ChunkKey
from pcr_core.index.node import Node
from pcr_core.tiers.convoy import Arrival
from pcr_core.tiers.heads import Head
from pcr_core.tiers.host_pool import Slot
from pcr_core.tiers.jobs import ReadSpan
from pcr_core.tiers.read_in import Reading
from pcr_core.tiers.store.chunk_file import ChunkId


@dataclass(frozen=True, slots=True)
class PathChunk:
    """One full chunk of the prompt: what it is and where it is."""

    id: ChunkId
    node: Node


class Lender(Protocol):
    """What a lease asks of whoever reads for it; ``Loading`` is one."""

    def settle(self, lease: Lease, index: int) -> None:
        """Decide what becomes of a chunk whose read is under way."""

    def is_late(self, lease: Lease, index: int) -> bool:
        """Whether what a chunk waits for is still to be waited for."""

    def complete(self, lease: Lease, index: int) -> None:
        """Wait until an arriving chunk is there, or lost."""

    def lose(self, lease: Lease, index: int) -> None:
        """Take a chunk that will not come from the sources."""


class Lease:
    """Slots to read and slots to fill for one prompt. Engine thread only.

    Use it as a context manager, call ``settle(i)`` when chunk ``i`` of ``pending`` is
    needed, wait for each layer of those ``arriving`` before it is read, and call
    ``filled(i)`` for each sink that was filled. However the block is left, filled sinks
    are published, the others are freed, and the whole path counts as used once.

    Args:
        lender: Reads for it.
        release: Ends it: publishes, unpins, writes back.
        path: Every full chunk of the prompt, root first.
        keys: Their keys.
        prompt_tokens: Length of the prompt.
        covered: Leading chunks that the device holds whole.

    Attributes:
        path: Every full chunk of the prompt, root first.
        keys: Their keys.
        prompt_tokens: Length of the prompt.
        readings: Reads under way that this lease waits for, by chunk index.
        covered: Leading chunks that the device holds whole: they are not lent for
            reading, and lent for filling if DRAM has lost them.
        heads: Leading tokens of chunks that are not lent, in those that begin alike, by
            index; a last partial chunk may have one. Valid until exit.
        reads: When its chunks were read from SSD, as far as the reads have ended.
        done: Indices of the sinks that are filled.
        reused: Prompt tokens that were not computed, by tier. Whoever computes says so;
            ``None`` stands for all that was lent.
        counted: Whether it counts as a request in the statistics.
        patience: Seconds for which it would still wait for its reads.
        late_since: Since when ``is_late`` has been true, on the lender's clock.
        checkpoint: Called now and then during ``settle``; may raise to end it.
    """

    def __init__(
        self,
        lender: Lender,
        release: Callable[[Lease], None],
        path: Sequence[PathChunk],
        keys: Sequence[ChunkKey],
        prompt_tokens: int,
        covered: int = 0,
    ) -> None:
        self._lender = lender
        self._release = release
        self._sources: dict[int, Slot] = {}
        self._sinks: dict[int, Slot] = {}
        self._arriving: dict[int, Arrival] = {}
        self._tiers: dict[int, str] = {}
        self._open = True
        self.path = path
        self.keys = keys
        self.prompt_tokens = prompt_tokens
        self.covered = covered
        self.readings: dict[int, Reading] = {}
        self.heads: Mapping[int, Head] = {}
        self.reads: list[ReadSpan] = []
        self.done: set[int] = set()
        self.reused: Mapping[str, int] | None = None
        self.counted = True
        self.patience = math.inf
        self.late_since: float | None = None
        self.checkpoint: Callable[[], None] = lambda: None

    @property
    def sources(self) -> Mapping[int, Slot]:
        """Chunk index -> slot to read, valid until exit. Grows as reads end.

        A chunk leaves it only by ``lost``, or while it is ``arriving``.
        """
        return MappingProxyType(self._sources)

    @property
    def arriving(self) -> Mapping[int, Arrival]:
        """Those of ``sources`` whose bytes are not all there yet; a live view."""
        return MappingProxyType(self._arriving)

    @property
    def sinks(self) -> Mapping[int, Slot]:
        """Chunk index -> slot to fill. Grows as reads fail or are given up.

        A chunk in neither map, and not pending, is computed and not kept.
        """
        return MappingProxyType(self._sinks)

    @property
    def pending(self) -> Collection[int]:
        """Indices of the chunks whose reads are under way; a live view."""
        return self.readings.keys()

    @property
    def tiers(self) -> Mapping[int, str]:
        """Chunk index -> ``"dram"`` or ``"ssd"``, for each of ``sources``."""
        return MappingProxyType(self._tiers)

    @property
    def pinned(self) -> list[Node]:
        """The chunks that it keeps from being evicted."""
        others = [head.node for head in self.heads.values()]
        return [*(chunk.node for chunk in self.path), *others]

    def settle(self, index: int) -> None:
        """Have it decided what becomes of a pending chunk; may block.

        Afterwards the chunk is a source, or a sink (it is to be computed), or neither
        (computed and not kept). Others may have changed as well.
        """
        if index in self.readings:
            self._lender.settle(self, index)

    def is_late(self, index: int) -> bool:
        """Whether computing from chunk ``index`` on would wait for reads. Never blocks.

        Asked again and again instead of waiting, it is as if the lease waited: once its
        patience is at an end, or computing has become cheaper, the answer is no.
        """
        return self._lender.is_late(self, index)

    def wait(self) -> None:
        """Settle everything that is pending, and have all sources complete."""
        while self.readings:
            self.settle(min(self.readings))
        while self._arriving:
            self.complete(min(self._arriving))

    def complete(self, index: int) -> None:
        """Have a chunk that is arriving complete, or lost; may block."""
        if index in self._arriving:
            self._lender.complete(self, index)

    def lost(self, index: int) -> None:
        """Give up a chunk for which waiting has raised ``ChunkLostError``.

        Afterwards it is a sink, or neither that nor a source: its read does not end and
        keeps the slot. If it is the disk that hangs or is too slow, the same becomes of
        all others that are not complete.
        """
        if index in self._sources:
            self._lender.lose(self, index)

    def filled(self, index: int) -> None:
        """Say that every byte of sink ``index`` is written.

        Raises:
            KeyError: If there is no such sink.
        """
        if index not in self._sinks:
            raise KeyError(f"chunk {index} has no sink in this lease")
        self.done.add(index)

    def discard(self) -> None:
        """Forget what was filled: the bytes turned out to be worthless."""
        self.done.clear()

    # --- what the tier manager tells ---

    def arrived(self, index: int, slot: Slot) -> None:
        """A read has ended well."""
        if self._arriving.pop(index, None) is None:
            del self.readings[index]
            self.add_source(index, slot, "ssd")

    def failed(self, index: int, slot: Slot) -> None:
        """A read has failed or was taken back: the chunk is to be computed."""
        if index in self._arriving:
            self.withdraw(index)
        else:
            del self.readings[index]
        self.add_sink(index, slot)

    def add_arrival(self, index: int, slot: Slot, arrival: Arrival) -> None:
        """Lend a chunk that is being read layer by layer."""
        self.add_source(index, slot, "ssd")
        self._arriving[index] = arrival

    def withdraw(self, index: int) -> None:
        """Lend a chunk no more."""
        self._arriving.pop(index, None)
        del self._sources[index], self._tiers[index]

    def add_source(self, index: int, slot: Slot, tier: str) -> None:
        """Lend a complete chunk."""
        self._sources[index] = slot
        self._tiers[index] = tier

    def add_sink(self, index: int, slot: Slot) -> None:
        """Lend a slot to fill."""
        self._sinks[index] = slot

    def close(self) -> None:
        """End the lease; a second call does nothing."""
        if self._open:
            self._open = False
            self._release(self)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
