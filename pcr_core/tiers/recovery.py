"""What happens to a store's folder when it is opened, shrunk or audited."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import xxhash

from pcr_core.errors import StoreError
from pcr_core.index.chunk import ChunkKey, Namespace, chunk_keys
from pcr_core.tiers.chunk_file import SUFFIX, TEMPORARY, chunk_path, header_digest
from pcr_core.tiers.chunk_index import ChunkIndex, Record
from pcr_core.tiers.files import Files

_OLD_SECONDS = 3600.0
"""Beyond this age a file without a record cannot belong to a write under way."""


@dataclass(frozen=True, slots=True)
class _Found:
    """A file in the chunk folder."""

    path: Path
    size: int
    age: float

    @property
    def key(self) -> ChunkKey | None:
        """The chunk it names, or ``None`` for any other file."""
        if self.path.suffix != SUFFIX:
            return None
        try:
            key = bytes.fromhex(self.path.stem)
        except ValueError:
            return None
        return ChunkKey(key) if len(key) == 32 else None


def recover(index: ChunkIndex, folder: Path, files: Files) -> None:
    """Bring folder and index together after whatever happened to the last process.

    Records without a complete file go; temporary files and files without a record go
    unless another live process may be about to finish them; bytes are recounted.

    Raises:
        StoreError: If the folder or the index refuses.
    """
    try:
        with index.lock.alone() as alone:
            found = list(_scan(folder))
            sizes = {item.key: item.size for item in found if item.key is not None}
            records = index.records()
            stale = [
                key
                for key, record in records.items()
                if sizes.get(key) != record.size
                and _size_now(chunk_path(folder, key)) != record.size
            ]
            total = sum(record.size for record in records.values())
            if stale or total != index.used_bytes():
                with index.write() as txn:
                    for key in stale:
                        txn.remove(key)
                    txn.recount()
            for path in _garbage(index, found, alone=alone):
                files.unlink(path)
    except OSError as error:
        raise StoreError(
            f"the cache folder {folder.parent} cannot be recovered ({error}); free "
            "some disk space, or delete the folder to start afresh"
        ) from error


def shrink(index: ChunkIndex, folder: Path, files: Files, budget: int) -> None:
    """Evict least recently used chunks until the files fit the budget.

    Parents carry newer stamps than their children, so leaves go first.

    Raises:
        StoreError: If files cannot be removed.
    """
    try:
        excess = index.used_bytes() - budget
        if excess <= 0:
            return
        doomed = []
        by_age = sorted(index.records().items(), key=lambda item: item[1].stamp)
        for key, record in by_age:
            if excess <= 0:
                break
            files.unlink(chunk_path(folder, key))
            doomed.append(key)
            excess -= record.size
        with index.write() as txn:
            for key in doomed:
                txn.remove(key)
    except OSError as error:
        raise StoreError(
            f"the cache folder {folder.parent} cannot be brought down to {budget} "
            f"bytes ({error}); raise ssd_bytes or delete the folder"
        ) from error


def audit_store(
    index: ChunkIndex, folder: Path, files: Files, *, fix: bool
) -> list[str]:
    """Read every file, compare it with the index; see ``ChunkStore.audit``."""
    try:
        bad = _bad_chunks(index, folder)
        with index.lock.alone() as alone:
            found = list(_scan(folder))
            garbage = list(_garbage(index, found, alone=alone and index.users == 1))
            kept, counted = index.totals()
            if fix and (bad or garbage or kept != counted):
                _repair(index, folder, files, list(bad), garbage)
    except OSError as error:
        raise StoreError(
            f"the audit of {folder.parent} could not finish ({error}); check the disk"
        ) from error
    problems = [f"chunk {key.hex()[:12]}: {text}" for key, text in bad.items()]
    problems += [f"file {path.name}: belongs to no chunk" for path in garbage]
    if kept != counted:
        problems.append(f"the index counts {kept} bytes, its records have {counted}")
    return problems


def _bad_chunks(index: ChunkIndex, folder: Path) -> dict[ChunkKey, str]:
    bad = {}
    for key, record in index.records().items():
        problem = verify_file(chunk_path(folder, key), key, record)
        # Another process may have evicted or rewritten it since the records were read.
        if problem is not None and index.lookup([key]).get(key) == record:
            bad[key] = problem
    return bad


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


def _repair(
    index: ChunkIndex,
    folder: Path,
    files: Files,
    bad: list[ChunkKey],
    garbage: list[Path],
) -> None:
    for path in [chunk_path(folder, key) for key in bad] + garbage:
        files.unlink(path)
    with index.write() as txn:
        for key in bad:
            txn.remove(key)
        txn.recount()


def _garbage(index: ChunkIndex, found: list[_Found], *, alone: bool) -> Iterator[Path]:
    """Files that no record names and that nobody is about to give one."""
    records = index.records()
    for item in found:
        if item.key is not None:
            orphan = item.key not in records
            if orphan and (alone or item.age > _OLD_SECONDS):
                yield item.path
        elif item.path.suffix == TEMPORARY and (
            alone or item.age > _OLD_SECONDS or not _writer_lives(item.path)
        ):
            yield item.path


def _writer_lives(path: Path) -> bool:
    """Whether the process named in a temporary file's name exists."""
    parts = path.name.split(".")
    if len(parts) != 4 or not parts[1].isdigit():
        return False
    try:
        os.kill(int(parts[1]), 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _scan(folder: Path) -> Iterator[_Found]:
    now = time.time()
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                stat = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            yield _Found(Path(entry.path), stat.st_size, now - stat.st_mtime)


def _size_now(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None
