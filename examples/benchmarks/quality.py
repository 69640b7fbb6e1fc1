"""Whether answers change with reuse, and with the order of documents.

    python -m examples.benchmarks.quality

Real questions (NarrativeQA), each with two or three documents found by a real search,
the right one among them. Two tables, because they say different things:

1. The same prompts, with and without reuse. Whatever differs is due to reuse.
2. The same documents in another order. That is another prompt, and what differs is due
   to the model.

Exact match and F1 as SQuAD normalises them; a small model seldom says a reference
answer word for word, so what tells more is how likely it finds one (negative
log-likelihood per token), whether it says the same, and how far the distributions of
the next token are apart. For these the model is made to say the reference answer, by a
grammar of its tokens, so that all runs are compared behind the same words. DRAM holds a
few prompts only: hits come from all tiers, and stop within documents.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from examples.benchmarks.answer_scores import Difference, Quality, Reply
from examples.benchmarks.common import arguments
from examples.benchmarks.quality_asking import (
    Bench,
    Setting,
    by_cache,
    recomputed,
    stable,
    together,
    turned_round,
)
from examples.benchmarks.quality_questions import Asked, real_questions
from examples.benchmarks.report import Run

REFERENCES = (
    Setting("recompute, exact", True, 32, recomputed),
    Setting("recompute, not exact", False, 32, recomputed),
)
"""Each for the settings of its mode."""
REUSE = (
    Setting("exact, chunks of 32, alone", True, 32),
    Setting("exact, chunks of 32, batched", True, 32, together),
    Setting("exact, chunks of 128, alone", True, 128),
    Setting("not exact, chunks of 32, alone", False, 32),
    Setting("not exact, chunks of 32, batched", False, 32, together),
    Setting("not exact, chunks of 128, alone", False, 128),
    Setting("not exact, chunks of 128, batched", False, 128, together),
)
ORDERS = (
    Setting("stable", True, 32, order=stable),
    Setting("cache", True, 32, order=by_cache),
    Setting("reversed", True, 32, order=turned_round),
)


# --- what it adds up to ---


def share(part: int, whole: int) -> str:
    return f"{part} of {whole}"


def quality_cells(quality: Quality) -> list[str]:
    return [
        f"{quality.reused:.0%}",
        f"{100 * quality.exact_match:.1f}",
        f"{100 * quality.f1:.1f}",
        f"{100 * quality.contains:.1f}",
        f"{quality.nll:.3f}",
    ]


def difference_cells(found: Difference) -> list[str]:
    return [
        share(found.same_answers, found.questions),
        share(found.same_bits, found.questions),
        small(found.kl_mean),
        small(found.kl_most),
        "0" if found.nll == found.nll_error == 0 else
        f"{found.nll:+.2g} ±{found.nll_error:.1g}",
    ]  # fmt: skip


def small(value: float) -> str:
    return f"{value:.1e}" if value else "0"


QUALITY = ("reused", "EM", "F1", "contains", "NLL")
DIFFERENCE = ("same answer", "same bits", "KL mean", "KL most", "NLL - reference's")


class Tables:
    """Rows of both tables, and the raw figures, as settings are run.

    Args:
        dtype: Of the model.
        questions: Which have been asked.
        done: Called after each row.

    Attributes:
        figures: By name of the setting.
    """

    def __init__(
        self,
        dtype: str,
        questions: Sequence[Asked],
        done: Callable[[], None] = lambda: None,
    ) -> None:
        self._dtype, self._done = dtype, done
        self._answers = [asked.answers for asked in questions]
        self.figures: dict[str, Any] = {}

    def row(
        self,
        name: str,
        replies: Sequence[Reply],
        reference: Sequence[Reply],
        cache: dict[str, Any] | None = None,
    ) -> list[str]:
        """One row: how good, and how far from the reference; ``cache``: counters."""
        quality = Quality.of(replies, self._answers)
        difference = Difference.between(reference, replies)
        self.figures[name] = {
            "quality": asdict(quality),
            "difference": asdict(difference),
            "texts": [reply.text for reply in replies],
            "nll": [reply.nll for reply in replies],
            "cache": cache,
        }
        self._done()
        cells = quality_cells(quality), difference_cells(difference)
        return [self._dtype, name, *cells[0], *cells[1]]


def measure(bench: Bench, tables: Tables) -> tuple[list[list[str]], list[list[str]]]:
    """Rows of the same prompts, and of other orders."""
    ran = {setting.exact: bench.run(setting).replies for setting in REFERENCES}
    exact = ran[True]
    same = [
        tables.row(setting.name, ran[setting.exact], exact) for setting in REFERENCES
    ]
    same.append(tables.row("stock transformers", bench.stock(), exact))
    for setting in REUSE:
        found, reference = bench.run(setting), ran[setting.exact]
        same.append(tables.row(setting.name, found.replies, reference, found.cache))
    others = [tables.row("as found, recomputed", exact, exact)]
    for setting in ORDERS:
        found = bench.run(setting)
        others.append(tables.row(setting.name, found.replies, exact, found.cache))
    return same, others


@contextmanager
def folder_of(given: Path | None) -> Iterator[Path]:
    """The folder given, with what was measured of the model; or a temporary one."""
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--documents", type=int, default=16, help="that are searched")
    parser.add_argument("--words", type=int, default=120, help="of each document")
    parser.add_argument("--max-tokens", type=int, default=12, help="per answer")
    parser.add_argument("--dram", default="256MiB", help="budget of DRAM")
    parser.add_argument("--ssd", default="1GiB", help="budget of SSD")
    parser.add_argument("--cache-dir", type=Path, help="default: a temporary folder")
    parser.set_defaults(dtypes=["float32"])
    options = parser.parse_args()
    with Run("quality", options) as run:
        run.vouch()  # no figure depends on the clock
        torch.set_num_threads(1)  # for the search: the engines have their own threads
        questions = real_questions(options.documents, options.words, options.questions)
        same: list[list[str]] = []
        others: list[list[str]] = []
        with folder_of(options.cache_dir) as folder:
            for dtype in options.dtypes:
                tables = Tables(dtype, questions, run.save)
                run.figures[dtype] = tables.figures
                found = measure(Bench(questions, options, dtype, folder), tables)
                same += found[0]
                others += found[1]
        show(run, same, others)


def show(run: Run, same: list[list[str]], others: list[list[str]]) -> None:
    run.table(
        ("dtype", "same prompts", *QUALITY, *DIFFERENCE),
        same,
        title="Reuse on and off; differences from the recomputing run of the same mode "
        "(of the first three rows: from the first)",
    )
    run.table(
        ("dtype", "order", *QUALITY, *DIFFERENCE),
        others,
        title="Documents in another order: other prompts, so these differences are the "
        "model's",
    )


if __name__ == "__main__":
    main()
