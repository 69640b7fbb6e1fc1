"""What happens to a store's folder when it is opened, swept or shrunk.

All of it in the writer's turn and inside its transaction: nobody else is writing, so a
file that no record names belongs to nobody.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from pcr_core.index.chunk import ChunkKey
from pcr_core.tiers.store.chunk_file import SUFFIX, TEMPORARY, chunk_key, chunk_path
from pcr_core.tiers.store.files import Files
from pcr_core.tiers.store.records import Contents, IndexTransaction

_log = logging.getLogger("pcr_core.tiers")


@dataclass(frozen=True, slots=True)
class Limits:
    """What may be stored.

    Attributes:
        budget: Bytes of all chunk files, whoever wrote them.
        tenant: Whose chunks this store writes.
        quota: Bytes of that tenant's chunk files; ``None`` for no limit of its own.
    """

    budget: int
    tenant: bytes
    quota: int | None


def recover(
    txn: IndexTransaction, folder: Path, files: Files
) -> tuple[Contents, dict[str, int]]:
    """Bring folder and index together after whatever happened to the last process.

    One pass over the records and one over the names in the folder. Sizes are not
    looked at: a read verifies every byte anyway, and a file that was cut short takes
    less room than is counted.

    Returns:
        The records; name and bytes of files that should go but cannot be removed.

    Raises:
        OSError: If the folder or the index refuses.
    """
    contents = txn.contents()
    if mend(txn, contents):
        contents = txn.contents()
    missing, stray = compare(folder, contents)
    for key in missing:
        txn.remove(key)
    if missing:
        contents = txn.contents()
    txn.recount(contents.totals())
    return contents, _remove(files, stray)


def sweep(txn: IndexTransaction, folder: Path, files: Files) -> dict[str, int]:
    """Remove the files that no record names.

    Returns:
        Name and bytes of those that could not be removed.
    """
    return _remove(files, compare(folder, txn.contents())[1])


def mend(txn: IndexTransaction, contents: Contents) -> bool:
    """Close the index over ancestors again, should it have been damaged.

    Returns:
        Whether anything was removed.
    """
    loose, idle = contents.flaws()
    for key in contents.unreadable:
        txn.discard(key)
    txn.remove_subtrees(loose)
    for key, record in idle.items():
        txn.erase(key, record)
    if contents.unreadable or loose:
        txn.relink()
    return bool(contents.unreadable or loose or idle)


def shrink(
    txn: IndexTransaction, folder: Path, files: Files, limits: Limits
) -> set[ChunkKey]:
    """Evict least recently used chunks until the files fit quota and budget.

    Parents carry newer stamps than their children, so leaves go first.

    Returns:
        The chunks that were evicted.

    Raises:
        OSError: If files cannot be removed.
    """
    doomed: set[ChunkKey] = set()

    def evict(excess: int, tenant: bytes | None) -> None:
        if excess <= 0:
            return
        stored = txn.contents().stored
        for key in sorted(stored, key=lambda key: stored[key].stamp):
            if excess > 0 and tenant in (None, stored[key].tenant):
                files.unlink(chunk_path(folder, key))
                txn.remove(key)
                doomed.add(key)
                excess -= stored[key].size

    if limits.quota is not None:
        evict(txn.tenant_bytes(limits.tenant) - limits.quota, limits.tenant)
    evict(txn.used - limits.budget, None)
    if doomed:
        _log.warning(
            "%d chunks were removed from %s: this engine was opened with a smaller "
            "budget than the folder was filled under; the smallest ssd_bytes counts "
            "for all that use a folder",
            len(doomed),
            folder.parent,
        )
    return doomed


def compare(folder: Path, contents: Contents) -> tuple[list[ChunkKey], list[Path]]:
    """Compare names in the folder with the records, without a look at any file.

    Returns:
        Stored chunks that have no file; files that no record names. What this library
        does not write is not listed.
    """
    expected = {key.hex() + SUFFIX for key in contents.stored}
    found = set(os.listdir(folder))
    missing = [chunk_key(name) for name in expected - found]
    stray = [
        folder / name
        for name in found - expected
        if name.endswith(TEMPORARY) or chunk_key(name) is not None
    ]
    return [key for key in missing if key is not None], stray


def _remove(files: Files, paths: list[Path]) -> dict[str, int]:
    left = {}
    for path in paths:
        try:
            files.unlink(path)
        except OSError as error:
            _log.warning("cannot remove %s: %s", path.name, error)
            left[path.name] = path.stat().st_size
    return left
