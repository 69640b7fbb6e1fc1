"""Which chunks are on SSD, as far as this process knows.

Others may use the folder, too: what they store is met by key, or all of it by reading
the index; what they remove is noticed when it is wanted. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from pcr_core.index.chunk import ChunkKey
from pcr_core.index.node import Disk, Event, Host, Node
from pcr_core.index.prefix_tree import PrefixTree
from pcr_core.tiers.eviction_log import EvictionLog
from pcr_core.tiers.store.chunk_index import Record
from pcr_core.tiers.store.no_store import Store
from pcr_core.tiers.trouble import TroubleLog

ChunkState = Literal["none", "dram", "ssd"]


class Catalogue:
    """Keeps the tree's view of the SSD tier.

    Every chunk it adds hangs below its namespace's root, whatever is missing in
    between: ``forget`` finds what follows a document by walking down.

    Args:
        tree: Where chunks are added.
        store: The SSD tier.
        root: Digest of this namespace.
        trouble: Where failures are logged.
        log: Where departures are remembered.

    Attributes:
        unreadable: Chunks that the system refused to read, oldest first: out of use
            until they are written again.
        leaving: Chunks whose removal is under way: out of use, too.
    """

    def __init__(
        self,
        tree: PrefixTree,
        store: Store,
        root: bytes,
        trouble: TroubleLog,
        log: EvictionLog,
    ) -> None:
        self.unreadable: dict[ChunkKey, None] = {}
        self.leaving: set[ChunkKey] = set()
        self._tree = tree
        self._store = store
        self._root = ChunkKey(root)
        self._trouble = trouble
        self._log = log

    def states(self, keys: Sequence[ChunkKey]) -> list[ChunkState]:
        """Say where each chunk could be read from now. Pure: nothing is re-ranked."""
        states = [_state(node) for node in self._tree.match(keys)]
        unknown = {key: i for i, key in enumerate(keys) if states[i] == "none"}
        for key in self.find(unknown):
            states[unknown[key]] = "ssd"
        return states

    def find(self, keys: Iterable[ChunkKey]) -> dict[ChunkKey, Record]:
        """Look for chunks that anybody may have stored. Pure."""
        wanted = [key for key in keys if not self._is_hidden(key)]
        if not wanted:
            return {}
        try:
            return self._store.lookup(wanted)
        except OSError as error:
            self._trouble.once("index", "the cache index cannot be read", error)
            return {}

    def adopt(self, keys: Sequence[ChunkKey]) -> None:
        """Take in those chunks of a prompt that another engine or process has stored.

        Args:
            keys: Of its chunks, root first.
        """
        known = zip(keys, self._tree.match(keys), strict=True)
        unknown = [key for key, node in known if node is None or not _is_held(node)]
        found = self.find(unknown)
        parent = self._root
        for key in keys if found else ():
            record = found.pop(key, None)
            if record is not None:
                self._add(key, record)
            elif found:  # there is more behind it
                self._tree.add_known(key, parent, self._store.tenant)
            parent = key

    def resync(self) -> None:
        """Bring the tree in line with the index: looks at every record and node."""
        try:
            contents = self._store.contents()
        except OSError as error:
            self._trouble.once("index", "the cache index cannot be read", error)
            return
        for key, record in contents.bare.items():
            self._tree.add_known(key, record.parent, record.tenant)
        for key, record in contents.stored.items():
            if self._is_hidden(key):
                self._tree.add_known(key, record.parent, record.tenant)
            else:
                self._add(key, record)
        for node in list(self._tree.nodes()):
            if node.disk is Disk.STORED and node.key not in contents.stored:
                self._gone(node)
        for key in self.unreadable.keys() - contents.stored.keys():
            del self.unreadable[key]  # somebody has removed it
        self._tree.prune()

    def has(self, node: Node) -> bool:
        """Whether a chunk that counts as stored is there; if not, it counts no more.

        Raises:
            OSError: If the index cannot be read.
        """
        if node.key in self._store.lookup([node.key]):
            return True
        self._gone(node)
        return False

    def tokens_below(self, parent: ChunkKey, other: ChunkKey) -> list[int]:
        """Token ids of a stored chunk right behind ``parent`` that is not ``other``.

        Looks at every node. Empty if there is none.
        """
        for node in self._tree.nodes():
            above = node.parent.key if node.parent is not None else None
            if above == parent and node.disk is Disk.STORED and node.key != other:
                return self._store.tokens_of(node.key)
        return []

    def _gone(self, node: Node) -> None:
        self._log.note(node.key, "ssd", "removed by another process", by="")
        self._tree.advance_disk(node, Event.REMOVE)

    def _add(self, key: ChunkKey, record: Record) -> None:
        self._tree.add_stored(
            key, record.parent, record.size, record.stamp, record.tenant
        )

    def _is_hidden(self, key: ChunkKey) -> bool:
        return key in self.leaving or key in self.unreadable


def _state(node: Node | None) -> ChunkState:
    if node is None:
        return "none"
    if node.host is Host.READY:
        return "dram"
    return "ssd" if node.disk is Disk.STORED else "none"


def _is_held(node: Node) -> bool:
    """Whether a chunk has a copy in any state."""
    return node.host is not Host.NONE or node.disk is not Disk.NONE
