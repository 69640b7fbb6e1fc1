"""Hints to the kernel change how memory is backed, never what is in it."""

from __future__ import annotations

import ctypes
import gc
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


# --- how much is left ---


def machine(root: Path, *, available: int, groups: str, files: dict[str, str]) -> Path:
    """A file system root with just the files that say how much memory there is."""
    everything = {
        "proc/meminfo": f"MemTotal: 9 kB\nMemAvailable: {available // 1024} kB\n",
        "proc/self/cgroup": groups,
        **files,
    }
    for name, text in everything.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


GIB = 2**30


def test_without_a_limit_it_is_what_the_kernel_says(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/memory.max": "max\n"}
    root = machine(tmp_path, available=5 * GIB, groups="0::/\n", files=files)
    assert memory.available_bytes(root) == 5 * GIB


@pytest.mark.parametrize("where", ["", "service/", "service/job/"])
def test_a_limit_of_any_group_above_counts(tmp_path: Path, where: str) -> None:
    files = {
        f"sys/fs/cgroup/{where}memory.max": f"{3 * GIB}\n",
        f"sys/fs/cgroup/{where}memory.current": f"{2 * GIB}\n",
        f"sys/fs/cgroup/{where}memory.stat": f"anon 1\ninactive_file {GIB // 2}\n",
    }
    root = machine(tmp_path, available=9 * GIB, groups="0::/service/job\n", files=files)
    assert memory.available_bytes(root) == 3 * GIB - 2 * GIB + GIB // 2


def test_limits_of_version_1(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/memory/jobs/memory.limit_in_bytes": f"{2 * GIB}\n",
        "sys/fs/cgroup/memory/jobs/memory.usage_in_bytes": f"{GIB}\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    }
    groups = "9:name=systemd:/\n4:memory:/jobs\n3:cpuset:/\n0::/\n"
    root = machine(tmp_path, available=9 * GIB, groups=groups, files=files)
    assert memory.available_bytes(root) == GIB


def test_a_container_that_sees_the_hosts_path_finds_its_own_limit(
    tmp_path: Path,
) -> None:
    files = {"sys/fs/cgroup/memory.max": f"{GIB}\n"}
    groups = "0::/kubepods/pod1/abc\n"
    root = machine(tmp_path, available=9 * GIB, groups=groups, files=files)
    assert memory.available_bytes(root) == GIB


def test_a_group_that_is_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/memory.max": f"{GIB}\n",
        "sys/fs/cgroup/memory.current": f"{2 * GIB}\n",
    }
    root = machine(tmp_path, available=9 * GIB, groups="0::/\n", files=files)
    assert memory.available_bytes(root) == 0


def test_this_machine_has_some() -> None:
    assert memory.available_bytes() > 2**20


# --- the collector ---


def test_the_collector_is_paused_and_put_back() -> None:
    assert gc.isenabled()
    paused = memory.collector_paused()
    with paused:
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), memory.collector_paused():
        _ = 1 / 0
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    try:
        with memory.collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def anonymous() -> int:
    """Bytes of this process's memory that no file backs."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(x.split()[1]) * 1024 for x in lines if x.startswith("RssAnon"))


def test_freed_memory_is_given_back() -> None:
    """What is left in use behind it keeps the C library from doing it by itself."""
    if not memory.trim():
        pytest.skip("this C library keeps what was freed")
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    block, count = 2**16, 500
    blocks = [libc.malloc(ctypes.c_size_t(block)) for _ in range(count)]
    for address in blocks:
        ctypes.memset(address, 1, block)
    for address in blocks[:-1]:
        libc.free(ctypes.c_void_p(address))
    before = anonymous()
    assert memory.trim()
    assert before - anonymous() > block * count // 2
    libc.free(ctypes.c_void_p(blocks[-1]))


def test_another_c_library_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert memory.trim() is False


# --- huge pages ---

HUGE = 2 * 2**20


def _with_huge_pages(root: Path, size: int = HUGE) -> Path:
    folder = root / "sys/kernel/mm/transparent_hugepage"
    folder.mkdir(parents=True)
    (folder / "hpage_pmd_size").write_text(f"{size}\n")
    (folder / "enabled").write_text("always [madvise] never\n")
    return root


def _advised(monkeypatch: pytest.MonkeyPatch, answer: bool = True) -> list[int]:
    """Collects the pages, by number, for which advice is given."""
    pages: list[int] = []

    def advise(address: int, size: int, advice: int) -> bool:
        assert (address % HUGE, size, advice) == (0, HUGE, 25)
        pages.append(address // HUGE)
        return answer

    monkeypatch.setattr(memory, "_advise", advise)
    return pages


def test_pages_that_are_mostly_known_are_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces may be smaller than a page, and lie across a border."""
    root, pages = _with_huge_pages(tmp_path), _advised(monkeypatch)
    pieces = [
        (10 * HUGE, HUGE),  # all of 10
        (12 * HUGE - 100, HUGE + 100),  # a little of 11, all of 12
        (20 * HUGE + 4096, HUGE // 3),  # together more than half of 20
        (20 * HUGE + HUGE // 2, HUGE // 3),
        (30 * HUGE, HUGE // 3),  # too little of 30
        (40 * HUGE + HUGE // 2 + 1, HUGE),  # less than half of 40, more of 41
    ]
    assert memory.join_pages(pieces, root) == 4 * HUGE
    assert pages == [10, 12, 20, 41]


def test_what_the_kernel_refuses_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, pages = _with_huge_pages(tmp_path), _advised(monkeypatch, answer=False)
    assert memory.join_pages([(0, 3 * HUGE)], root) == 0
    assert pages == [0, 1, 2]


def test_a_start_does_not_take_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, pages = _with_huge_pages(tmp_path), _advised(monkeypatch)
    ticks = iter(range(100))
    monkeypatch.setattr(memory.time, "monotonic", lambda: next(ticks))
    assert memory.join_pages([(0, 50 * HUGE)], root) == len(pages) * HUGE
    assert len(pages) == memory._JOINING_SECONDS


def test_without_huge_pages_nothing_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = _advised(monkeypatch)
    assert memory.join_pages([(0, 50 * HUGE)], tmp_path) == 0
    root = _with_huge_pages(tmp_path)
    enabled = root / "sys/kernel/mm/transparent_hugepage/enabled"
    enabled.write_text("always madvise [never]\n")
    assert memory.join_pages([(0, 50 * HUGE)], root) == 0, "nobody wants them"
    assert pages == []


def test_contents_stay_where_they_are() -> None:
    """On this machine's kernel, whatever it does."""
    noise = np.random.default_rng(0).integers(0, 255, 4 * HUGE, dtype=np.uint8)
    address, before = noise.ctypes.data, noise.tobytes()
    assert memory.join_pages([(address, noise.nbytes)]) % HUGE == 0
    assert noise.ctypes.data == address
    assert noise.tobytes() == before
