"""What the benchmarks share: real prompts, paired rounds, medians with spread.

A ratio is taken within one round, so that a machine that slows down slows both sides.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
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
    output_arguments(parser)
    return parser


def output_arguments(parser: argparse.ArgumentParser) -> None:
    """Where a run writes, and whether it shows figures that may be wrong."""
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(".bench/results"),
        help="folder for raw figures (JSON) and plots (PNG)",
    )
    parser.add_argument(
        "--noisy", action="store_true", help="print tables even if other work ran"
    )


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
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "cpu": cpu,
        **({"gpu": ", ".join(gpus)} if gpus else {}),
        "cores": os.cpu_count(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table that can be pasted into Markdown."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    for row in (head, ["-" * width for width in widths], *rows):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("| " + " | ".join(cells) + " |")


def drop_page_cache(folder: Path, pattern: str = "*.safetensors") -> int:
    """Ask the kernel to forget the files below ``folder``; returns their bytes.

    Bytes as stored: a file with holes counts for less than its length.
    """
    total = 0
    for path in sorted(found for found in folder.rglob(pattern) if found.is_file()):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)  # dirty pages cannot be dropped
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            total += os.fstat(handle).st_blocks * 512
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
