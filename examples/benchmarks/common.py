"""What the benchmarks share: real prompts, paired rounds, medians with spread.

A ratio is taken within one round, so that a machine that slows down slows both sides.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from examples.corpus import load_corpus


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of a sample."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, sample: Sequence[float]) -> Spread:
        if len(sample) < 2:
            return cls(sample[0], sample[0], sample[0])
        low, median, high = statistics.quantiles(sample, n=4, method="inclusive")
        return cls(median, low, high)

    def ms(self) -> str:
        return f"{self.median * 1e3:.0f} ({self.low * 1e3:.0f}-{self.high * 1e3:.0f})"

    def ratio(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


def ratios(above: Sequence[float], below: Sequence[float]) -> Spread:
    """Spread of the ratios within rounds."""
    return Spread.of([a / b for a, b in zip(above, below, strict=True)])


def timed(work: Callable[[], Any]) -> float:
    """Seconds one call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", help="path or hub id; default: the packaged model")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=1076, help="prompt length")
    parser.add_argument("--json", type=Path, help="write raw figures here")
    return parser


def real_tokens(tokenizer: Any, count: int, which: int = 0) -> list[int]:
    """``count`` tokens of real documents, different ones for each ``which``."""
    corpus = load_corpus(plots=24, questions=24)
    plots = [plot.text for plot in corpus.plots]
    start = which % len(plots)
    text = "\n\n".join(plots[start:] + plots[:start])
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) < count:
        raise SystemExit(f"the corpus has only {len(ids)} tokens")
    return ids[:count]


def machine() -> dict[str, Any]:
    """Where and with what this ran."""
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.split(":")[1].strip() for line in lines if "model name" in line]
        cpu = names[0] if names else cpu
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "load_average": os.getloadavg()[0],
    }


def print_machine() -> dict[str, Any]:
    found = machine()
    print("  ".join(f"{name} {value}" for name, value in found.items()))
    if found["load_average"] > 0.5:
        print(
            f"WARNING: load average {found['load_average']:.1f}; if other work is "
            "running, figures may be several times too slow: torch threads spin."
        )
    return found


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table that can be pasted into Markdown."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    for row in (head, ["-" * width for width in widths], *rows):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("| " + " | ".join(cells) + " |")


def write_json(path: Path | None, figures: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(figures, indent=1, default=str) + "\n")


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars of weights between the tables."""
    transformers.utils.logging.disable_progress_bar()
    yield


def by_dtype(
    options: argparse.Namespace,
    head: Sequence[str],
    measure: Callable[[str, Any, Path], Any],
    rows_of: Callable[[str, Any], list[list[str]]],
) -> None:
    """Measure each dtype in turn, each in the same folder; print a table, write JSON.

    Args:
        options: From a parser made by ``arguments``.
        head: Of the table.
        measure: Takes a dtype, the options and a folder; returns raw figures.
        rows_of: Makes rows of the table from a dtype and its figures.
    """
    torch.set_num_threads(options.threads)
    results: dict[str, Any] = {"machine": print_machine()}
    rows: list[list[str]] = []
    with quiet_transformers(), tempfile.TemporaryDirectory() as folder:
        for dtype in options.dtypes:
            found = results[dtype] = measure(dtype, options, Path(folder))
            rows += rows_of(dtype, found)
    print_table(head, rows)
    write_json(options.json, results)


def drop_page_cache(folder: Path) -> int:
    """Ask the kernel to forget the files below ``folder``; returns their bytes."""
    total = 0
    for path in sorted(folder.rglob("*.safetensors")):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)  # dirty pages cannot be dropped
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            total += os.fstat(handle).st_size
        finally:
            os.close(handle)
    return total


def sequential_read(folder: Path) -> tuple[int, float]:
    """Bytes and seconds of reading every chunk file below ``folder`` once, cold."""
    drop_page_cache(folder)
    files = sorted(folder.rglob("*.safetensors"))
    buffer = bytearray(max(path.stat().st_size for path in files))
    total = 0
    start = time.perf_counter()
    for path in files:
        with open(path, "rb", buffering=0) as file:
            total += file.readinto(buffer)
    return total, time.perf_counter() - start
