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
from collections.abc import Callable
from pathlib import Path

import torch

_SOFT = 1  # ``omp_pause_soft``: settings such as the number of threads stay
_OTHER_RUNTIMES = "kmp_set_blocktime"  # Intel's and LLVM's have it, and no such limit

Pause = Callable[[int], int]


@functools.cache
def _pause() -> Pause | None:
    """What ends a team in the libgomp that torch uses; ``None`` if it uses another.

    Other packages bring copies of libgomp with teams of their own, so the symbol is
    looked up from torch's library on.
    """
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        symbols = ctypes.CDLL(str(library))
        function = symbols.omp_pause_resource_all
    except (OSError, AttributeError):  # another system, or older than OpenMP 5.0
        return None
    if hasattr(symbols, _OTHER_RUNTIMES):
        return None
    function.argtypes, function.restype = (ctypes.c_int,), ctypes.c_int
    found: Pause = function
    return found


def release_team() -> bool:
    """End the calling thread's team, if it has one. Any thread; microseconds.

    Returns:
        Whether it has none now; False inside a parallel region, and where torch does
        not run on libgomp.
    """
    pause = _pause()
    return pause is not None and pause(_SOFT) == 0
