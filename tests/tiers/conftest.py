"""A tiny world for the tiers: layout, bytes per key, files that fail on demand."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from pcr_core.index.chunk import (
    ChunkKey,
    ChunkLayout,
    LayerShape,
    Namespace,
    chunk_keys,
)
from pcr_core.tiers import (
    ChunkStore,
    HostPool,
    InlineIo,
    NoStore,
    SlabPlan,
    TierManager,
    TierSettings,
)
from pcr_core.tiers.store.chunk_file import ChunkFormat, ChunkId
from pcr_core.tiers.store.files import Files
from pcr_core.tiers.store.no_store import Store

LAYOUT = ChunkLayout((LayerShape(1, 4, 2), LayerShape(2, 2, 4)), 4, "F32", 4)
NAMESPACE = Namespace.of([("test", b"tiny")])
FORMAT = ChunkFormat(LAYOUT, NAMESPACE)
FILE_BYTES = FORMAT.file_nbytes


def content(key: ChunkKey) -> bytes:
    """The bytes that a chunk of this key must have, whoever stored it."""
    return hashlib.shake_256(key).digest(LAYOUT.nbytes)


def keys_of(tokens: Sequence[int]) -> list[ChunkKey]:
    return chunk_keys(NAMESPACE, tokens, LAYOUT.chunk_tokens)


def prompt(*chunks: int) -> list[int]:
    """A prompt whose chunks are named by small numbers."""
    return [number for number in chunks for _ in range(LAYOUT.chunk_tokens)]


def chunk_id(tokens: Sequence[int], index: int) -> ChunkId:
    keys = keys_of(tokens)
    parent = keys[index - 1] if index else NAMESPACE.root
    span = tokens[index * LAYOUT.chunk_tokens : (index + 1) * LAYOUT.chunk_tokens]
    return ChunkId(keys[index], parent, list(span))


class FaultyFiles(Files):
    """Fails the calls named in ``broken`` with that errno; counts all calls."""

    def __init__(self) -> None:
        self.broken: dict[str, int] = {}
        self.calls: Counter[str] = Counter()

    def _call(self, name: str) -> None:
        self.calls[name] += 1
        code = self.broken.get(name)
        if code is not None:
            raise OSError(code, os.strerror(code))

    def open_read(self, path: Path) -> int:
        self._call("open_read")
        return super().open_read(path)

    def open_new(self, path: Path) -> int:
        self._call("open_new")
        return super().open_new(path)

    def preadv(self, fd, buffers, at) -> int:
        self._call("preadv")
        return super().preadv(fd, buffers, at)

    def writev(self, fd, buffers) -> int:
        if self.broken.get("writev") == errno.ENOSPC:
            # A disk that fills up takes a part first.
            os.write(fd, bytes(buffers[0])[:100])
        self._call("writev")
        return super().writev(fd, buffers)

    def fsync(self, fd: int) -> None:
        self._call("fsync")
        super().fsync(fd)

    def fsync_folder(self, path: Path) -> None:
        self._call("fsync_folder")
        super().fsync_folder(path)

    def replace(self, source: Path, target: Path) -> None:
        self._call("replace")
        super().replace(source, target)

    def unlink(self, path: Path) -> None:
        self._call("unlink")
        super().unlink(path)


class Clock:
    """Ticks once per look."""

    def __init__(self, start: int = 1000) -> None:
        self.now = start

    def __call__(self) -> int:
        self.now += 1
        return self.now


class Served:
    """What one request found and left."""

    def __init__(self, tiers: dict[int, str], sinks: list[int]) -> None:
        self.tiers = tiers
        self.sinks = sinks


def serve(
    manager: TierManager,
    tokens: Sequence[int],
    *,
    usable: int | None = None,
    fail: bool = False,
) -> Served:
    """Do what the engine does, checking every byte that is lent for reading."""
    keys = keys_of(tokens)
    if usable is None:
        usable = min(len(keys), (len(tokens) - 1) // LAYOUT.chunk_tokens)
    try:
        with manager.lease(keys, tokens, usable) as lease:
            lease.wait()
            for index, slot in lease.sources.items():
                assert bytes(slot.view) == content(keys[index]), f"chunk {index}"
            tiers, sinks = dict(lease.tiers), sorted(lease.sinks)
            for index, slot in lease.sinks.items():
                slot.view[:] = content(keys[index])
                lease.filled(index)
                if fail:
                    raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert fail
    manager.poll()
    return Served(tiers, sinks)


def chunk_files(folder: Path) -> list[Path]:
    return sorted((folder / "chunks").iterdir())


def file_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in chunk_files(folder))


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[SimpleNamespace]:
    """Everything above, plus ``manager(...)`` that closes what it made."""
    with open_kit(tmp_path) as opened:
        yield opened


@contextmanager
def open_kit(tmp_path: Path) -> Iterator[SimpleNamespace]:
    """The same for a test that needs several, such as a property test."""
    made: list[TierManager] = []

    def manager(
        *,
        slots: int = 8,
        ssd_chunks: int = 8,
        folder: Path | None = None,
        files: Files | None = None,
        io=InlineIo,
        clock: Clock | None = None,
        namespace: Namespace = NAMESPACE,
        store: Store | None = None,
        timer: Callable[[], float] = time.monotonic,
        **settings,
    ) -> TierManager:
        pool = HostPool(LAYOUT, SlabPlan(slots, LAYOUT.nbytes))
        if store is None and ssd_chunks:
            store = ChunkStore(
                folder or tmp_path / "cache",
                ssd_chunks * FILE_BYTES,
                tenant=settings.get("tenant", b""),
                quota_bytes=settings.get("quota_bytes"),
                files=files,
                least_read=1,
            )
        store = store or NoStore()
        made.append(
            TierManager(
                LAYOUT,
                namespace,
                pool,
                store,
                io(store),
                TierSettings(**settings),
                clock=clock or Clock(),
                timer=timer,
            )
        )
        return made[-1]

    yield SimpleNamespace(
        Clock=Clock,
        FaultyFiles=FaultyFiles,
        chunk_files=chunk_files,
        chunk_id=chunk_id,
        content=content,
        file_bytes=file_bytes,
        file_nbytes=FILE_BYTES,
        folder=tmp_path / "cache",
        format=FORMAT,
        keys_of=keys_of,
        layout=LAYOUT,
        manager=manager,
        namespace=NAMESPACE,
        prompt=prompt,
        serve=serve,
    )
    for one in made:
        one.close()


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Every thread that a test starts has ended, every descriptor is closed."""
    threads, descriptors = set(threading.enumerate()), _descriptors()
    yield
    assert set(threading.enumerate()) <= threads
    left = _descriptors() - descriptors
    assert not {name for name in left if "cache" in name}, left


def _descriptors() -> set[str]:
    names = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            names.add(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            continue
    return names
