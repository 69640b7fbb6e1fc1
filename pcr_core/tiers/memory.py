"""Asking the kernel for memory before it is needed."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

_MADV_POPULATE_WRITE = 23  # Linux 5.14; older kernels answer EINVAL
_PAGE = 4096


@functools.cache
def _madvise() -> Callable[[ctypes.c_void_p, ctypes.c_size_t, int], int] | None:
    try:
        function = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    function.restype = ctypes.c_int
    found: Callable[[ctypes.c_void_p, ctypes.c_size_t, int], int] = function
    return found


def populate(address: int, size: int) -> bool:
    """Back ``size`` bytes at ``address`` with pages, leaving their contents alone.

    Only a hint: where the system cannot do it, the first write pays as usual.

    Returns:
        Whether the system did it.
    """
    madvise = _madvise()
    if madvise is None:
        return False
    first = address // _PAGE * _PAGE
    length = address + size - first
    return (
        madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), _MADV_POPULATE_WRITE)
        == 0
    )
