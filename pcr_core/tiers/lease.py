"""A lease: one request's transaction on DRAM, and the only way to pin a chunk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Any, Protocol

from pcr_core.index.prefix_tree import Node
from pcr_core.tiers.chunk_file import ChunkId
from pcr_core.tiers.host_pool import Slot
from pcr_core.tiers.jobs import ReadJob


@dataclass(frozen=True, slots=True)
class PathChunk:
    """One full chunk of the prompt: what it is and where it is."""

    id: ChunkId
    node: Node


class LeaseOwner(Protocol):
    """What a lease asks of the tier manager."""

    def finish_reads(self, lease: Lease) -> None:
        """Wait for the lease's reads and hand their slots over."""

    def release(self, lease: Lease) -> None:
        """End the lease: publish, unpin, write back."""


class Lease:
    """Slots to read and slots to fill for one prompt. Engine thread only.

    Use it as a context manager, call ``wait()`` before reading, and ``filled(i)`` for
    each sink that was filled. However the block is left, filled sinks are published,
    the others are freed, and the whole path counts as used once.

    Attributes:
        path: Every full chunk of the prompt, root first.
        prompt_tokens: Length of the prompt.
        reads: Reads under way, by chunk index.
        done: Indices of the sinks that are filled.
    """

    def __init__(
        self, owner: LeaseOwner, path: Sequence[PathChunk], prompt_tokens: int
    ) -> None:
        self._owner = owner
        self._sources: dict[int, Slot] = {}
        self._sinks: dict[int, Slot] = {}
        self._tiers: dict[int, str] = {}
        self._open = True
        self.path = path
        self.prompt_tokens = prompt_tokens
        self.reads: dict[int, ReadJob] = {}
        self.done: set[int] = set()

    @property
    def sources(self) -> Mapping[int, Slot]:
        """Chunk index -> slot to read, valid until exit.

        Before ``wait()`` only what is in DRAM; afterwards also what was read from SSD
        and verified.
        """
        return MappingProxyType(self._sources)

    @property
    def sinks(self) -> Mapping[int, Slot]:
        """Chunk index -> slot to fill. A chunk in neither map is computed, not kept."""
        return MappingProxyType(self._sinks)

    @property
    def tiers(self) -> Mapping[int, str]:
        """Chunk index -> ``"dram"`` or ``"ssd"``, for each of ``sources``."""
        return MappingProxyType(self._tiers)

    def wait(self) -> None:
        """Block until this lease's SSD reads have ended.

        A chunk that could not be read becomes a hole: its slot moves to ``sinks``.
        """
        if not self.reads:
            return
        self._owner.finish_reads(self)
        # Reads end in any order; whoever walks the path wants it root first.
        for slots in (self._sources, self._sinks, self._tiers):
            _sort(slots)

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

    def add_source(self, index: int, slot: Slot, tier: str) -> None:
        """Lend a complete chunk (tier manager only)."""
        self._sources[index] = slot
        self._tiers[index] = tier

    def add_sink(self, index: int, slot: Slot) -> None:
        """Lend a slot to fill (tier manager only)."""
        self._sinks[index] = slot

    def close(self) -> None:
        """End the lease; a second call does nothing."""
        if self._open:
            self._open = False
            self._owner.release(self)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _sort(slots: dict[int, Any]) -> None:
    """Put a mapping in index order without replacing it: callers hold views of it."""
    ordered = sorted(slots.items())
    slots.clear()
    slots.update(ordered)
