"""What is between the products: right, row by row, and safe to be without."""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pcr_core import openmp
from pcr_core.model import compiled_glue
from pcr_core.model.compiled_glue import CompiledGlue, choose_glue
from pcr_core.model.glue import Glue, TorchGlue

DTYPES = (torch.float32, torch.bfloat16)
STEP = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-7}
"""How far a result may be off, relative to its size: two roundings and a bit."""


def glues(dtype: torch.dtype) -> list[Glue]:
    chosen = choose_glue(dtype)
    return [TorchGlue(), *([] if chosen.reason else [chosen.glue])]


def compiled(dtype: torch.dtype) -> Glue:
    chosen = choose_glue(dtype)
    if chosen.reason:
        pytest.skip(chosen.reason)
    return chosen.glue


def noise(seed: int, dtype: torch.dtype, *shape: int, scale: float = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(*shape, generator=generator)).to(dtype)


def close(found: torch.Tensor, expected: torch.Tensor, scale: torch.Tensor) -> bool:
    """``scale``: what the largest term of each sum may have been."""
    far = (found.double() - expected).abs()
    return bool((far <= STEP[found.dtype] * scale).all())


def made(glue: Glue, dtype: torch.dtype, rows: int, seed: int) -> dict[str, Any]:
    """Every operation on noise; inputs and results by name."""
    width, heads, turning, dim = 70, 5, 3, 12
    x, more = noise(seed, dtype, rows, width), noise(seed + 1, dtype, rows, width)
    weight = noise(seed + 2, dtype, width)
    both = noise(seed + 3, dtype, rows, 2 * width, scale=6)
    all_heads = noise(seed + 4, dtype, rows, heads, dim)
    cos, sin = (noise(seed + n, dtype, rows, dim) for n in (5, 6))
    normed, total, normed_sum, gated = (torch.empty_like(x) for _ in range(4))
    turned, in_place, added = torch.empty_like(all_heads), all_heads.clone(), x.clone()
    glue.norm(x, weight, 1e-5, normed)
    glue.add_norm(x, more, weight, 1e-5, total, normed_sum)
    glue.gate(both, gated)
    angles = glue.angles(cos, sin)
    glue.turn(all_heads, turning, angles, turned)
    glue.turn(in_place, turning, angles, in_place)
    glue.add(added, more)
    return {k: v for k, v in locals().items() if isinstance(v, torch.Tensor | int)}


RESULTS = ("normed", "total", "normed_sum", "gated", "turned", "in_place", "added")


@pytest.mark.parametrize("dtype", DTYPES)
@given(rows=st.integers(1, 300), seed=st.integers(0, 1000))
def test_operations_give_what_they_say(
    dtype: torch.dtype, rows: int, seed: int
) -> None:
    for glue in glues(dtype):
        has = made(glue, dtype, rows, seed)
        x, more, weight = (has[k].double() for k in ("x", "more", "weight"))
        assert close(has["added"], x + more, x.abs() + more.abs())
        assert torch.equal(has["added"], has["total"])
        for given_, found in ((has["x"], "normed"), (has["total"], "normed_sum")):
            one = given_.double()
            scale = (one.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
            expected = one * scale * weight
            assert close(has[found], expected, 2 * expected.abs() + 1e-30)
        gate, up = has["both"].double().chunk(2, -1)
        expected = gate * gate.sigmoid() * up
        assert close(has["gated"], expected, 2 * expected.abs() + 1e-30)
        heads, cos, sin = (has[k].double() for k in ("all_heads", "cos", "sin"))
        qk, half = heads[:, : has["turning"]], has["dim"] // 2
        other = torch.cat((-qk[..., half:], qk[..., :half]), -1)
        terms = qk * cos[:, None], other * sin[:, None]
        turned = has["turned"]
        room = terms[0].abs() + terms[1].abs()
        assert close(turned[:, : has["turning"]], terms[0] + terms[1], room)
        assert torch.equal(turned[:, has["turning"] :], has["all_heads"][:, 3:])
        assert torch.equal(turned, has["in_place"])


@pytest.mark.parametrize("dtype", DTYPES)
@given(seed=st.integers(0, 1000), data=st.data())
def test_a_rows_bits_do_not_depend_on_how_many_there_are(
    dtype: torch.dtype, seed: int, data: st.DataObject
) -> None:
    """Nor on where it is, nor on how many threads share the work."""
    glue = compiled(dtype)
    rows = data.draw(st.integers(1, 400))
    start = data.draw(st.integers(0, rows - 1))
    stop = data.draw(st.integers(start + 1, rows))
    has = made(glue, dtype, rows, seed)
    part = slice(start, stop)
    x, more, both, heads = (has[k][part] for k in ("x", "more", "both", "all_heads"))
    angles = glue.angles(has["cos"][part], has["sin"][part])
    normed, total, normed_sum, gated = (torch.empty_like(x) for _ in range(4))
    turned = torch.empty_like(heads)
    glue.norm(x, has["weight"], 1e-5, normed)
    glue.add_norm(x, more, has["weight"], 1e-5, total, normed_sum)
    glue.gate(both, gated)
    glue.turn(heads, has["turning"], angles, turned)
    found = {k: v for k, v in locals().items() if k in RESULTS}
    assert len(found) == 5
    for name, result in found.items():
        assert torch.equal(result, has[name][part]), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_at_the_edge(dtype: torch.dtype) -> None:
    """As torch has them: saturated gates, zeros, and what is no number stays none."""
    big = torch.finfo(dtype).max
    gate = torch.tensor(
        [[0.0, -0.0, 100.0, -100.0, 1e4, -1e4, big, -big, torch.inf, torch.nan]]
    ).to(dtype)
    up = torch.ones_like(gate)
    for glue in glues(dtype):
        out = torch.empty_like(gate)
        glue.gate(torch.cat((gate, up), -1), out)
        expected = torch.nn.functional.silu(gate.double())
        finite = expected[:, :-2]
        assert (
            (out[:, :-2].double() - finite).abs() <= 2e-2 * finite.abs() + 1e-30
        ).all()
        assert out[0, -2].isinf()
        assert out[0, -1].isnan()
        zeros, weight = torch.zeros(2, 24, dtype=dtype), torch.ones(24, dtype=dtype)
        normed = torch.empty_like(zeros)
        glue.norm(zeros, weight, 1e-5, normed)
        assert torch.equal(normed, zeros)
        broken = zeros.clone()
        broken[1, 5] = torch.nan
        glue.norm(broken, weight, 1e-5, normed)
        assert normed[1].isnan().all()
        assert not normed[0].isnan().any(), "rows are computed by themselves"
        sums = torch.full((1, 4), big, dtype=dtype)
        glue.add(sums, sums.clone())
        assert sums.isinf().all()


# --- the compiler ---


@pytest.fixture
def compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], Path]]:
    """Makes a shell script the ``g++`` of this process; ``$REAL`` is the real one."""
    real = shutil.which("g++")
    if real is None:
        pytest.skip("there is no g++")

    def install(script: str) -> Path:
        path = tmp_path / "a folder" / "g++"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\nREAL='{real}'\n{textwrap.dedent(script)}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("PATH", f"{path.parent}{os.pathsep}{os.environ['PATH']}")
        compiled_glue._build.cache_clear()
        return path

    yield install
    compiled_glue._build.cache_clear()


FAILURES = {
    "fails": ("exit 1", "failed"),
    "says what nobody can read": (r"printf '\377\376' >&2; exit 1", "failed"),
    "makes nothing": ("exit 0", "cannot be used"),
    "makes no library": (
        'for name; do :; done; echo text > "$name"; exit 0',
        "cannot be used",
    ),
    "leaves something out": (
        r"""sed -i 's/EXPORTED(float, float)//' glue.cpp; exec "$REAL" "$@" """,
        "cannot be used",
    ),
    "is slow": ("exec sleep 60", "cannot be used"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_without_a_compiler_that_works_there_is_torch(
    compiler: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    script, reason = FAILURES[failure]
    compiler(script)
    if failure == "is slow":
        monkeypatch.setattr(compiled_glue, "_SECONDS", 0.2)
    chosen = choose_glue(torch.bfloat16)
    assert chosen.kind == "torch"
    assert isinstance(chosen.glue, TorchGlue)
    assert reason in chosen.reason


def test_an_undefined_symbol_is_no_kernel(compiler: Callable[[str], Path]) -> None:
    """What a compiler with another OpenMP runtime makes: its calls lead nowhere."""
    compiled(torch.float32)
    compiler(
        r"""sed -i 's/^namespace {/extern "C" void kmpc_fork();\n&/;
        s/if (rows == 1 || rows . width < kParallel) {/kmpc_fork(); &/' glue.cpp
        exec "$REAL" "$@" """
    )
    chosen = choose_glue(torch.float32)
    assert chosen.kind == "torch"
    assert "cannot be used" in chosen.reason


@pytest.mark.parametrize(
    ("wrong", "right", "operation"),
    [
        ("up(x[j]) - up(more[j])", "up(x[j]) + up(more[j])", "sum"),
        ("squares / rows + eps", "squares / width + eps", "norm"),
        ("x / (2.0f + exp", "x / (1.0f + exp", "gate"),
        ("left * up(cos[j]) + right", "left * up(cos[j]) - right", "turned"),
    ],
)
def test_what_is_compiled_wrong_is_not_used(
    compiler: Callable[[str], Path], wrong: str, right: str, operation: str
) -> None:
    """Stands for a compiler's mistakes."""
    compiled(torch.float32)
    source = Path(compiled_glue.__file__).with_name("glue.cpp").read_text()
    assert right in source
    wrong = wrong.replace("rows", "(width + 40)")
    pattern = "".join(f"\\{c}" if c in "[]*/." else c for c in right)
    replacement = wrong.replace("/", "\\/")
    compiler(f"""sed -i 's/{pattern}/{replacement}/' glue.cpp; exec "$REAL" "$@" """)
    chosen = choose_glue(torch.float32)
    assert chosen.kind == "torch"
    assert operation in chosen.reason


@pytest.mark.parametrize("value", ["/nowhere/c++", "'", "' '", " ", "false"])
def test_a_variable_that_names_no_compiler(
    compiler: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    compiled(torch.float32)
    compiler("""exec "$REAL" "$@" """)
    monkeypatch.setenv("CXX", value)
    assert choose_glue(torch.float32).kind == "compiled", "by g++"


def test_the_variables_compiler_comes_first(
    compiler: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled(torch.float32)
    script = compiler("""echo used >> "$0.log"; exec "$REAL" "$@" """)
    monkeypatch.setenv("CXX", f"'{script}' -O2")
    script.rename(script.with_name("other"))
    monkeypatch.setenv("CXX", f"'{script.with_name('other')}' -O2")
    assert choose_glue(torch.float32).kind == "compiled"
    assert script.with_name("other.log").read_text() == "used\nused\n"


def test_no_compiler_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled_glue._build.cache_clear()
    try:
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("PATH", "")
        assert choose_glue(torch.float32).reason == "there is no C++ compiler (g++)"
    finally:
        compiled_glue._build.cache_clear()


def test_another_dtype_is_torchs() -> None:
    assert choose_glue(torch.float16).reason == "there are none for float16"


def _named_anew() -> str:
    compiled_glue._build.cache_clear()
    chosen = choose_glue(torch.float32)
    assert chosen.kind == "compiled", chosen.reason
    return chosen.glue.name


def test_compiled_twice_it_is_the_same(
    compiler: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or nothing stored before a restart would be read after it."""
    compiled(torch.float32)
    real = shutil.which("g++")
    names = {_named_anew() for _ in range(2)}
    compiler("""exec "$REAL" "$@" -O1 """)
    other = choose_glue(torch.float32).glue
    assert isinstance(other, CompiledGlue)
    assert len(names) == 1
    for flags in ("-g", "-g -Ofast -ffast-math"):
        compiler("")  # nothing is cached
        monkeypatch.setenv("CXX", f"{real} {flags}")
        again = {_named_anew() for _ in range(2)}
        assert len(again) == 1, "with debug information or not"
        assert sys.float_info.min / 2 > 0, "subnormal numbers are still there"
    assert other.name not in names, "other code, other chunks"


def test_it_leaves_nothing_behind_and_brings_no_runtime(tmp_path: Path) -> None:
    """A second OpenMP runtime would fight with torch's for the cores."""
    compiled(torch.float32)
    script = """
        import torch
        from pcr_core.model.compiled_glue import choose_glue

        def runtimes():
            lines = open("/proc/self/maps").read().splitlines()
            return {line.split()[-1] for line in lines if "omp" in line.split()[-1]}

        torch.randn(300, 300) @ torch.randn(300, 300)
        before = runtimes()
        glue = choose_glue(torch.float32).glue
        x = torch.ones(4096, 64)
        glue.add(x, x.clone())
        assert glue.name.startswith("compiled") and (x == 2).all()
        assert runtimes() == before, runtimes()
    """
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    subprocess.run(command, check=True, env=environment, timeout=120)
    assert list(tmp_path.iterdir()) == []


def test_many_threads_get_one_and_the_same(compiler: Callable[[str], Path]) -> None:
    compiled(torch.float32)
    script = compiler("""echo used >> "$0.log"; exec "$REAL" "$@" """)
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(choose_glue, [torch.float32] * 6))
    assert len({one.glue.name for one in found}) == 1
    assert script.with_name("g++.log").read_text() == "used\nused\n"


def test_rows_that_know_of_each_other_are_not_used(
    compiler: Callable[[str], Path],
) -> None:
    """Whatever makes a row's rounding depend on where it is."""
    compiled(torch.float32)
    compiler(
        "sed -i 's/const float scale = 1.0f/const float scale = "
        "(1.0f + 1e-6f * ((reinterpret_cast<uintptr_t>(x) >> 2) \\& 1))/' glue.cpp\n"
        'exec "$REAL" "$@" '
    )
    chosen = choose_glue(torch.float32)
    assert chosen.kind == "torch"
    assert "depends on other rows" in chosen.reason


def test_another_runtime_in_torchs_place(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled(torch.float32)
    real = ctypes.CDLL

    class Elsewhere:
        GOMP_parallel = real(None).malloc

    def library(name: str | None) -> Any:
        return Elsewhere() if name is None else real(name)

    compiled_glue._build.cache_clear()
    monkeypatch.setattr(openmp.ctypes, "CDLL", library)
    try:
        assert "another OpenMP runtime" in choose_glue(torch.float32).reason
    finally:
        compiled_glue._build.cache_clear()
