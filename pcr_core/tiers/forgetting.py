"""The right to be forgotten, in memory: documents, and chunks that must go.

A chunk's KV depends on every token before it, so forgetting a document removes the
chunks that contain it and all that follow, in every tier and every process on the
folder. The store numbers the removals (epochs); each process looks for new ones before
it serves a request and while it idles, and drops its copies. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from pcr_core.index.chunk import ChunkKey
from pcr_core.index.node import Disk, Event, Host, Node
from pcr_core.index.prefix_tree import PrefixTree
from pcr_core.stats import StoreCounters
from pcr_core.tiers.dram import DramTier
from pcr_core.tiers.eviction_log import EvictionLog
from pcr_core.tiers.forget_log import Forgotten
from pcr_core.tiers.jobs import DocumentJob, ForgetJob, Io
from pcr_core.tiers.no_store import Store
from pcr_core.tiers.trouble import TroubleLog
from pcr_core.tiers.write_back import WriteBack

_T = TypeVar("_T")
_MOST_HEADS = 100_000


@dataclass(frozen=True, slots=True)
class Removed:
    """What was forgotten.

    Attributes:
        heads: Its first chunks, or ``None`` for everything there was.
        documents: Digests of the documents, or ``None`` likewise.
        dram: Chunks that had a copy in DRAM.
    """

    heads: frozenset[ChunkKey] | None
    documents: frozenset[bytes] | None
    dram: list[ChunkKey]

    def covers(self, key: ChunkKey) -> bool:
        """Whether a chunk is one of the heads: it goes, with all that follow it."""
        return self.heads is None or key in self.heads

    def names(self, document: bytes) -> bool:
        """Whether a document is one of those, by its digest."""
        return self.documents is None or document in self.documents

    def plus(self, other: Removed) -> Removed:
        """Both together."""
        return Removed(
            _union(self.heads, other.heads),
            _union(self.documents, other.documents),
            [*self.dram, *other.dram],
        )


class Forgetting:
    """Knows where documents begin, and removes what follows.

    Args:
        tree, dram, writes: Where copies are.
        store: Remembers documents and removals for everybody.
        io: Runs jobs on it.
        stats, trouble, log: Where things are counted and noted.
    """

    def __init__(
        self,
        tree: PrefixTree,
        dram: DramTier,
        writes: WriteBack,
        store: Store,
        io: Io,
        *,
        stats: StoreCounters,
        trouble: TroubleLog,
        log: EvictionLog,
    ) -> None:
        self._tree = tree
        self._dram = dram
        self._writes = writes
        self._store = store
        self._io = io
        self._stats = stats
        self._trouble = trouble
        self._log = log
        self._heads: dict[bytes, set[ChunkKey]] = {}
        self._unwritten: dict[bytes, set[ChunkKey]] = {}
        self._count = 0
        self._doomed: dict[Node, None] = {}
        writes.epoch = self._now()

    def register(self, heads: Mapping[bytes, ChunkKey]) -> None:
        """Remember where documents begin. Before their chunks are stored.

        Args:
            heads: Digest of a document -> key of the first chunk that has any of it.
        """
        for document, head in heads.items():
            known = self._heads.setdefault(document, set())
            if head not in known:
                known.add(head)
                self._count += 1
                self._unwritten.setdefault(document, set()).add(head)
        self.write()
        if self._count > _MOST_HEADS:
            self._prune()

    def write(self) -> None:
        """Have the store remember where documents begin, as far as it does not know."""
        if self._unwritten:
            self._io.write(DocumentJob(self._unwritten, epoch=self._writes.epoch))
            self._unwritten = {}

    def apply(self, job: DocumentJob) -> None:
        """Take in a finished job; one that was refused is repeated with the next."""
        if job.error is None:
            return
        for document, heads in job.heads.items():
            known = self._heads.get(document, set())
            again = known.intersection(heads)  # what was forgotten meanwhile is not
            if again:
                self._unwritten.setdefault(document, set()).update(again)

    def begin(self, document: bytes, heads: Iterable[ChunkKey] = ()) -> ForgetJob:
        """Have the store remove a document.

        Call ``finish`` at once, for what is known to be in memory, and again when the
        job has ended.

        Args:
            document: Its digest.
            heads: First chunks that were not registered yet.
        """
        job = ForgetJob(document, heads=sorted({*self._take_heads(document), *heads}))
        self._io.write(job)
        return job

    def finish(self, job: ForgetJob) -> Removed:
        """Drop from memory what a job stands for, as far as that is known by now.

        If the store has refused it, its heads are known again: the next call for the
        document needs them.
        """
        heads = frozenset(job.heads) | frozenset(job.keys)
        removed = Removed(heads, frozenset([job.document]), self.drop(heads))
        if job.error is not None:
            known = self._heads.setdefault(job.document, set())
            self._count += len(heads - known)
            known |= heads
        news = self.catch_up()
        return removed if news is None else removed.plus(news)

    def catch_up(self) -> Removed | None:
        """Drop what any process has had removed since the last call.

        Returns:
            What that was, or ``None``.
        """
        news = self._news(self._writes.epoch)
        if news.epoch == self._writes.epoch:
            return None
        self._writes.epoch = news.epoch
        heads = news.heads
        for document in list(self._heads if news.documents is None else news.documents):
            # The index may not have heard of ours yet.
            heads = _union(heads, frozenset(self._take_heads(document)))
        return Removed(heads, news.documents, self.drop(heads))

    def since(self, epoch: int) -> Removed | None:
        """What was dropped after an earlier epoch, if anything."""
        if epoch == self._writes.epoch:
            return None
        news = self._news(epoch)
        return Removed(news.heads, news.documents, [])

    def drop(self, heads: Collection[ChunkKey] | None) -> list[ChunkKey]:
        """Remove chunks, and all that follow them, from memory.

        A chunk that is being read or written goes as soon as that has ended; it is not
        lent any more.

        Args:
            heads: The first chunks; ``None`` for everything there is.

        Returns:
            Keys of the chunks that had a copy in DRAM.
        """
        nodes = list(self._tree.nodes())
        if heads is not None:
            nodes = self._tree.subtree(heads)
        keys = []
        for node in nodes:
            self._writes.disown(node)
            if node.host is not Host.NONE:
                keys.append(node.key)
                self._doomed[node] = None
            if node.disk is Disk.STORED:
                self._log.note(node.key, "ssd", "forgotten", by="")
                self._stats.forgotten += 1
        for node in nodes:
            if node.disk is Disk.STORED:
                self._tree.advance_disk(node, Event.REMOVE)
        self.sweep()
        return keys

    def is_doomed(self, node: Node) -> bool:
        """Whether a chunk is only still there because somebody is using it."""
        return node in self._doomed

    def sweep(self) -> None:
        """Free the copies of doomed chunks that nobody uses any more."""
        for node in list(self._doomed):
            if node.host is Host.NONE:
                del self._doomed[node]
            elif _is_idle(node):
                del self._doomed[node]
                self._log.note(node.key, "dram", "forgotten", by="")
                self._stats.forgotten += 1
                self._writes.disown(node)
                self._dram.free(node, Event.REMOVE)

    def heads_of(self, document: bytes) -> Iterable[ChunkKey]:
        """Where a document begins, as far as this process knows."""
        return self._heads.get(document, ())

    def _take_heads(self, document: bytes) -> set[ChunkKey]:
        """No longer know where a document begins; return where it did."""
        heads = self._heads.pop(document, set())
        self._count -= len(heads)
        self._unwritten.pop(document, None)
        return heads

    def _now(self) -> int:
        try:
            return self._store.epoch()
        except OSError as error:
            self._trouble.once("index", "the cache index cannot be read", error)
            return 0

    def _news(self, epoch: int) -> Forgotten:
        try:
            return self._store.forgotten_since(epoch)
        except OSError as error:
            self._trouble.once("index", "the cache index cannot be read", error)
            return Forgotten(epoch, frozenset(), frozenset())

    def _prune(self) -> None:
        """Let go of heads of which nothing is left in memory; the index has its own."""
        for document, heads in list(self._heads.items()):
            alive = zip(heads, self._tree.match(list(heads)), strict=True)
            kept = {head for head, node in alive if node is not None}
            if kept:
                self._heads[document] = kept
            else:
                del self._heads[document]
        self._count = sum(map(len, self._heads.values()))


def _is_idle(node: Node) -> bool:
    return node.pins == 0 and node.host is Host.READY and node.disk is not Disk.WRITING


def _union(a: frozenset[_T] | None, b: frozenset[_T] | None) -> frozenset[_T] | None:
    """Of two sets; ``None`` is everything."""
    return None if a is None or b is None else a | b
