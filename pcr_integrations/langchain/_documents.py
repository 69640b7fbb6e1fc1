"""LangChain documents on their way through a wrapper."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.documents import Document

from pcr_core import Document as NamedText
from pcr_integrations.documents import Handover, Item


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads name and score of a document.

    Attributes:
        document_id: Returns a document's id; ``None`` means ``default_id``.
        score_key: Metadata key of its score.
    """

    document_id: Callable[[Document], str] | None
    score_key: str

    def items(self, documents: Sequence[Document]) -> list[Item]:
        """Return documents as the registry takes them."""
        return [self._item(document) for document in documents]

    def _item(self, document: Document) -> Item:
        text = document.page_content
        name = self.document_id or default_id
        forms = (NamedText(id=name(document), text=text),) if text.strip() else ()
        return Item(forms, _number(document.metadata.get(self.score_key)))


def in_order(documents: Sequence[Document], handover: Handover) -> list[Document]:
    """Return the same objects in the order in which they are handed over."""
    return [documents[index] for index in handover.order]


def default_id(document: Document) -> str:
    """Return its ``id``, or a digest of its text."""
    if document.id:
        return str(document.id)
    text = document.page_content.strip().encode("utf-8", "surrogatepass")
    return f"text-{hashlib.blake2b(text, digest_size=8).hexdigest()}"


def _number(score: Any) -> float | None:
    try:
        return None if score is None else float(score)
    except (TypeError, ValueError):
        return None
