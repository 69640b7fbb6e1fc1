"""Notices prompts whose documents stand behind what changes with every question."""

from __future__ import annotations

import warnings
from collections import OrderedDict

from pcr_integrations.documents._layouts import Front

_SHORTEST_QUERY = 8
_MOST_TEXTS = 64
_MOST_FRONTS = 3

_FINDING = (
    "the documents of {name} stand behind text that changes from prompt to prompt, so "
    "their KV cache cannot be reused. "
)
_REMEDY = (
    "Put instructions first, then documents, then the question: "
    "pcr_integrations.langchain.prompts and pcr_integrations.llama_index.prompts have "
    "such prompts for the usual chains. This is said once per retriever."
)
_TOOL_REMEDY = (
    "They are the result of a tool, which follows the question. Where every question "
    "needs documents, retrieve before the model is called and put them into the system "
    "message. This is said once per retriever."
)


class ReuseWarning(UserWarning):
    """A chain is built so that the KV cache of its documents cannot be reused."""


class QuestionFirst:
    """Watches the prompts of one retriever. No lock: its owner has one."""

    def __init__(self) -> None:
        self._fronts: OrderedDict[str, list[Front]] = OrderedDict()
        self._with_query: Front | None = None
        self._said = False

    def finding(self, front: Front, first_text: str, query: str) -> Front | None:
        """Return a front to warn about, once.

        Args:
            front: What precedes the first document of a prompt.
            first_text: That document.
            query: What it was searched with; ``""`` if not known.
        """
        if self._said:
            return None
        if self._holds_query(front, query) or self._keeps_changing(front, first_text):
            self._said = True
            return front
        return None

    def _holds_query(self, front: Front, query: str) -> bool:
        """The question is in front, as it was in an earlier prompt, another one."""
        query = query.strip()
        if len(query) < _SHORTEST_QUERY or query not in front.words:
            return False
        before, self._with_query = self._with_query, front
        return before is not None and before != front and front.is_like(before)

    def _keeps_changing(self, front: Front, text: str) -> bool:
        """One document had three different texts of one template in front of it."""
        seen = self._fronts.setdefault(text, [])
        self._fronts.move_to_end(text)
        if len(self._fronts) > _MOST_TEXTS:
            self._fronts.popitem(last=False)
        if front in seen:
            return False
        alike = sum(front.is_like(other) for other in seen)
        seen.append(front)
        del seen[:-_MOST_FRONTS]
        return alike >= _MOST_FRONTS - 1


def warn(front: Front, name: str) -> None:
    """Say it, with the remedy."""
    remedy = _TOOL_REMEDY if front.in_tool_result else _REMEDY
    warnings.warn(_FINDING.format(name=name) + remedy, ReuseWarning, stacklevel=2)
