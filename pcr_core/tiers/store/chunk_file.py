"""One chunk on disk: an ordinary ``.safetensors`` file, written and read in place.

The data section of the file, a DRAM slot and a read buffer are the same bytes, so a
chunk is one ``writev`` and one ``preadv`` and is never copied or parsed. The header
has a fixed size for a given layout and is a pure function of the chunk's identity and
of the checksums of its bytes. A reader therefore does not parse it: it computes the
checksums of what it read, builds the header that must belong to them, and compares.
(``layer_reads`` reads the same files layer by layer.)
"""

from __future__ import annotations

import enum
import json
import os
import struct
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import xxhash

from pcr_core.index.chunk import (
    FORMAT_VERSION,
    ChunkKey,
    ChunkLayout,
    Namespace,
    token_bytes,
)
from pcr_core.tiers.store.files import Buffer, Files

SUFFIX = ".safetensors"
TEMPORARY = ".tmp"
ALIGNMENT = 4096
"""The data section starts on a page, so that direct I/O and mmap stay possible."""


_SUMS = b'"layers_xxh3_128":"'
_LONGEST_HEADER = 64 * 2**20


class ReadOutcome(enum.Enum):
    """What became of a read. Only ``OK`` leaves a whole chunk in the buffer."""

    OK = "ok"
    MISSING = "missing"
    CORRUPT = "corrupt"
    FAILED = "failed"
    DROPPED = "dropped"


class StrayFileError(OSError):
    """A write failed, and what it left in the folder cannot be removed now."""


@dataclass(frozen=True, slots=True)
class ChunkId:
    """What a chunk file says about itself, beside its bytes.

    Attributes:
        key: Its key.
        parent: Key of the chunk before it, or the namespace's digest.
        tokens: Its token ids.
    """

    key: ChunkKey
    parent: bytes
    tokens: Sequence[int]


class ChunkFormat:
    """Header and checksums for one layout under one namespace. Immutable; any thread.

    Args:
        layout: Shapes and element type of a chunk.
        namespace: Written into every header.
    """

    def __init__(self, layout: ChunkLayout, namespace: Namespace) -> None:
        self.layout = layout
        self.namespace = namespace
        self._tensors = _tensor_entries(layout)
        zero = ChunkId(ChunkKey(bytes(32)), bytes(32), [0] * layout.chunk_tokens)
        text = self._json(zero, [bytes(16)] * len(layout.layers))
        self.header_nbytes = -(-(8 + len(text)) // ALIGNMENT) * ALIGNMENT

    @property
    def file_nbytes(self) -> int:
        """Size of every chunk file of this layout, in bytes."""
        return self.header_nbytes + self.layout.nbytes

    def chunk(
        self, keys: Sequence[ChunkKey], tokens: Sequence[int], index: int
    ) -> ChunkId:
        """Identity of chunk ``index`` of a prompt.

        Args:
            keys: Keys of its chunks, root first.
            tokens: The whole prompt.
            index: Which chunk.
        """
        size = self.layout.chunk_tokens
        parent = keys[index - 1] if index else self.namespace.root
        return ChunkId(keys[index], parent, tokens[index * size : (index + 1) * size])

    def checksums(self, data: Buffer) -> list[bytes]:
        """xxh3-128 of each layer's run, keys and values together."""
        view = memoryview(data)
        offsets = self.layout.layer_offsets
        return [
            xxhash.xxh3_128_digest(view[start:end]) for start, end in pairwise(offsets)
        ]

    def stated_sums(self, header: Buffer) -> list[bytes]:
        """The checksums that a header states: to be checked with ``header``.

        Raises:
            ValueError: If that is no header of this format.
        """
        start = bytes(header).index(_SUMS) + len(_SUMS)
        text = header[start : start + 33 * len(self.layout.layers) - 1]
        return [bytes.fromhex(digest.decode()) for digest in bytes(text).split(b" ")]

    def header(self, chunk: ChunkId, sums: Sequence[bytes]) -> bytes:
        """The file's first ``header_nbytes`` bytes: length, JSON, spaces."""
        length = self.header_nbytes - 8
        return length.to_bytes(8, "little") + self._json(chunk, sums).ljust(length)

    def _json(self, chunk: ChunkId, sums: Sequence[bytes]) -> bytes:
        metadata = {
            "pcr_format": str(FORMAT_VERSION),
            "key": chunk.key.hex(),
            "parent": chunk.parent.hex(),
            "namespace": self.namespace.root.hex(),
            "tokens_u32le": token_bytes(chunk.tokens).hex(),
            "layers_xxh3_128": " ".join(digest.hex() for digest in sums),
        }
        text = json.dumps({"__metadata__": metadata}, separators=(",", ":"))
        return (text[:-1] + self._tensors + "}").encode()


def _tensor_entries(layout: ChunkLayout) -> str:
    entries = []
    for index, shape in enumerate(layout.layers):
        start = layout.layer_offsets[index]
        middle = start + layout.k_bytes(index)
        ends = ((start, middle), (middle, middle + layout.v_bytes(index)))
        dims = (shape.k_dim, shape.v_dim)
        for name, size, span in zip("kv", dims, ends, strict=True):
            entry = {
                "dtype": layout.dtype,
                "shape": [shape.kv_heads, layout.chunk_tokens, size],
                "data_offsets": list(span),
            }
            text = json.dumps(entry, separators=(",", ":"))
            entries.append(f',"layers.{index}.{name}":{text}')
    return "".join(entries)


def chunk_path(folder: Path, key: ChunkKey) -> Path:
    """Where the chunk's file is, or would be."""
    return folder / (key.hex() + SUFFIX)


def chunk_key(name: str) -> ChunkKey | None:
    """The chunk that a file of this name belongs to, or ``None`` for any other file."""
    if not name.endswith(SUFFIX):
        return None
    try:
        key = bytes.fromhex(name[: -len(SUFFIX)])
    except ValueError:
        return None
    return ChunkKey(key) if len(key) == 32 else None


def temporary_path(folder: Path, key: ChunkKey) -> Path:
    """A name nobody else writes to; carries the writer's pid for the next clean-up."""
    return folder / f"{key.hex()}.{os.getpid()}.{uuid.uuid4().hex}{TEMPORARY}"


def header_digest(header: Buffer) -> bytes:
    """Digest of a header, kept in the index record."""
    return xxhash.xxh3_128_digest(header)


def write_chunk(
    files: Files, folder: Path, fmt: ChunkFormat, chunk: ChunkId, data: memoryview
) -> bytes:
    """Write one chunk: temporary file, flush to the device, rename.

    A crash at any point leaves either no file of this name or a complete one.

    Args:
        files: System calls.
        folder: Where chunk files live.
        fmt: Layout and namespace.
        chunk: Key, parent and token ids.
        data: The chunk's bytes, ``fmt.layout.nbytes`` long; only read.

    Returns:
        The header's digest, for the index record.

    Raises:
        OSError: If the file could not be written; no trace of it is left.
        StrayFileError: If the trace could not be removed either.
    """
    header = fmt.header(chunk, fmt.checksums(data))
    temporary = temporary_path(folder, chunk.key)
    fd = files.open_new(temporary)
    try:
        try:
            _write_all(files, fd, header, data)
            files.fsync(fd)
        finally:
            files.close(fd)
        files.replace(temporary, chunk_path(folder, chunk.key))
    except OSError as error:
        if discard(files, temporary):
            raise
        raise StrayFileError(error.errno, error.strerror) from error
    return header_digest(header)


def read_chunk(
    files: Files,
    path: Path,
    fmt: ChunkFormat,
    chunk: ChunkId,
    digest: bytes,
    into: memoryview,
) -> ReadOutcome:
    """Read one chunk into a lent buffer and verify every byte of it.

    Never raises for the state of the file. Unless the outcome is ``OK`` the buffer
    holds garbage.

    Args:
        files: System calls.
        path: The file.
        fmt: Layout and namespace it must have.
        chunk: Key, parent and token ids it must have.
        digest: Digest its header must have, from the index record.
        into: Receives the data section; ``fmt.layout.nbytes`` long.
    """
    header = bytearray(fmt.header_nbytes)
    try:
        fd = files.open_read(path)
        try:
            beyond = memoryview(bytearray(1))
            count = read_all(files, fd, [memoryview(header), into, beyond], 0)
        finally:
            files.close(fd)
    except (FileNotFoundError, NotADirectoryError):
        return ReadOutcome.MISSING
    except OSError:
        return ReadOutcome.FAILED
    if count != fmt.file_nbytes or header_digest(header) != digest:
        return ReadOutcome.CORRUPT
    if header != fmt.header(chunk, fmt.checksums(into)):
        return ReadOutcome.CORRUPT
    return ReadOutcome.OK


def stored_tokens(path: Path) -> list[int]:
    """Token ids that a chunk file's header names; unverified, for people to read.

    Returns:
        Nothing if the file is gone or damaged.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, _LONGEST_HEADER)))
        packed = bytes.fromhex(header["__metadata__"]["tokens_u32le"])
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return list(struct.unpack(f"<{len(packed) // 4}I", packed))


def read_all(files: Files, fd: int, buffers: list[memoryview], at: int) -> int:
    """Read until the buffers are full or the file ends; one call unless interrupted.

    Args:
        files: System calls.
        fd: An open file.
        buffers: Where to.
        at: Offset in the file.

    Returns:
        Bytes read.
    """
    total = 0
    while buffers:
        count = files.preadv(fd, buffers, at + total)
        if count == 0:
            break
        total += count
        buffers = _skip(buffers, count)
    return total


def _write_all(files: Files, fd: int, header: bytes, data: memoryview) -> None:
    buffers = [memoryview(header), data]
    while buffers:
        buffers = _skip(buffers, files.writev(fd, buffers))


def _skip(buffers: list[memoryview], count: int) -> list[memoryview]:
    rest = []
    for buffer in buffers:
        used = min(count, len(buffer))
        count -= used
        if used < len(buffer):
            rest.append(buffer[used:])
    return rest


def discard(files: Files, path: Path) -> bool:
    """Remove a file that no record names; False if the system refuses."""
    try:
        files.unlink(path)
    except OSError:
        return False
    return True
