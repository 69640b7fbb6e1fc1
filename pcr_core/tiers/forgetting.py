"""The right to be forgotten, in memory: documents, and chunks that must go.

A chunk's KV depends on every token before it, so forgetting a document removes the
chunks that contain it and all that follow, in every tier and every process on the
folder. The store numbers the removals (epochs); each process looks for new ones before
it serves a request and while it idles, and drops its copies. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from pcr_core.index.chunk import ChunkKey
from pcr_core.index.node import Disk, Event, Host, Node
from pcr_core.index.prefix_tree import PrefixTree
from pcr_core.stats import StoreCounters
from pcr_core.tiers.dram import DramTier
from pcr_core.tiers.eviction_log import EvictionLog
from pcr_core.tiers.jobs import DocumentJob, ForgetJob, Io
from pcr_core.tiers.store.forget_log import Forgotten
from pcr_core.tiers.store.no_store import Store
from pcr_core.tiers.trouble import TroubleLog
from pcr_core.tiers.write_back import WriteBack

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
        """Whether a document is one of those that were forgotten."""
        return self.documents is None or document in self.documents


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
        self._count = 0
        self._most = _MOST_HEADS
        self._doomed: dict[Node, None] = {}
        writes.epoch = self._now()

    def register(self, heads: Mapping[bytes, ChunkKey]) -> None:
        """Remember where documents begin. Before their chunks are stored.

        After ``catch_up`` and before the lease, with neither in between: what is known
        already is not recorded again, and ``catch_up`` may have it forgotten.

        Args:
            heads: Digest of a document -> key of the first chunk that has any of it.
        """
        if self._count > self._most:
            self._prune()
        fresh = {}
        for document, head in heads.items():
            if self._add_heads(document, [head]):
                fresh[document] = (head,)
        if fresh:
            self._io.write(DocumentJob(fresh, epoch=self._writes.epoch))

    def heads_of(self, document: bytes) -> set[ChunkKey]:
        """Chunks at which a document begins, as far as memory or the index knows."""
        known = self._heads.get(document, set())
        try:
            return known | self._store.heads_of(document)
        except OSError as error:
            self._trouble.once("index", "the cache index cannot be read", error)
            return known

    def begin(self, document: bytes, heads: Iterable[ChunkKey] = ()) -> ForgetJob:
        """Have the store remove a document. ``finish`` at once and when it has ended.

        Args:
            document: Its digest.
            heads: First chunks that are not registered yet.
        """
        job = ForgetJob(document, heads=sorted({*self._pop_heads(document), *heads}))
        self._io.write(job)
        return job

    def finish(self, job: ForgetJob) -> Removed:
        """Drop from memory what a job stands for, as far as that is known by now."""
        heads = frozenset(job.heads) | frozenset(job.keys)
        documents = frozenset([job.document])
        dropped = self.drop(heads)
        if job.error is not None:
            # It will be asked for again, and nobody else may know these.
            self._add_heads(job.document, job.heads)
        more = self.catch_up()
        if more is None:
            return Removed(heads, documents, dropped)
        return Removed(
            None if more.heads is None else heads | more.heads,
            None if more.documents is None else documents | more.documents,
            list(dict.fromkeys([*dropped, *more.dram])),
        )

    def catch_up(self) -> Removed | None:
        """Drop what any process has had removed since the last call.

        Returns:
            What that was, or ``None``.
        """
        news = self._news(self._writes.epoch)
        if news.epoch == self._writes.epoch:
            return None
        self._writes.epoch = news.epoch
        gone = list(self._heads) if news.documents is None else news.documents
        # Some of ours may not have been in the index when it was forgotten.
        ours = [head for document in gone for head in self._pop_heads(document)]
        heads = None if news.heads is None else news.heads.union(ours)
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
                if node.disk is Disk.STORED:
                    # We heard of a write after hearing that it was undone.
                    self._tree.advance_disk(node, Event.REMOVE)
                self._dram.free(node, Event.REMOVE)

    def _add_heads(self, document: bytes, heads: Collection[ChunkKey]) -> set[ChunkKey]:
        """Add to what is known; return what was not known."""
        known = self._heads.setdefault(document, set())
        fresh = set(heads) - known
        known |= fresh
        self._count += len(fresh)
        return fresh

    def _pop_heads(self, document: bytes) -> set[ChunkKey]:
        heads = self._heads.pop(document, set())
        self._count -= len(heads)
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
        """Let go of heads of which nothing is left in memory; the index has its own.

        Not again before twice as many are known: amortised, it costs nothing.
        """
        for document, heads in list(self._heads.items()):
            alive = zip(heads, self._tree.match(list(heads)), strict=True)
            kept = {head for head, node in alive if node is not None}
            if kept:
                self._heads[document] = kept
            else:
                del self._heads[document]
        self._count = sum(map(len, self._heads.values()))
        self._most = max(_MOST_HEADS, 2 * self._count)


def _is_idle(node: Node) -> bool:
    return node.pins == 0 and node.host is Host.READY and node.disk is not Disk.WRITING
