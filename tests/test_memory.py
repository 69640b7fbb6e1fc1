"""Hints to the kernel change how memory is backed, never what is in it."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from pcr_core import memory

SIZE = 64 * mmap.PAGESIZE


def resident(address: int, size: int) -> int:
    """Bytes of ``[address, address + size)`` that this process has in memory."""
    found = 0
    entry = 8
    with Path("/proc/self/pagemap").open("rb") as pages:
        pages.seek(address // mmap.PAGESIZE * entry)
        for _ in range(size // mmap.PAGESIZE):
            bits = int.from_bytes(pages.read(entry), "little")
            found += mmap.PAGESIZE if bits >> 63 else 0
    return found


@pytest.fixture
def fresh() -> np.ndarray:
    return np.frombuffer(mmap.mmap(-1, SIZE), dtype=np.uint8)


def test_populate_backs_memory_before_it_is_written(fresh: np.ndarray) -> None:
    address = fresh.ctypes.data
    assert resident(address, SIZE) == 0
    if not memory.populate(address, SIZE):
        pytest.skip("this kernel has no MADV_POPULATE_WRITE")
    assert resident(address, SIZE) == SIZE
    assert not fresh.any()


def test_populate_keeps_contents(fresh: np.ndarray) -> None:
    fresh[:] = 7
    memory.populate(fresh.ctypes.data + 100, SIZE - 200)  # not page-aligned
    assert (fresh == 7).all()


def test_page_out_drops_clean_file_pages_and_keeps_contents(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(256)) * (SIZE // 256))
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), SIZE, access=mmap.ACCESS_READ)
    view = np.frombuffer(mapped, dtype=np.uint8)
    before = view.copy()
    assert resident(view.ctypes.data, SIZE) == SIZE
    memory.page_out(view.ctypes.data, SIZE)  # a hint: the kernel may keep some
    assert np.array_equal(view, before)


def test_a_refused_hint_says_so() -> None:
    assert memory.populate(mmap.PAGESIZE, SIZE) is False  # nothing is mapped there
