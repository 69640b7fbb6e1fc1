"""One run of a benchmark: what it ran on, what it found, and whether to believe it."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
import transformers

from examples.benchmarks.common import machine, print_table
from examples.benchmarks.noise import Noise, Watch

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DISTURBED = """\
The tables are withheld: {noise}, beside which figures may be several times too large.
Repeat it on a quiet machine, or add --noisy to see them all the same."""


@dataclass(frozen=True)
class Table:
    """Rows for people; ``figures`` of a run has them for programs."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


class Run:
    """A run that writes ``OUT/NAME.json`` and its plots, and prints its tables.

    Use it as a context manager. Tables are printed at the end, and only if no other
    work ran beside the run: a wrong digit is worse than none. The raw figures are
    written in any case, with what other work took.

    Attributes:
        options: What was asked for.
        figures: Raw figures, to be filled in; anything that JSON can say.
        path: Where they are written.
    """

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        """
        Args:
            name: Of the benchmark.
            options: From a parser with ``output_arguments``.
        """
        self.options = options
        self.figures: dict[str, Any] = {}
        self.path: Path = options.out / f"{name}.json"
        self._name = name
        self._tables: list[Table] = []
        self._watch = Watch()
        self._vouched = False

    def table(
        self, head: Sequence[str], rows: Sequence[Sequence[str]], title: str = ""
    ) -> None:
        """Print this table at the end."""
        self._tables.append(Table(title, head, rows))

    def vouch(self) -> None:
        """The figures hold whatever else runs: simulated, or judged round by round."""
        self._vouched = True

    def plot(self, name: str, draw: Callable[[Figure], None]) -> None:
        """Write ``OUT/RUN-NAME.png``; where matplotlib is missing, say so once.

        Args:
            name: Of the plot.
            draw: Draws into the figure that it gets.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError:
            print(f"no plot of {name}: pip install matplotlib")
            return
        figure = Figure(figsize=(7, 4), layout="constrained")
        draw(figure)
        path = self.path.with_name(f"{self._name}-{name}.png")
        figure.savefig(path, dpi=150)
        print(f"wrote {path}")

    def save(self) -> None:
        """Write what there is so far."""
        self._write(None)

    def __enter__(self) -> Run:
        self.options.out.mkdir(parents=True, exist_ok=True)
        if "threads" in self.options:
            torch.set_num_threads(self.options.threads)
        self._machine = machine()
        for about in (self._machine, vars(self.options)):
            print("  ".join(f"{name} {value}" for name, value in about.items()))
        transformers.utils.logging.disable_progress_bar()
        self._watch.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        noise = self._watch.end()
        self._write(noise)
        if error is not None:
            return
        print(f"{noise}; raw figures in {self.path}")
        if not (noise.calm or self._vouched or self.options.noisy):
            print(DISTURBED.format(noise=noise))
            raise SystemExit(3)
        for table in self._tables:
            print(f"\n{table.title}" if table.title else "")
            print_table(table.head, table.rows)

    def _write(self, noise: Noise | None) -> None:
        found = {
            "benchmark": self._name,
            "machine": self._machine,
            "options": vars(self.options),
            "figures": self.figures,
            "tables": [asdict(table) for table in self._tables],
            "noise": None if noise is None else asdict(noise),
        }
        self.path.write_text(json.dumps(found, indent=1, default=str) + "\n")


def by_dtype(
    name: str,
    options: argparse.Namespace,
    head: Sequence[str],
    measure: Callable[[str, Any, Path], Any],
    rows_of: Callable[[str, Any], list[list[str]]],
) -> None:
    """Measure each dtype in turn, all in one folder, for one table.

    Args:
        name: Of the benchmark.
        options: From a parser made by ``arguments``.
        head: Of the table.
        measure: Takes a dtype, the options and a folder; returns raw figures.
        rows_of: Makes rows of the table from a dtype and its figures.
    """
    rows: list[list[str]] = []
    with Run(name, options) as run, tempfile.TemporaryDirectory() as folder:
        for dtype in options.dtypes:
            found = run.figures[dtype] = measure(dtype, options, Path(folder))
            rows += rows_of(dtype, found)
        run.table(head, rows)
