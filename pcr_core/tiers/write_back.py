"""DRAM -> SSD: which chunks are written, and what came of it.

Best effort: a policy says when a chunk is worth writing, and whatever cannot be written
is dropped and counted. Only so many slots are lent to the writer at a time; the other
chunks wait in DRAM, where they can be evicted, so that a slow disk keeps nothing out.
Nothing here blocks. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from pcr_core.index.chunk import ChunkKey
from pcr_core.index.node import Disk, Event, Host, Node
from pcr_core.index.prefix_tree import PrefixTree
from pcr_core.stats import StoreCounters
from pcr_core.tiers.dram import DramTier
from pcr_core.tiers.jobs import (
    DeleteJob,
    Io,
    TouchJob,
    WriteJob,
    WriteOutcome,
    WriterJob,
)
from pcr_core.tiers.room import SsdRoom
from pcr_core.tiers.store.chunk_file import ChunkFormat, ChunkId
from pcr_core.tiers.trouble import TroubleLog
from pcr_core.tiers.write_policy import WritePolicy

_LEAVING = 16
"""Writes under way beyond which a chunk that leaves DRAM is dropped, not written."""
_TOUCH_BATCH = 512
"""Recency of this many chunks is kept back, at most, until a write carries it along."""


@dataclass(frozen=True, slots=True)
class Unsaved:
    """What it takes to write a chunk that is only in DRAM.

    Attributes:
        chunk: Its identity.
        ancestors: Keys of the prompt it was computed for, root first.
    """

    chunk: ChunkId
    ancestors: Sequence[ChunkKey]


class WriteBack:
    """Keeps the SSD tier up to date with the DRAM tier.

    Args:
        tree: States; this class moves the disk states of what is written.
        dram: Where the bytes are.
        room: Where there is room for them.
        io: Runs the jobs.
        fmt: What a chunk file looks like.
        policy: When a chunk is written.
        share: Slots that may be with the writer at a time.
        stats: Where outcomes are counted.
        trouble: Where failures are logged.

    Attributes:
        epoch: The store's epoch that DRAM is up to date with; goes with every write, so
            that one which was queued before a ``forget`` is not carried out after it.
    """

    def __init__(
        self,
        tree: PrefixTree,
        dram: DramTier,
        room: SsdRoom,
        io: Io,
        fmt: ChunkFormat,
        policy: WritePolicy,
        *,
        share: int,
        stats: StoreCounters,
        trouble: TroubleLog,
    ) -> None:
        self._tree = tree
        self._dram = dram
        self._room = room
        self._io = io
        self._format = fmt
        self._policy = policy
        self._share = share
        self._leaving = min(_LEAVING, share)
        self._stats = stats
        self._trouble = trouble
        self.epoch = 0
        self._unsaved: dict[Node, Unsaved] = {}  # least recently used first
        self._waiting: dict[Node, None] = {}  # to be written, in this order
        self._writing: dict[WriteJob, Node] = {}
        self._saved: set[Node] = set()  # ahead of their leaving, and not used since
        self._touched: dict[ChunkKey, int] = {}

    def used(
        self, path: Sequence[tuple[Node, ChunkId]], keys: Sequence[ChunkKey]
    ) -> None:
        """A request has used a path: queue what the policy wants written, root first.

        Args:
            path: Its chunks, root first, without those that must not be written.
            keys: Of all its chunks.
        """
        if not self._room.exists:
            return
        for node, chunk in reversed(path):
            self._saved.discard(node)
            if node.disk is Disk.STORED:
                self._touched[node.key] = node.last_used
            elif node.host is Host.READY:
                self._unsaved.pop(node, None)
                self._unsaved[node] = Unsaved(chunk, keys)
        self.write([node for node, _ in path if self._policy.when_used(node)])
        self._write_ahead()
        if len(self._touched) >= _TOUCH_BATCH:
            self.send_touches()

    def write(self, nodes: Iterable[Node]) -> None:
        """Have chunks written that are unsaved, behind those that wait already."""
        for node in nodes:
            if self._is_unsaved(node):
                self._waiting[node] = None
        self.advance()

    def advance(self) -> None:
        """Hand the writer what waits, as far as its share and the room on SSD go."""
        while nodes := self._next():
            if not self._room.measure(len(nodes)):
                self._stats.write_drops += len(nodes)
                continue
            for node in nodes:
                # Measuring may have found that another process has stored it.
                if self._is_unsaved(node) and not self._queue(node):
                    self._stats.write_drops += 1

    def _next(self) -> list[Node]:
        """Take out as many as may be with the writer, beside those that are."""
        nodes: list[Node] = []
        while self._waiting and len(nodes) + len(self._writing) < self._share:
            node = next(iter(self._waiting))
            del self._waiting[node]
            if self._is_unsaved(node):
                nodes.append(node)
        return nodes

    def abandon(self) -> None:
        """Write nothing of what waits: this is the end."""
        self._stats.write_drops += sum(map(self._is_unsaved, self._waiting))
        self._waiting.clear()

    @property
    def busy(self) -> bool:
        """Whether anything is with the writer, or waits for it."""
        return bool(self._writing or self._waiting)

    def unsaved(self) -> list[Node]:
        """Chunks that are complete in DRAM and not on SSD, latest used first."""
        return [node for node in reversed(self._unsaved) if self._is_unsaved(node)]

    def disown(self, node: Node) -> None:
        """Never write a chunk that is only in DRAM: it was forgotten."""
        self._unsaved.pop(node, None)
        self._waiting.pop(node, None)
        self._saved.discard(node)
        self._touched.pop(node.key, None)

    def save_leaving(self, victim: Node) -> bool:
        """Asked before a chunk leaves DRAM; see ``DramTier.save``."""
        if victim in self._waiting:
            self._stats.write_drops += self._is_unsaved(victim)
        elif self._is_unsaved(victim) and self._policy.when_leaving(victim):
            if len(self._writing) < self._leaving:
                self.write([victim])
                if victim.disk is Disk.WRITING:
                    return True
            else:
                self._stats.write_drops += 1
        self._unsaved.pop(victim, None)
        self._waiting.pop(victim, None)
        self._saved.discard(victim)
        return False

    def send_touches(self) -> None:
        """Have the recency seen so far recorded in the index."""
        if self._touched:
            self._io.write(TouchJob(self._touched))
            self._touched = {}

    def apply(self, job: WriterJob) -> None:
        """Take in a finished job of the writer."""
        if isinstance(job, WriteJob):
            self._apply_write(job)
            return
        if isinstance(job, DeleteJob):
            self._room.apply(job)
        if job.error is not None:
            self._trouble.once("index write", "the cache index refused", job.error)

    def _write_ahead(self) -> None:
        """Have a few chunks that can leave without being written first.

        The next to leave are written: the least recently used of those that are not.
        Looks at so many of them only, however many there are.
        """
        short = self._leaving - len(self._writing) - len(self._saved) - self._dram.spare
        if short <= 0:
            return
        oldest = [
            node
            for node in islice(self._unsaved, 2 * _LEAVING)
            if self._is_unsaved(node) and self._policy.when_leaving(node)
        ]
        if oldest and self._room.measure(short):
            for node in oldest[:short]:
                if self._is_unsaved(node) and not self._queue(node):
                    return  # it is dropped, and counted, when it leaves

    def _is_unsaved(self, node: Node) -> bool:
        return (
            node in self._unsaved and node.host is Host.READY and node.disk is Disk.NONE
        )

    def _queue(self, node: Node) -> bool:
        """Queue one chunk; False if there is no room for it."""
        self._room.give_up(node.key)
        if not self._room.make(node):
            return False
        unsaved = self._unsaved[node]
        self._tree.advance_disk(node, Event.WRITE)
        job = WriteJob(
            self._format,
            unsaved.chunk,
            self._dram.view(node),
            node.last_used,
            ancestors=unsaved.ancestors,
            epoch=self.epoch,
        )
        self._writing[job] = node
        self._io.write(job)
        return True

    def _apply_write(self, job: WriteJob) -> None:
        node = self._writing.pop(job)
        self._room.settle()
        if job.outcome is WriteOutcome.STORED:
            self._tree.advance_disk(node, Event.STORE, job.nbytes)
            self._unsaved.pop(node, None)
            if self._policy.when_leaving(node):
                self._saved.add(node)
            self._stats.written += 1
            self._stats.written_bytes += job.nbytes
            return
        self._tree.advance_disk(node, Event.DROP)
        if job.outcome is WriteOutcome.FAILED:
            self._stats.write_errors += 1
            kind = getattr(job.error, "errno", None) or type(job.error).__name__
            message = "a chunk could not be written"
            self._trouble.once(f"write {kind}", message, job.error)
        elif job.outcome is WriteOutcome.FORGOTTEN:
            self.disown(node)
        else:
            self._stats.write_drops += 1
