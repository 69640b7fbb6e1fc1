"""Documents and what was forgotten: tables of the index.

``documents`` says at which chunks a document begins, under every prefix it was seen
behind. ``epochs`` numbers the calls of ``forget`` and keeps the last of them, so that
every process can drop its copies in memory, and so that a write that was queued before
one of them is recognised when its turn comes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

import lmdb
import msgspec

from pcr_core.index.chunk import ChunkKey
from pcr_core.tiers.store.tables import Tables, number

KEPT_EPOCHS = 1000
"""Whoever is further behind must treat everything it holds as forgotten."""
LATE = b""
"""Stands for a document that was forgotten before: more of its heads became known."""
_EPOCH = b"epoch"
_KEY_BYTES = 32
DOCUMENT_BYTES = 16


class Forgotten(NamedTuple):
    """What was forgotten after some epoch.

    Attributes:
        epoch: The current epoch.
        heads: First chunks of what was forgotten, or ``None``: too much, everything
            held since must go.
        documents: Digests of the documents, or ``None`` likewise.
    """

    epoch: int
    heads: frozenset[ChunkKey] | None
    documents: frozenset[bytes] | None

    def covers(self, keys: Collection[bytes]) -> bool:
        """Whether any of these chunks was forgotten, or may have been."""
        return self.heads is None or not self.heads.isdisjoint(keys)

    def has(self, document: bytes) -> bool:
        """Whether this document was forgotten, or may have been."""
        return self.documents is None or document in self.documents


class _Entry(msgspec.Struct, array_like=True, frozen=True):
    document: bytes
    heads: list[bytes] | None


class ForgetLog:
    """Reads and writes the two tables inside a transaction.

    Args:
        txn: A transaction; a read transaction will do for the first two methods.
        tables: The tables.
    """

    def __init__(self, txn: lmdb.Transaction, tables: Tables) -> None:
        self._txn = txn
        self._tables = tables

    def epoch(self) -> int:
        """How many times something was forgotten."""
        return number(self._txn.get(_EPOCH, db=self._tables.numbers))

    def since(self, epoch: int) -> Forgotten:
        """What was forgotten after ``epoch``."""
        now = self.epoch()
        if epoch < now - KEPT_EPOCHS:
            return Forgotten(now, None, None)
        heads: set[ChunkKey] = set()
        documents: set[bytes] = set()
        for past in range(epoch + 1, now + 1):
            entry = self._entry(past)
            if entry is None or entry.heads is None:
                return Forgotten(now, None, None)
            heads.update(ChunkKey(head) for head in entry.heads)
            documents.add(entry.document)
        return Forgotten(now, frozenset(heads), frozenset(documents - {LATE}))

    def missing(self) -> list[int]:
        """Epochs whose entry should be there but is not, or cannot be read."""
        now = self.epoch()
        kept = range(max(0, now - KEPT_EPOCHS) + 1, now + 1)
        return [epoch for epoch in kept if self._entry(epoch) is None]

    def record(self, document: bytes, heads: Collection[ChunkKey]) -> int:
        """Write down that a document (or ``LATE``) was forgotten; return the epoch."""
        epoch = self.epoch() + 1
        entry = _ENCODER.encode(_Entry(document, sorted(heads)))
        self._txn.put(_epoch_key(epoch), entry, db=self._tables.epochs)
        if epoch > KEPT_EPOCHS:
            self._txn.delete(_epoch_key(epoch - KEPT_EPOCHS), db=self._tables.epochs)
        packed = epoch.to_bytes(8, "little")
        self._txn.put(_EPOCH, packed, db=self._tables.numbers)
        return epoch

    def repair(self) -> None:
        """Let what is missing or unreadable say: everything was forgotten."""
        for epoch in self.missing():
            entry = _ENCODER.encode(_Entry(LATE, None))
            self._txn.put(_epoch_key(epoch), entry, db=self._tables.epochs)

    def heads(self, document: bytes) -> set[ChunkKey]:
        """Keys of the chunks at which a document begins."""
        with self._txn.cursor(db=self._tables.documents) as cursor:
            if not cursor.set_key(document):
                return set()
            return {ChunkKey(bytes(head)) for head in cursor.iternext_dup()}

    def add_heads(self, document: bytes, heads: Collection[ChunkKey]) -> None:
        """Add to the chunks at which a document begins.

        Raises:
            ValueError: If a digest has a wrong length.
        """
        check_digests(document, heads)
        for head in heads:
            self._txn.put(document, head, db=self._tables.documents)

    def clear(self, document: bytes) -> None:
        """Drop all heads of a document."""
        self._txn.delete(document, db=self._tables.documents)

    def prune(self, known: Callable[[bytes], bool]) -> None:
        """Drop the heads that are not known to be chunks."""
        with self._txn.cursor(db=self._tables.documents) as cursor:
            gone = [(d, h) for d, h in cursor if not known(bytes(h))]
        for document, head in gone:
            self._txn.delete(document, head, db=self._tables.documents)

    def _entry(self, epoch: int) -> _Entry | None:
        value = self._txn.get(_epoch_key(epoch), db=self._tables.epochs)
        try:
            return _DECODER.decode(value) if value is not None else None
        except msgspec.MsgspecError:
            return None


def check_digests(document: bytes, heads: Collection[ChunkKey]) -> None:
    """Refuse what the tables have no room for.

    Raises:
        ValueError: If a digest has a wrong length.
    """
    if len(document) != DOCUMENT_BYTES:
        raise ValueError(f"a document digest has {DOCUMENT_BYTES} bytes")
    if any(len(head) != _KEY_BYTES for head in heads):
        raise ValueError(f"a chunk key has {_KEY_BYTES} bytes")


def _epoch_key(epoch: int) -> bytes:
    return epoch.to_bytes(8, "big")


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Entry)
