"""Chunk files: an ordinary safetensors file in which no wrong byte goes unnoticed."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace

import pytest
import safetensors
import torch

from pcr_core.index.chunk import ChunkKey, Namespace
from pcr_core.tiers import HostPool, SlabPlan
from pcr_core.tiers.store.chunk_file import (
    ChunkFormat,
    ReadOutcome,
    chunk_path,
    read_chunk,
    write_chunk,
)
from pcr_core.tiers.store.files import Files


@pytest.fixture
def stored(kit, tmp_path):
    """A chunk on disk: its identity, its digest, its path."""
    chunk = kit.chunk_id(kit.prompt(1, 2), 1)
    data = memoryview(kit.content(chunk.key))
    digest = write_chunk(Files(), tmp_path, kit.format, chunk, data)
    return chunk, digest, chunk_path(tmp_path, chunk.key)


def read(kit, stored, *, files=None, **changes):
    chunk, digest, path = stored
    into = memoryview(bytearray(kit.layout.nbytes))
    chunk = replace(chunk, **changes)
    outcome = read_chunk(files or Files(), path, kit.format, chunk, digest, into)
    return outcome, bytes(into)


def test_round_trip(kit, stored):
    assert read(kit, stored) == (ReadOutcome.OK, kit.content(stored[0].key))
    assert stored[2].stat().st_size == kit.file_nbytes
    assert kit.file_nbytes - kit.layout.nbytes == 4096
    assert [path.name for path in stored[2].parent.iterdir()] == [stored[2].name]


def test_it_is_an_ordinary_safetensors_file(kit, tmp_path):
    pool = HostPool(kit.layout, SlabPlan(1, kit.layout.nbytes))
    slot = pool.allocate()
    for index in range(2):
        for tensor in slot.layer(index):
            tensor.copy_(torch.randn(tensor.shape))
    chunk = kit.chunk_id(kit.prompt(1, 2), 1)
    write_chunk(Files(), tmp_path, kit.format, chunk, slot.view)
    with safetensors.safe_open(chunk_path(tmp_path, chunk.key), "pt") as opened:
        assert set(opened.keys()) == {
            "layers.0.k",
            "layers.0.v",
            "layers.1.k",
            "layers.1.v",
        }
        for index in range(2):
            for name, tensor in zip("kv", slot.layer(index), strict=True):
                assert torch.equal(opened.get_tensor(f"layers.{index}.{name}"), tensor)
        metadata = opened.metadata()
    assert metadata["key"] == chunk.key.hex()
    assert metadata["parent"] == chunk.parent.hex()
    assert metadata["namespace"] == kit.namespace.root.hex()
    assert bytes.fromhex(metadata["tokens_u32le"]) == b"\x02\x00\x00\x00" * 4


def test_the_header_has_the_same_size_whatever_it_says(kit):
    sums = [b"\xff" * 16] * 2
    big = kit.chunk_id([2**32 - 1] * 4, 0)
    header = kit.format.header(big, sums)
    assert len(header) == kit.format.header_nbytes
    length = int.from_bytes(header[:8], "little")
    assert 8 + length == len(header)
    assert json.loads(header[8:])["__metadata__"]["pcr_format"] == "2"


def test_every_flipped_byte_is_detected(kit, stored):
    path = stored[2]
    good = path.read_bytes()
    missed = []
    with open(path, "r+b", buffering=0) as file:
        for position, byte in enumerate(good):
            os.pwrite(file.fileno(), bytes([byte ^ (1 << position % 8)]), position)
            if read(kit, stored)[0] is not ReadOutcome.CORRUPT:
                missed.append(position)
            os.pwrite(file.fileno(), bytes([byte]), position)
    assert missed == []
    assert read(kit, stored)[0] is ReadOutcome.OK


def test_every_truncation_is_detected(kit, stored):
    path = stored[2]
    missed = []
    for length in range(kit.file_nbytes - 1, -1, -1):
        os.truncate(path, length)
        if read(kit, stored)[0] is not ReadOutcome.CORRUPT:
            missed.append(length)
    assert missed == []


def test_a_longer_file_is_detected(kit, stored):
    with open(stored[2], "ab") as file:
        file.write(b"\x00")
    assert read(kit, stored)[0] is ReadOutcome.CORRUPT


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": [2, 2, 2, 3]},
        {"key": ChunkKey(bytes(32))},
        {"parent": bytes(32)},
    ],
)
def test_a_good_file_of_another_chunk_is_refused(kit, stored, changes):
    assert read(kit, stored, **changes)[0] is ReadOutcome.CORRUPT


def test_a_good_file_of_another_namespace_or_record_is_refused(kit, stored):
    chunk, digest, path = stored
    other = ChunkFormat(kit.layout, Namespace.of([("other", b"")]))
    into = memoryview(bytearray(kit.layout.nbytes))
    outcome = read_chunk(Files(), path, other, chunk, digest, into)
    assert outcome is ReadOutcome.CORRUPT
    outcome = read_chunk(Files(), path, kit.format, chunk, bytes(16), into)
    assert outcome is ReadOutcome.CORRUPT


def test_missing_file_or_folder_is_an_outcome(kit, stored):
    stored[2].unlink()
    assert read(kit, stored)[0] is ReadOutcome.MISSING
    stored[2].parent.rmdir()
    assert read(kit, stored)[0] is ReadOutcome.MISSING


@pytest.mark.parametrize("call", ["open_read", "preadv"])
@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.EMFILE])
def test_refused_reads_are_an_outcome(kit, stored, call, code):
    files = kit.FaultyFiles()
    files.broken[call] = code
    assert read(kit, stored, files=files)[0] is ReadOutcome.FAILED


class Stingy(Files):
    """Moves at most 7 bytes per call, as an interrupted system call may."""

    def preadv(self, fd, buffers, at):
        return super().preadv(fd, [buffers[0][:7]], at)

    def writev(self, fd, buffers):
        return super().writev(fd, [buffers[0][:7]])


def test_short_reads_and_writes_are_continued(kit, tmp_path):
    chunk = kit.chunk_id(kit.prompt(1), 0)
    data = memoryview(kit.content(chunk.key))
    digest = write_chunk(Stingy(), tmp_path, kit.format, chunk, data)
    stored = chunk, digest, chunk_path(tmp_path, chunk.key)
    assert read(kit, stored, files=Stingy()) == (ReadOutcome.OK, bytes(data))


def test_a_whole_chunk_is_one_read_and_one_write(kit, tmp_path):
    files = kit.FaultyFiles()
    chunk = kit.chunk_id(kit.prompt(1), 0)
    data = memoryview(kit.content(chunk.key))
    digest = write_chunk(files, tmp_path, kit.format, chunk, data)
    stored = chunk, digest, chunk_path(tmp_path, chunk.key)
    read(kit, stored, files=files)
    # The second read sees the end of the file.
    assert (files.calls["writev"], files.calls["preadv"]) == (1, 2)


@pytest.mark.parametrize("call", ["open_new", "writev", "fsync", "replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_failed_write_leaves_no_trace(kit, tmp_path, call, code):
    files = kit.FaultyFiles()
    files.broken[call] = code
    chunk = kit.chunk_id(kit.prompt(1), 0)
    data = memoryview(kit.content(chunk.key))
    folder = tmp_path / "chunks"
    folder.mkdir()
    with pytest.raises(OSError, match=os.strerror(code)):
        write_chunk(files, folder, kit.format, chunk, data)
    assert list(folder.iterdir()) == []


def test_a_rewrite_replaces_the_file_at_once(kit, stored, tmp_path):
    chunk, _, path = stored
    data = memoryview(bytes(kit.layout.nbytes))
    digest = write_chunk(Files(), tmp_path, kit.format, chunk, data)
    assert read(kit, (chunk, digest, path)) == (ReadOutcome.OK, bytes(data))
