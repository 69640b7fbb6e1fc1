"""``PCRDocumentCompressor``: the last step of a compression pipeline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from langchain_core.callbacks import Callbacks
from langchain_core.documents import BaseDocumentCompressor, Document
from pydantic import Field, PrivateAttr

from pcr_integrations._fields import check_names
from pcr_integrations.documents import DocumentSource
from pcr_integrations.documents._source import SourceReports
from pcr_integrations.langchain._documents import Reader, in_order


class PCRDocumentCompressor(SourceReports, BaseDocumentCompressor):
    """Does for reranked or filtered documents what ``PCRRetriever`` does.

    Put it last in a ``DocumentCompressorPipeline``, or give it the compressor to wrap:
    it must see the documents as the prompt will have them.

    Args:
        inner: A compressor to run first, or ``None``.
        order: See ``PCRRetriever``, as for the others.
        score_tolerance: See there.
        score_key: See there.
        document_id: See there.

    May be used from any number of threads and event loops at once.

    Raises:
        ConfigError: For an unknown or bad setting, at construction.
    """

    inner: BaseDocumentCompressor | None = None
    order: str = "retrieval"
    score_tolerance: float | None = None
    score_key: str = "relevance_score"
    document_id: Callable[[Document], str] | None = Field(default=None, exclude=True)

    _source: DocumentSource = PrivateAttr()

    def __init__(self, **settings: Any) -> None:
        check_names(type(self).model_fields, settings)
        super().__init__(**settings)
        name = "PCRDocumentCompressor"
        self._source = DocumentSource(name, self.order, self.score_tolerance)

    def compress_documents(
        self,
        documents: Sequence[Document],
        query: str,
        callbacks: Callbacks | None = None,
    ) -> Sequence[Document]:
        """Hand on the documents, or what ``inner`` makes of them."""
        if self.inner is not None:
            documents = self.inner.compress_documents(documents, query, callbacks)
        return self._hand_over(documents, query)

    async def acompress_documents(
        self,
        documents: Sequence[Document],
        query: str,
        callbacks: Callbacks | None = None,
    ) -> Sequence[Document]:
        """As ``compress_documents``, without blocking the loop."""
        if self.inner is not None:
            documents = await self.inner.acompress_documents(
                documents, query, callbacks
            )
        if self.order != "cache":
            return self._hand_over(documents, query)
        return await asyncio.to_thread(self._hand_over, documents, query)

    def _hand_over(self, documents: Sequence[Document], query: str) -> list[Document]:
        items = Reader(self.document_id, self.score_key).items(documents)
        return in_order(documents, self._source.hand_over(query, items))
