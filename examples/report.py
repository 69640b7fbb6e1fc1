"""What the demo shows: a line per question as it is answered, and a summary.

Knows answers, not engines.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from examples.answers import Answer

NUMBERS = ("TTFT ms", "DRAM", "SSD", "computed")


def make_console() -> Console:
    """A console wide enough for the table when the output is a file or a pipe."""
    return Console(width=None if sys.stdout.isatty() else 132, highlight=False)


def progress(console: Console) -> Progress:
    """A bar under the lines already printed, with count and time."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )


def _line(console: Console, cells: Sequence[str], *, style: str = "") -> Table:
    """One row with the same column widths as every other row."""
    texts = max(20, (console.width - 3 - 10 - 10 * len(NUMBERS) - 8) // 2)
    table = Table.grid(padding=(0, 1))
    table.add_column(width=3, justify="right")
    table.add_column(width=10)
    table.add_column(width=texts, no_wrap=True, overflow="ellipsis")
    table.add_column(width=texts, no_wrap=True, overflow="ellipsis")
    for _ in NUMBERS:
        table.add_column(width=9, justify="right")
    table.add_row(*(Text(cell, style=style) for cell in cells))
    return table


@contextlib.contextmanager
def live_table(
    console: Console, title: str, total: int
) -> Iterator[Callable[[Answer], None]]:
    """Print a line for each answer given to the function that this yields."""
    console.print()
    console.rule(title, align="left")
    header = ("#", "through", "question", "answer", *NUMBERS)
    console.print(_line(console, header, style="bold"))
    with progress(console) as bar:
        task = bar.add_task("answering", total=total)
        count = 0

        def show(answer: Answer) -> None:
            nonlocal count
            count += 1
            bar.console.print(_line(bar.console, _cells(count, answer)))
            bar.advance(task)

        yield show


def _cells(number: int, answer: Answer) -> list[str]:
    return [
        str(number),
        answer.framework,
        answer.question.strip(),
        " ".join(answer.text.split()),
        f"{1000 * answer.ttft:.0f}",
        str(answer.dram),
        str(answer.ssd),
        str(answer.computed),
    ]


def summary_table(records: Sequence[dict[str, Any]]) -> Table:
    """The summary as a table."""
    table = Table(
        title="Time to first token, medians",
        caption="Where hardly any was reused both sides compute the same, so that row "
        "shows how far equal work is apart on this machine.",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("KV of the prompt that was reused")
    for name in (
        "requests",
        "prompt tokens",
        "computed",
        "TTFT ms (mean)",
        "without cache, ms",
        "sooner",
    ):
        table.add_column(name, justify="right")
    for record in records:
        table.add_row(
            record["reused"],
            str(record["requests"]),
            f"{record['prompt_tokens']:.0f}",
            f"{record['computed_tokens']:.0f}",
            f"{record['ttft_ms']:.0f} ({record['ttft_ms_mean']:.0f})",
            f"{record['ttft_ms_uncached']:.0f}",
            f"{record['times_sooner']:.1f} x",
        )
    return table
