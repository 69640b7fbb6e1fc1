"""The benchmarks run and print their tables; what they measure is not checked here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMON = ["--dtypes", "bfloat16", "--rounds", "2", "--tokens", "300"]


@pytest.mark.slow
@pytest.mark.usefixtures("smollm2_dir")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("first_token", []),
        ("exact_modes", []),
        ("memory", ["--prompts", "2"]),
        ("prefetch", ["--queue", "3"]),
        ("overlap", ["--matched", "0", "0.5"]),
        ("chunk_sizes", ["--sizes", "16", "128"]),
        ("decode", ["--rows", "1", "2", "--output", "6"]),
        ("slow_disk", ["--multiples", "1"]),
        ("speculation", ["--questions", "2", "--topk", "1", "2", "--delay", "0.01"]),
    ],
)
def test_benchmark_runs(name: str, options: list[str], tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", f"examples.benchmarks.{name}", *COMMON, *options]
    done = subprocess.run(
        [*command, "--json", str(figures)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "| bfloat16" in done.stdout
    assert "machine" in json.loads(figures.read_text())
