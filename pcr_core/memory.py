"""Memory of the machine: how much is left, and hints to the kernel about its use."""

from __future__ import annotations

import ctypes
import functools
import gc
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

_MADV_PAGEOUT = 21  # Linux 5.4
_MADV_POPULATE_WRITE = 23  # Linux 5.14; older kernels answer EINVAL
_MADV_COLLAPSE = 25  # Linux 6.1
_PAGE = 4096
_FULL = 0.5  # of a huge page must be known to be in use
_JOINING_SECONDS = 3.0

Madvise = Callable[[ctypes.c_void_p, ctypes.c_size_t, int], int]


@functools.cache
def _madvise() -> Madvise | None:
    try:
        function = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    function.restype = ctypes.c_int
    found: Madvise = function
    return found


def populate(address: int, size: int) -> bool:
    """Back ``size`` bytes at ``address`` with pages, leaving their contents alone.

    Where the system cannot do it, the first write pays as usual.

    Returns:
        Whether the system did it.
    """
    return _advise(address, size, _MADV_POPULATE_WRITE)


def page_out(address: int, size: int) -> bool:
    """Let the kernel reclaim pages that will not be read soon; their contents stay.

    For weights that are mapped from a file and have been copied: otherwise both the
    file's pages and the copy count as this process's memory.

    Returns:
        Whether the system took the hint.
    """
    return _advise(address, size, _MADV_PAGEOUT)


def join_pages(pieces: Iterable[tuple[int, int]], root: Path = Path("/")) -> int:
    """Have the kernel put memory that is read again and again into huge pages.

    A decode step reads all weights once, and spends an eighth of its products' time on
    looking up pages of 4 KiB. Contents and addresses stay. Huge pages of which less
    than half is known are left alone: the rest may be free, and would be taken again.
    So are all where the system's administrator wants none.

    Args:
        pieces: Address and size in bytes of each; all written before.
        root: Where ``sys`` is; another one in tests.

    Returns:
        Bytes in huge pages now; 0 where the system cannot do it. Of very much memory
        only a part is done, for a start not to take long.
    """
    settings = root / "sys/kernel/mm/transparent_hugepage"
    size = _number(settings / "hpage_pmd_size")
    try:
        unwanted = "[never]" in (settings / "enabled").read_text()
    except OSError:
        unwanted = True
    if unwanted or not size:
        return 0
    covered: dict[int, int] = {}
    for address, length in pieces:
        at, stop = address, address + length
        while at < stop:
            page, upto = at // size, min(stop, (at // size + 1) * size)
            covered[page] = covered.get(page, 0) + upto - at
            at = upto
    until, joined = time.monotonic() + _JOINING_SECONDS, 0
    for page in sorted(page for page, used in covered.items() if used >= _FULL * size):
        if time.monotonic() > until:
            break
        joined += size * _advise(page * size, size, _MADV_COLLAPSE)
    return joined


def trim() -> bool:
    """Give memory that was freed back to the system, where the C library keeps it.

    After a model has been loaded and prepared: glibc holds on to what was freed between
    blocks in use, of weights half as much as the model itself.

    Returns:
        Whether this C library can do it.
    """
    try:
        function = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):  # not glibc
        return False
    function(ctypes.c_size_t(0))
    return True


def _advise(address: int, size: int, advice: int) -> bool:
    madvise = _madvise()
    if madvise is None:
        return False
    first = address // _PAGE * _PAGE
    length = ctypes.c_size_t(address + size - first)
    return madvise(ctypes.c_void_p(first), length, advice) == 0


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keep Python's cycle collector from running meanwhile.

    For making very many objects that stay: the collector would look at all of them,
    and at everything else in the process, again and again. Of the whole process; other
    threads do not mind.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def available_bytes(root: Path = Path("/")) -> int:
    """Memory this process could still take, in bytes.

    The least of what the kernel says is available and what the control group (v2 or v1)
    and those above it leave: in a container the limit, not the host, decides.

    Args:
        root: Where ``proc`` and ``sys`` are; another one in tests.
    """
    found = [_meminfo(root)]
    for group in _control_groups(root):
        limit = _number(group / "memory.max", group / "memory.limit_in_bytes")
        used = _number(group / "memory.current", group / "memory.usage_in_bytes")
        if limit is not None:
            # The page cache counts as used, but goes when memory is asked for.
            cached = _statistic(group / "memory.stat", "inactive_file") or 0
            found.append(max(0, limit - max(0, (used or 0) - cached)))
    return min(found)


def _meminfo(root: Path) -> int:
    kilobytes = _statistic(root / "proc/meminfo", "MemAvailable:")
    return 2**30 if kilobytes is None else kilobytes * 1024


def _control_groups(root: Path) -> list[Path]:
    """The memory control groups this process is in, innermost first."""
    groups = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        inner = mount / name.lstrip("/")
        # In a container the path may be the host's; its own root then has the limit.
        groups += [p for p in (inner, *inner.parents) if p.is_relative_to(mount)]
    return groups


def _number(*paths: Path) -> int | None:
    for path in paths:
        try:
            return int(path.read_text())
        except (OSError, ValueError):
            continue  # not there, or "max"
    return None


def _statistic(path: Path, name: str) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        fields = line.split()
        if len(fields) > 1 and fields[0] == name:
            return int(fields[1])
    return None
