"""``FaissRetriever``: a LangChain retriever that searches FAISS in stages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import faiss
import numpy as np

from pcr_core import ConfigError
from pcr_integrations._extras import needs_extra
from pcr_integrations.retrieval import Stage, StagedFaissIndex
from pcr_integrations.retrieval._schedule import Stages

with needs_extra("langchain", package="langchain_core"):
    from langchain_core.callbacks import (
        AsyncCallbackManagerForRetrieverRun,
        CallbackManagerForRetrieverRun,
    )
    from langchain_core.documents import Document
    from langchain_core.embeddings import Embeddings
    from langchain_core.retrievers import BaseRetriever
    from pydantic import ConfigDict, Field

OnStage = Callable[[list[Document]], None]
"""Called with the candidates after each stage but the last, best first."""


class FaissRetriever(BaseRetriever):
    """Finds what LangChain's FAISS store finds by similarity, in stages.

    Args:
        index: The index.
        embedding: Embeds the query.
        documents: Returns the document with an id of the index, or ``None`` if there
            is none: it is left out.
        k: How many to find.
        normalize: Whether queries are scaled to length 1 first.

    Example:
        >>> retriever = FaissRetriever.from_store(store, k=3)     # doctest: +SKIP
        >>> PCRRetriever(inner=retriever, speculate=True)         # doctest: +SKIP

    Any number of threads and event loops may use it at once, if the embedding may be;
    see ``StagedFaissIndex``.

    Raises:
        RequestError: If the embedding has another dimension than the index.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    index: StagedFaissIndex
    embedding: Embeddings
    documents: Callable[[int], Document | None] = Field(exclude=True)
    k: int = Field(default=4, gt=0)
    normalize: bool = False

    @classmethod
    def from_store(
        cls, store: Any, *, stages: Stages = 4, k: int = 4
    ) -> FaissRetriever:
        """Search a ``langchain_community.vectorstores.FAISS``.

        Shares its index and documents: what is added to the store is found. It equals
        ``store.as_retriever(search_kwargs={"k": k})``, but that a vector without a
        document is left out rather than an error.

        Args:
            store: The store, or an object with the same attributes.
            stages: See ``StagedFaissIndex``.
            k: How many to find.

        Raises:
            ConfigError: For another object, or an index without stages.
        """
        wanted = ("index", "docstore", "index_to_docstore_id", "embedding_function")
        missing = [name for name in wanted if not hasattr(store, name)]
        if missing:
            raise ConfigError(
                f"from_store takes LangChain's FAISS vector store; "
                f"{type(store).__name__} has no {', '.join(missing)}"
            )
        embedding = store.embedding_function
        if not isinstance(embedding, Embeddings):
            raise ConfigError(
                "the store's embedding is a plain function; give the store an object "
                "of langchain_core.embeddings.Embeddings"
            )

        def document(number: int) -> Document | None:
            name = store.index_to_docstore_id.get(number)
            found = None if name is None else store.docstore.search(name)
            return found if isinstance(found, Document) else None

        return cls(
            index=StagedFaissIndex(store.index, stages=stages),
            embedding=embedding,
            documents=document,
            k=k,
            normalize=bool(getattr(store, "_normalize_L2", False)),
        )

    def _get_relevant_documents(
        self,
        query: str,
        *,
        run_manager: CallbackManagerForRetrieverRun,
        k: int | None = None,
        on_stage: OnStage | None = None,
    ) -> list[Document]:
        return self._search(self.embedding.embed_query(query), k, on_stage)

    async def _aget_relevant_documents(
        self,
        query: str,
        *,
        run_manager: AsyncCallbackManagerForRetrieverRun,
        k: int | None = None,
        on_stage: OnStage | None = None,
    ) -> list[Document]:
        vector = await self.embedding.aembed_query(query)
        return await asyncio.to_thread(self._search, vector, k, on_stage)

    def _search(
        self, embedded: Sequence[float], k: int | None, on_stage: OnStage | None
    ) -> list[Document]:
        vector = np.array([embedded], dtype=np.float32)
        if self.normalize:
            faiss.normalize_L2(vector)
        stages = self.index.stages(vector, self.k if k is None else k)
        for stage in stages:
            found = self._found(stage)
            if stage.last:
                return found
            if on_stage is not None:
                on_stage(found)
        raise AssertionError("a search has a last stage")

    def _found(self, stage: Stage) -> list[Document]:
        numbers = (number for number in stage.ids[0].tolist() if number >= 0)
        documents = (self.documents(number) for number in numbers)
        return [document for document in documents if document is not None]
