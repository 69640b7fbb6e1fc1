"""The records of the index, and what one write transaction may do with them.

The index is closed over ancestors: the record of a chunk implies a record for every
chunk before it, up to one for the namespace itself. A chunk that is not stored but has
stored descendants has a *bare* record, of size 0. So everything that follows a chunk is
found by walking the table of children, whatever was evicted in between.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, cast

import lmdb
import msgspec

from pcr_core.index.chunk import ChunkKey
from pcr_core.tiers.store.forget_log import ForgetLog
from pcr_core.tiers.store.tables import Tables, number

TOTAL = b"bytes"
MAX_RECORDS = 5_000_000
"""They fill about half of the index's address space. The rest is for removing: that
takes pages, too, and must never be what fails."""
_TENANT = b"tenant:"


class Record(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What the index knows of a chunk.

    Attributes:
        parent: Key of the chunk before it, or its namespace's digest; empty for the
            record of a namespace.
        size: Bytes of its file, header included; 0 for a bare record.
        stamp: Last committed use; larger is later.
        digest: xxh3-128 of the file's header.
        tenant: Whose quota it counts against: 16 bytes, or none.
    """

    parent: bytes
    size: int
    stamp: int
    digest: bytes
    tenant: bytes = b""


class Contents(NamedTuple):
    """All records at one moment.

    Attributes:
        stored: Records of chunks that have a file.
        bare: Records of chunks that have none, but stored descendants.
        roots: Digests of the namespaces.
        unreadable: Keys whose value is no record.
    """

    stored: dict[ChunkKey, Record]
    bare: dict[ChunkKey, Record]
    roots: set[ChunkKey]
    unreadable: list[ChunkKey]

    def totals(self) -> dict[bytes, int]:
        """Bytes of the files of each tenant that has any."""
        totals: dict[bytes, int] = {}
        for record in self.stored.values():
            totals[record.tenant] = totals.get(record.tenant, 0) + record.size
        return totals

    def flaws(self) -> tuple[list[ChunkKey], dict[ChunkKey, Record]]:
        """What no transaction leaves behind, so signs of damage.

        Returns:
            Keys of records whose parent has none; bare records that nothing follows.
        """
        parents = {record.parent for record in self.stored.values()}
        parents.update(record.parent for record in self.bare.values())
        detached = []
        lost = parents.difference(self.stored, self.bare, self.roots)
        if lost:
            both = {**self.stored, **self.bare}
            detached = [key for key, record in both.items() if record.parent in lost]
        idle = {key: one for key, one in self.bare.items() if key not in parents}
        return detached, idle | dict.fromkeys(self.roots - parents, _ROOT)


class IndexTransaction:
    """One write transaction: keeps links and byte totals beside the records.

    Attributes:
        used: Bytes of all files with a record.
        forgotten: Documents, and what was forgotten.
    """

    def __init__(self, txn: lmdb.Transaction, tables: Tables) -> None:
        self._txn = txn
        self._tables = tables
        self.forgotten = ForgetLog(txn, tables)
        self._totals: dict[bytes, int] = {}
        self.used = number(txn.get(TOTAL, db=tables.numbers))

    def get(self, key: bytes) -> Record | None:
        """Return a record, bare ones too, or ``None``."""
        return decode(self._txn.get(key, db=self._tables.records))

    def stored(self, key: ChunkKey) -> Record | None:
        """Return the record of a chunk that has a file, or ``None``."""
        record = self.get(key)
        return record if record is not None and record.size else None

    def contents(self) -> Contents:
        """Every record."""
        return read_contents(self._txn, self._tables)

    def is_full(self) -> bool:
        """Whether there are as many records as the index takes."""
        return int(self._txn.stat(self._tables.records)["entries"]) >= MAX_RECORDS

    def tenant_bytes(self, tenant: bytes) -> int:
        """Bytes of the files of one tenant."""
        if tenant not in self._totals:
            value = self._txn.get(_TENANT + tenant, db=self._tables.numbers)
            self._totals[tenant] = number(value)
        return self._totals[tenant]

    def put(self, key: ChunkKey, record: Record, lineage: Sequence[bytes]) -> None:
        """Add or replace the record of a stored chunk.

        Args:
            key: The chunk.
            record: Its record.
            lineage: Digest of the namespace and keys of all chunks before this one,
                root first; those without a record get a bare one.
        """
        for index in range(len(lineage) - 1, -1, -1):
            if self.get(lineage[index]) is not None:
                break
            above = lineage[index - 1] if index else b""
            bare = Record(above, 0, 0, b"", record.tenant)
            self._write(ChunkKey(lineage[index]), bare)
        old = self.get(key)
        if old is not None:
            self._count(old, -1)
        self._write(key, record)
        self._count(record, 1)

    def remove(self, key: ChunkKey) -> None:
        """Remove the record of a stored chunk; one that is not there is fine.

        It becomes bare if it has children. Otherwise it goes, and with it those bare
        ones above it that have no other child.
        """
        old = self.stored(key)
        if old is None:
            return
        self._count(old, -1)
        if self._has_children(key):
            bare = Record(old.parent, 0, 0, b"", old.tenant)
            self._txn.put(key, _ENCODER.encode(bare), db=self._tables.records)
        else:
            self.erase(key, old)

    def remove_subtrees(self, heads: Collection[ChunkKey]) -> dict[ChunkKey, Record]:
        """Remove chunks and everything that follows them; return the records."""
        found: dict[ChunkKey, Record | None] = {}
        waiting = list(heads)
        while waiting:
            key = waiting.pop()
            if key not in found:
                found[key] = self.get(key)
                waiting += self.children(key)
        for key, record in found.items():
            self._txn.delete(key, db=self._tables.records)
            self._txn.delete(key, db=self._tables.children)
            if record is not None:
                self._count(record, -1)
        for head in heads:
            first = found[head]
            if first is not None and first.parent not in found:
                self.erase(head, first)
        return {key: record for key, record in found.items() if record is not None}

    def touch(self, key: ChunkKey, stamp: int) -> None:
        """Move a stored chunk's stamp forward, if it is still there."""
        old = self.stored(key)
        if old is not None and old.stamp < stamp:
            new = msgspec.structs.replace(old, stamp=stamp)
            self._txn.put(key, _ENCODER.encode(new), db=self._tables.records)

    def children(self, key: bytes) -> list[ChunkKey]:
        """Keys of the chunks whose parent is ``key``, bare ones too."""
        with self._txn.cursor(db=self._tables.children) as cursor:
            if not cursor.set_key(key):
                return []
            return [ChunkKey(bytes(child)) for child in cursor.iternext_dup()]

    def erase(self, key: ChunkKey, record: Record) -> None:
        """Delete a childless record, then the bare ones above it that are left so."""
        while True:
            self._txn.delete(key, db=self._tables.records)
            if not record.parent:
                return
            self._txn.delete(record.parent, key, db=self._tables.children)
            above = self.get(record.parent)
            if above is None or above.size or self._has_children(record.parent):
                return
            key, record = ChunkKey(record.parent), above

    def has_good_links(self, contents: Contents) -> bool:
        """Whether the table of children is what the records say."""
        with self._txn.cursor(db=self._tables.children) as cursor:
            kept = {(bytes(child), bytes(parent)) for parent, child in cursor}
        return kept == set(links(contents))

    def kept_totals(self) -> dict[bytes, int]:
        """Byte totals of the tenants, as kept in the index."""
        with self._txn.cursor(db=self._tables.numbers) as cursor:
            return {
                bytes(name).removeprefix(_TENANT): number(value)
                for name, value in cursor
                if bytes(name).startswith(_TENANT)
            }

    def recount(self, totals: Mapping[bytes, int]) -> None:
        """Replace all byte totals by these, one for each tenant."""
        self._totals = dict.fromkeys(self.kept_totals(), 0)
        self._totals.update(totals)
        self.used = sum(totals.values())

    def discard(self, key: ChunkKey) -> None:
        """Delete an unreadable record; its links must be written anew."""
        self._txn.delete(key, db=self._tables.records)

    def relink(self) -> None:
        """Write the table of children anew, from the records."""
        self._txn.drop(self._tables.children, delete=False)
        for key, parent in links(self.contents()):
            self._txn.put(parent, key, db=self._tables.children)

    def finish(self) -> None:
        """Write the totals; the last call of a transaction."""
        self._store_number(TOTAL, self.used)
        for tenant, total in self._totals.items():
            self._store_number(_TENANT + tenant, total)

    def _write(self, key: ChunkKey, record: Record) -> None:
        self._txn.put(key, _ENCODER.encode(record), db=self._tables.records)
        if record.parent:
            self._txn.put(record.parent, key, db=self._tables.children)

    def _has_children(self, key: bytes) -> bool:
        return self._txn.get(key, db=self._tables.children) is not None

    def _store_number(self, name: bytes, value: int) -> None:
        if value == number(self._txn.get(name, db=self._tables.numbers)):
            return  # a transaction that changes nothing costs no flush
        if value:
            packed = value.to_bytes(8, "little")
            self._txn.put(name, packed, db=self._tables.numbers)
        else:
            self._txn.delete(name, db=self._tables.numbers)

    def _count(self, record: Record, sign: int) -> None:
        self.used += sign * record.size
        total = self.tenant_bytes(record.tenant) + sign * record.size
        self._totals[record.tenant] = total


def read_contents(txn: lmdb.Transaction, tables: Tables) -> Contents:
    """Read every record."""
    contents = Contents({}, {}, set(), [])
    stored, bare, roots, unreadable = contents
    with txn.cursor(db=tables.records) as cursor:
        for name, value in cursor:
            key = cast(ChunkKey, name)
            try:
                record = _DECODER.decode(value)
            except msgspec.MsgspecError:
                unreadable.append(key)
                continue
            if record.size:
                stored[key] = record
            elif record.parent:
                bare[key] = record
            else:
                roots.add(key)
    return contents


def read_tenant(txn: lmdb.Transaction, tables: Tables, tenant: bytes) -> int:
    """Byte total of one tenant, as kept."""
    return number(txn.get(_TENANT + tenant, db=tables.numbers))


def links(contents: Contents) -> Iterator[tuple[ChunkKey, bytes]]:
    """The pairs (key, parent) that the table of children should have."""
    for records in (contents.stored, contents.bare):
        for key, record in records.items():
            yield key, record.parent


def decode(value: bytes | memoryview | None) -> Record | None:
    """Decode a record; one that cannot be read counts as none."""
    if value is None:
        return None
    try:
        return _DECODER.decode(value)
    except msgspec.MsgspecError:
        return None


_ROOT = Record(b"", 0, 0, b"")
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Record)
