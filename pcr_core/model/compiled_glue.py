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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pcr_core.model.glue import Angles, Glue, TorchGlue
from pcr_core.model.rounding import differ_by_rounding

_log = logging.getLogger("pcr_core.model")
_SOURCE = Path(__file__).with_name("glue.cpp")
_SECONDS = 120.0  # a busy machine's; a start must not hang on a compiler
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-fopenmp", "-fno-fast-math")
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

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype, name: str) -> None:
        self.name = name
        self._dtype = dtype
        for operation, arguments in _ARGUMENTS.items():
            function = library[f"{operation}_{_SUFFIX[dtype]}"]
            function.argtypes, function.restype = arguments, None
            setattr(self, f"_{operation}", function)

    _add: Any
    _norm: Any
    _add_norm: Any
    _turn: Any
    _gate: Any

    def angles(self, cos: torch.Tensor, sin: torch.Tensor) -> Angles:
        """See ``Glue``."""
        dtype = self._dtype
        return cos.to(dtype).contiguous(), sin.to(dtype).contiguous()

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
    wrong = _first_difference(glue, TorchGlue(), dtype)
    if wrong:
        _log.warning("the compiled %s is not what torch computes; not used", wrong)
        reason = f"the compiled {wrong} is not what torch computes"
        return GlueChoice(TorchGlue(), reason)
    return GlueChoice(glue)


@dataclass(frozen=True)
class _Library:
    code: ctypes.CDLL
    digest: str


@functools.cache
def _library() -> _Library | str:
    """The compiled code, or why there is none. Once per process."""
    if not sys.platform.startswith("linux"):
        return f"they are not built on {sys.platform}"
    compiler = os.environ.get("CXX") or "g++"
    try:
        command = shlex.split(compiler)
        if shutil.which(command[0]) is None:
            return f"there is no C++ compiler ({compiler})"
        with tempfile.TemporaryDirectory(prefix="pcr-") as folder:
            return _built(command, Path(folder))
    except subprocess.CalledProcessError as error:
        _log.info("%s failed: %s", compiler, error.stderr)
        return f"{compiler} failed, see the log"
    except (OSError, ValueError, AttributeError, subprocess.SubprocessError) as error:
        _log.info("glue.cpp cannot be built: %s", error)
        return f"what {compiler} makes cannot be used, see the log"


def _built(compiler: Sequence[str], folder: Path) -> _Library:
    """Compile and load; the files are not needed afterwards."""
    shutil.copy(_SOURCE, folder / "glue.cpp")
    wide = _WIDE if platform.machine() == "x86_64" else ()
    # Linked without -fopenmp, which would bring a runtime of its own.
    for command in (
        [*compiler, *_FLAGS, *wide, "-c", "glue.cpp", "-o", "glue.o"],
        [*compiler, "-shared", "glue.o", "-o", "glue.so"],
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


def _first_difference(glue: Glue, reference: Glue, dtype: torch.dtype) -> str:
    """The first operation that differs by more than rounding, or ``""``."""
    ours, theirs = (_trial(one, dtype) for one in (glue, reference))
    for name, expected in theirs.items():
        if not differ_by_rounding(expected, ours[name], dtype):
            return name
    return ""


_ROWS, _HEADS, _TURNING, _DIM = 70, 5, 4, 24  # no whole vectors, and several threads
_WIDTH = 600


@torch.inference_mode()
def _trial(glue: Glue, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What each operation makes of noise."""
    noise = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=noise).to(dtype)

    x, more, weight = random(_ROWS, _WIDTH), random(_ROWS, _WIDTH), random(_WIDTH)
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
