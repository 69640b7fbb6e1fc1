"""The cache folder: is it ours, and may we use it."""

from __future__ import annotations

import json
import os
from pathlib import Path

from pcr_core.errors import ConfigError, StoreError
from pcr_core.index.chunk import FORMAT_VERSION

FORMAT_FILE = "format.json"
INDEX_FOLDER = "index"
CHUNK_FOLDER = "chunks"
SIBLINGS = frozenset({"models"})
"""Entries that may be there before the store is: converted models share the folder."""


def prepare_folder(folder: Path) -> None:
    """Make sure ``folder`` is a cache folder of this version, creating it if needed.

    A folder that is refused is left exactly as it was.

    Raises:
        ConfigError: If it cannot be created, read or written, or is a file.
        StoreError: If another version wrote it, or it holds something else.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = {entry.name for entry in os.scandir(folder)}
        if FORMAT_FILE in names:
            _check_format(folder / FORMAT_FILE)
        else:
            _check_unclaimed(folder, names)
        _check_access(folder)
        if FORMAT_FILE not in names:
            _write_format(folder)
        (folder / CHUNK_FOLDER).mkdir(exist_ok=True)
        (folder / INDEX_FOLDER).mkdir(exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError(
            f"cache_dir {folder} is not a folder; name a folder, or a path that does "
            "not exist yet"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"cache_dir {folder} cannot be used ({error.strerror}); choose a folder on "
            "a local disk that you may read and write, or set ssd_bytes=0 to do "
            "without the SSD tier"
        ) from error


def _check_format(path: Path) -> None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["format"]
    except (ValueError, KeyError, TypeError):
        found = None
    if found != FORMAT_VERSION:
        known = "an unreadable format" if found is None else f"format {found!r}"
        raise StoreError(
            f"cache_dir {path.parent} has {known}, this version of pcr-rag reads "
            f"format {FORMAT_VERSION}; nothing was changed. Use another cache_dir, or "
            "delete the folder if its contents are no longer needed"
        )


def _check_unclaimed(folder: Path, names: set[str]) -> None:
    foreign = sorted(n for n in names - SIBLINGS if not n.startswith("."))
    if foreign:
        raise StoreError(
            f"cache_dir {folder} holds other files ({', '.join(foreign[:3])}) and no "
            f"{FORMAT_FILE}; nothing was changed. Use an empty or new folder"
        )


def _check_access(folder: Path) -> None:
    """Try it: permission bits alone do not tell about read-only mounts and quotas."""
    probe = folder / f".probe.{os.getpid()}"
    fd = os.open(probe, os.O_WRONLY | os.O_CREAT, 0o600)
    os.close(fd)
    os.unlink(probe)


def _write_format(folder: Path) -> None:
    temporary = folder / f".{FORMAT_FILE}.{os.getpid()}"
    text = json.dumps({"format": FORMAT_VERSION})
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, folder / FORMAT_FILE)
