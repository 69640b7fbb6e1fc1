"""Hints to the kernel about memory that will be, or is no longer, needed."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

_MADV_PAGEOUT = 21  # Linux 5.4
_MADV_POPULATE_WRITE = 23  # Linux 5.14; older kernels answer EINVAL
_PAGE = 4096

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


def _advise(address: int, size: int, advice: int) -> bool:
    madvise = _madvise()
    if madvise is None:
        return False
    first = address // _PAGE * _PAGE
    length = ctypes.c_size_t(address + size - first)
    return madvise(ctypes.c_void_p(first), length, advice) == 0
