"""The audit of a store: every file, every record, and whether they belong together."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec
import xxhash

from pcr_core.errors import StoreError
from pcr_core.index.chunk import ChunkKey, Namespace, chunk_keys
from pcr_core.tiers.store.chunk_file import chunk_path, header_digest
from pcr_core.tiers.store.chunk_index import ChunkIndex
from pcr_core.tiers.store.files import Files
from pcr_core.tiers.store.records import Contents, IndexTransaction, Record
from pcr_core.tiers.store.recovery import compare, mend


def audit_store(
    index: ChunkIndex, folder: Path, files: Files, *, fix: bool
) -> list[str]:
    """Read every file and compare it with the index; see ``ChunkStore.audit``.

    Files are read while others work. What looks wrong, and the index as a whole, is
    then looked at in the writer's turn, when nothing changes.
    """
    try:
        suspects = _bad_chunks(index.contents().stored, folder)
        with index.turn() as turn, index.write() as txn:
            contents = txn.contents()
            again = {
                key: contents.stored[key] for key in suspects if key in contents.stored
            }
            bad = _bad_chunks(again, folder)
            _, stray = compare(folder, contents)
            flaws = list(_flaws(txn, contents))
            if fix:
                for key in bad:
                    txn.remove(key)
                if flaws:
                    _mend(txn)
                for path in compare(folder, txn.contents())[1]:
                    files.unlink(path)
                turn.unclean = False
    except OSError as error:
        raise StoreError(
            f"the audit of {folder.parent} could not finish ({error}); check the disk, "
            "its permissions, and whether a process hangs"
        ) from error
    problems = [f"chunk {key.hex()[:12]}: {text}" for key, text in bad.items()]
    problems += [f"file {path.name}: belongs to no chunk" for path in stray]
    return problems + flaws


def _bad_chunks(records: dict[ChunkKey, Record], folder: Path) -> dict[ChunkKey, str]:
    bad = {}
    for key, record in records.items():
        problem = verify_file(chunk_path(folder, key), key, record)
        if problem is not None:
            bad[key] = problem
    return bad


def _flaws(txn: IndexTransaction, contents: Contents) -> Iterator[str]:
    """Broken invariants of the index."""
    for key in contents.unreadable:
        yield f"index: the record of chunk {key.hex()[:12]} cannot be read"
    detached, idle = contents.flaws()
    for key in detached:
        yield f"index: chunk {key.hex()[:12]} has a parent without record"
    for key in idle:
        yield f"index: the bare record {key.hex()[:12]} has no children"
    if not txn.has_good_links(contents):
        yield "index: the table of children does not fit the records"
    totals = contents.totals()
    counted = sum(totals.values())
    if counted != txn.used:
        yield f"index: counts {txn.used} bytes, its records have {counted}"
    for tenant, kept in txn.kept_totals().items():
        found = totals.pop(tenant, 0)
        if found != kept:
            name = tenant.hex() or "nobody"
            yield f"index: counts {kept} bytes of tenant {name}, records have {found}"
    for tenant in totals:
        yield f"index: does not count the bytes of tenant {tenant.hex() or 'nobody'}"
    for epoch in txn.forgotten.missing():
        yield f"index: what was forgotten in epoch {epoch} cannot be read"


def _mend(txn: IndexTransaction) -> None:
    # Links first: a subtree can only be removed along good ones.
    txn.relink()
    mend(txn, txn.contents())
    txn.recount(txn.contents().totals())
    txn.forgotten.repair()


def verify_file(path: Path, key: ChunkKey, record: Record) -> str | None:
    """Check a chunk file against its record and itself, without knowing its model.

    Returns:
        What is wrong, or ``None``.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return "its file is missing"
    if len(raw) != record.size:
        return f"its file has {len(raw)} bytes instead of {record.size}"
    start = 8 + int.from_bytes(raw[:8], "little")
    if header_digest(raw[:start]) != record.digest:
        return "its header is damaged"
    header = msgspec.json.decode(raw[8:start], type=dict[str, dict[str, object]])
    metadata = header.pop("__metadata__")
    packed = bytes.fromhex(str(metadata["tokens_u32le"]))
    tokens = struct.unpack(f"<{len(packed) // 4}I", packed)
    if chunk_keys(Namespace(record.parent), tokens, len(tokens)) != [key]:
        return "its tokens do not give its key"
    spans = [
        msgspec.convert(tensor["data_offsets"], tuple[int, int])
        for tensor in header.values()
    ]
    data = memoryview(raw)[start:]
    sums = [
        xxhash.xxh3_128_hexdigest(data[keys[0] : values[1]])
        for keys, values in zip(spans[::2], spans[1::2], strict=True)
    ]
    if sums != str(metadata["layers_xxh3_128"]).split():
        return "its data is damaged"
    return None
