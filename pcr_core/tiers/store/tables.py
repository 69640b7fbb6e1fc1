"""Handles of the LMDB tables of the index."""

from __future__ import annotations

from typing import NamedTuple

import lmdb


class Tables(NamedTuple):
    """Handles of the index's tables.

    Attributes:
        records: Chunk key -> record.
        children: Chunk key -> keys of the chunks whose parent it is.
        documents: Document digest -> keys of the first chunks that contain any of it.
        epochs: Number of a ``forget`` -> what was forgotten.
        numbers: Byte totals and the current epoch.
    """

    records: lmdb._Database
    children: lmdb._Database
    documents: lmdb._Database
    epochs: lmdb._Database
    numbers: lmdb._Database

    @classmethod
    def open(cls, env: lmdb.Environment, txn: lmdb.Transaction) -> Tables:
        """Open all tables, creating those that are missing."""

        def table(name: bytes, *, many: bool = False) -> lmdb._Database:
            return env.open_db(name, txn=txn, dupsort=many, dupfixed=many)

        return cls(
            table(b"records"),
            table(b"children", many=True),
            table(b"documents", many=True),
            table(b"epochs"),
            table(b"numbers"),
        )


def number(value: bytes | memoryview | None) -> int:
    """Decode a number; a missing one is 0."""
    return int.from_bytes(value or b"", "little")
