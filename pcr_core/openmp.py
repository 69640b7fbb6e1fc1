"""OpenMP's teams of threads, of which there should be one.

libgomp keeps a team for every thread that ever ran a parallel region, and once there
are more of their threads than cores, every barrier sleeps instead of spinning: a small
model's forward then takes 1.7 times as long, whoever runs it (ADR 33). That is the
usual state of a program that embeds questions on one thread and runs a model on
another. So a thread that hands work to the engine gives up its team first; it gets a
new one when it needs it, within milliseconds, and computes the same bits.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable
from pathlib import Path

import torch

_SOFT = 1  # ``omp_pause_soft``: settings such as the number of threads stay
_OTHER_RUNTIMES = "kmp_set_blocktime"  # Intel's and LLVM's have it, and no such limit

Pause = Callable[[int], int]


def _scopes() -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """Where this process looks symbols up, and where torch does.

    Other packages bring copies of libgomp with teams of their own, so torch's are
    looked up from its library on. A runtime that was preloaded is in its place.
    """
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    return ctypes.CDLL(None), ctypes.CDLL(str(library))


def is_found_by_others() -> bool:
    """Whether code that is linked to no OpenMP runtime finds libgomp as torch does."""
    try:
        found = {
            ctypes.cast(scope.GOMP_parallel, ctypes.c_void_p).value
            for scope in _scopes()
        }
    except (OSError, AttributeError):  # another system, or another runtime
        return False
    return len(found) == 1


@functools.cache
def _pause() -> Pause | None:
    """What ends a team in the libgomp that torch uses; ``None`` if it uses another."""
    try:
        everywhere, symbols = _scopes()
        function = symbols.omp_pause_resource_all
    except (OSError, AttributeError):  # another system, or older than OpenMP 5.0
        return None
    if any(hasattr(scope, _OTHER_RUNTIMES) for scope in (everywhere, symbols)):
        return None
    function.argtypes, function.restype = (ctypes.c_int,), ctypes.c_int
    found: Pause = function
    return found


def _is_forked() -> bool:
    """Whether this process began as a copy of its parent, by ``fork`` without exec."""
    try:
        mine, parents = (
            Path(f"/proc/{pid}/cmdline").read_bytes()
            for pid in (os.getpid(), os.getppid())
        )
    except OSError:
        return False
    return mine == parents


_inherits = threading.get_ident() if _is_forked() else None
"""The thread that may have a team whose threads were not copied with it: libgomp would
wait for them forever. Later forks are made without one."""


def release_team() -> bool:
    """End the calling thread's team, if it has one. Any thread.

    Takes less than a microsecond without a team, and up to 7 ms with one.

    Returns:
        Whether it has none now; False inside a parallel region, where torch does not
        run on libgomp, and on the first thread of a process that was forked before
        this module was imported.
    """
    pause = _pause()
    if pause is None or threading.get_ident() == _inherits:
        return False
    return pause(_SOFT) == 0


os.register_at_fork(before=release_team)
