"""The glue of ``glue.cpp``, compiled at start for this machine (ADR 34).

A second's work of a C++ compiler, once per process; nothing compiled is kept in the
cache folder, so that nobody who can write there can make an engine run code. Without a
compiler, or if what it makes does not do what torch does, there is ``TorchGlue``.

The code has no OpenMP runtime of its own: it is linked to none, and finds the one that
torch has loaded. Two runtimes on the same cores would wait for each other.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pcr_core.model.glue import Angles, Glue, TorchGlue
from pcr_core.model.rounding import differ_by_rounding
from pcr_core.openmp import is_found_by_others

_log = logging.getLogger("pcr_core.model")
_SOURCE = Path(__file__).with_name("glue.cpp")
_SECONDS = 120.0  # a busy machine's; a start must not hang on a compiler
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-fPIC",
    "-fopenmp",
    # After what $CXX has of its own: rounding depends on the first; a reduction must
    # not begin where its address is even; debug information has the folder in it, and
    # the digest would be another each time.
    "-fno-fast-math",
    "--param=vect-max-peeling-for-alignment=0",
    "-g0",
)
_WIDE = ("-mprefer-vector-width=512",)  # GCC would use half of AVX-512
_SUFFIX = {torch.bfloat16: "bf16", torch.float32: "float"}

_SIZE, _PLACE, _NUMBER = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "add": (_SIZE, _SIZE, _PLACE, _PLACE),
    "norm": (_SIZE, _SIZE, _PLACE, _PLACE, _NUMBER, _PLACE),
    "add_norm": (_SIZE, _SIZE, *[_PLACE] * 3, _NUMBER, _PLACE, _PLACE),
    "turn": (_SIZE, _SIZE, _SIZE, _SIZE, *[_PLACE] * 4),
    "gate": (_SIZE, _SIZE, _PLACE, _PLACE),
}


class CompiledGlue:
    """See ``Glue``. Any thread; releases the interpreter's lock while it works.

    Args:
        library: From ``glue.cpp``.
        dtype: Of all matrices.
        name: See ``Glue``.
    """

    _add: Any
    _norm: Any
    _add_norm: Any
    _turn: Any
    _gate: Any

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype, name: str) -> None:
        self.name = name
        self.dtype: torch.dtype | None = dtype
        for operation, arguments in _ARGUMENTS.items():
            function = library[f"{operation}_{_SUFFIX[dtype]}"]
            function.argtypes, function.restype = arguments, None
            setattr(self, f"_{operation}", function)

    def angles(self, cos: torch.Tensor, sin: torch.Tensor) -> Angles:
        """See ``Glue``."""
        return cos.to(self.dtype).contiguous(), sin.to(self.dtype).contiguous()

    def norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
    ) -> None:
        """See ``Glue``."""
        rows, width = x.shape
        self._norm(rows, width, x.data_ptr(), weight.data_ptr(), eps, out.data_ptr())

    def add_norm(
        self,
        x: torch.Tensor,
        more: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        total: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """See ``Glue``."""
        self._add_norm(
            *x.shape,
            x.data_ptr(),
            more.data_ptr(),
            weight.data_ptr(),
            eps,
            total.data_ptr(),
            out.data_ptr(),
        )

    def turn(
        self, heads: torch.Tensor, turning: int, angles: Angles, out: torch.Tensor
    ) -> None:
        """See ``Glue``."""
        rows, count, dim = heads.shape
        cos, sin = angles
        self._turn(
            rows,
            turning,
            count,
            dim,
            cos.data_ptr(),
            sin.data_ptr(),
            heads.data_ptr(),
            out.data_ptr(),
        )

    def gate(self, both: torch.Tensor, out: torch.Tensor) -> None:
        """See ``Glue``."""
        self._gate(*out.shape, both.data_ptr(), out.data_ptr())

    def add(self, x: torch.Tensor, more: torch.Tensor) -> None:
        """See ``Glue``."""
        self._add(*x.shape, x.data_ptr(), more.data_ptr())


@dataclass(frozen=True)
class GlueChoice:
    """A glue, and why it is not a compiled one.

    Attributes:
        glue: See above.
        reason: Empty if it is, or if nothing was to be compiled.
    """

    glue: Glue
    reason: str = ""

    @property
    def kind(self) -> str:
        """``"compiled"`` or ``"torch"``."""
        return "compiled" if isinstance(self.glue, CompiledGlue) else "torch"


def choose_glue(dtype: torch.dtype) -> GlueChoice:
    """The fastest glue that this machine has for a dtype."""
    if dtype not in _SUFFIX:
        name = str(dtype).removeprefix("torch.")
        return GlueChoice(TorchGlue(), f"there are none for {name}")
    found = _library()
    if isinstance(found, str):
        return GlueChoice(TorchGlue(), found)
    glue = CompiledGlue(found.code, dtype, f"compiled-{found.digest}")
    wrong = _first_fault(glue, dtype)
    if wrong:
        _log.warning("what was compiled is not used: %s", wrong)
        return GlueChoice(TorchGlue(), wrong)
    return GlueChoice(glue)


@dataclass(frozen=True)
class _Library:
    code: ctypes.CDLL
    digest: str


_building = threading.Lock()


def _library() -> _Library | str:
    """The compiled code, or why there is none. Any thread; once per process."""
    with _building:
        return _build()


@functools.cache
def _build() -> _Library | str:
    """See ``_library``.

    By ``$CXX``, or else by ``g++``: what Clang makes needs a runtime of its own.
    """
    if not sys.platform.startswith("linux"):
        return f"they are not built on {sys.platform}"
    if not is_found_by_others():
        return "they would find another OpenMP runtime than torch's"
    found: _Library | str = ""
    for compiler in dict.fromkeys(filter(None, (os.environ.get("CXX"), "g++"))):
        found = _built_by(compiler)
        if isinstance(found, _Library):
            break
    return found


def _built_by(compiler: str) -> _Library | str:
    try:
        command = shlex.split(compiler)
        if shutil.which(command[0]) is None:
            return f"there is no C++ compiler ({compiler})"
        # What is mapped cannot always be removed, on NFS for instance.
        temporary = tempfile.TemporaryDirectory("", "pcr-", ignore_cleanup_errors=True)
        with temporary as folder:
            return _built(command, Path(folder))
    except subprocess.CalledProcessError as error:
        _log.warning("glue.cpp: %s failed: %s", compiler, error.stderr)
        return f"{compiler} failed, see the log"
    except (
        OSError,
        ValueError,  # no way to split it
        LookupError,  # nothing in it
        AttributeError,
        subprocess.SubprocessError,
    ) as error:
        _log.warning("glue.cpp cannot be built: %s", error)
        return f"what {compiler} makes cannot be used, see the log"


def _built(compiler: Sequence[str], folder: Path) -> _Library:
    """Compile and load; the files are not needed afterwards."""
    shutil.copy(_SOURCE, folder / "glue.cpp")
    wide = _WIDE if platform.machine() == "x86_64" else ()
    # Linked without -fopenmp, which would bring a runtime of its own, and without start
    # files: -Ofast in $CXX adds one that takes subnormals from the whole process.
    for command in (
        [*compiler, *_FLAGS, *wide, "-c", "glue.cpp", "-o", "glue.o"],
        [*compiler, "-nostartfiles", "-shared", "glue.o", "-o", "glue.so"],
    ):
        subprocess.run(
            command,
            cwd=folder,
            check=True,
            timeout=_SECONDS,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
        )
    file = folder / "glue.so"
    digest = hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest()
    code = ctypes.CDLL(str(file))
    for dtype in _SUFFIX:
        CompiledGlue(code, dtype, digest)  # AttributeError if anything is missing
    return _Library(code, digest)


def _first_fault(glue: Glue, dtype: torch.dtype) -> str:
    """What is wrong with compiled code on this machine, or ``""``.

    Results may differ from torch's by rounding. Those of a row may not differ at all by
    how many rows there are, nor by where in memory it is.
    """
    ours, theirs = _trial(glue, dtype), _trial(TorchGlue(), dtype)
    for name, expected in theirs.items():
        if not differ_by_rounding(expected, ours[name], dtype):
            return f"the compiled {name} is not what torch computes"
    for part in (slice(1, 2), slice(3, _ROWS)):
        for name, alone in _trial(glue, dtype, part).items():
            if not torch.equal(alone, ours[name][part]):
                return f"the compiled {name} of a row depends on other rows"
    return ""


_ROWS, _HEADS, _TURNING, _DIM = 150, 5, 4, 24  # no whole vectors, several threads
_WIDTH = 601


@torch.inference_mode()
def _trial(
    glue: Glue, dtype: torch.dtype, part: slice = slice(None)
) -> dict[str, torch.Tensor]:
    """What each operation makes of noise, or of some rows of it."""
    noise = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=noise).to(dtype)[part]

    weight = torch.randn(_WIDTH, generator=noise).to(dtype)
    x, more = random(_ROWS, _WIDTH), random(_ROWS, _WIDTH)
    both, heads = 8 * random(_ROWS, 2 * _WIDTH), random(_ROWS, _HEADS, _DIM)
    angles = glue.angles(random(_ROWS, _DIM), random(_ROWS, _DIM))
    made = {
        name: torch.empty_like(x) for name in ("norm", "sum", "norm of the sum", "gate")
    }
    glue.norm(x, weight, 1e-5, made["norm"])
    glue.add_norm(x, more, weight, 1e-5, made["sum"], made["norm of the sum"])
    glue.gate(both, made["gate"])
    made["turned"] = torch.empty_like(heads)
    glue.turn(heads, _TURNING, angles, made["turned"])
    glue.turn(heads, _TURNING, angles, heads)
    glue.add(x, more)
    return {**made, "turned in place": heads, "added": x}
