"""``FaissRetriever``: a LlamaIndex retriever that searches FAISS in stages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from pcr_core import ConfigError
from pcr_integrations._extras import needs_extra
from pcr_integrations.retrieval import Stage, StagedFaissIndex
from pcr_integrations.retrieval._schedule import Stages

with needs_extra("llama-index", package="llama_index"):
    from llama_index.core.base.base_retriever import BaseRetriever
    from llama_index.core.base.embeddings.base import BaseEmbedding
    from llama_index.core.callbacks import CallbackManager
    from llama_index.core.schema import BaseNode, NodeWithScore, QueryBundle

OnStage = Callable[[list[NodeWithScore]], None]
"""Called with the candidates after each stage but the last, best first."""


class FaissRetriever(BaseRetriever):
    """Finds what a ``VectorStoreIndex`` over FAISS finds, in stages.

    Scores are the distances of the index, as they are from LlamaIndex's
    ``FaissVectorStore``.

    Args:
        index: The index.
        nodes: Returns the node with an id of the index, or ``None`` if there is none:
            it is left out.
        embed_model: Embeds the query, unless the query bundle has an embedding.
        similarity_top_k: How many to find.
        callback_manager: As for any retriever.

    Example:
        >>> retriever = FaissRetriever.from_index(index)            # doctest: +SKIP
        >>> PCRRetriever(retriever, speculate=True)                 # doctest: +SKIP

    Any number of threads and event loops may use it at once, if the embedding model may
    be; see ``StagedFaissIndex``.

    Raises:
        RequestError: If the embedding has another dimension than the index.
    """

    def __init__(
        self,
        index: StagedFaissIndex,
        nodes: Callable[[int], BaseNode | None],
        embed_model: BaseEmbedding,
        *,
        similarity_top_k: int = 2,
        callback_manager: CallbackManager | None = None,
    ) -> None:
        super().__init__(callback_manager=callback_manager)
        self.index = index
        self.similarity_top_k = similarity_top_k
        self._nodes, self._embed_model = nodes, embed_model

    @classmethod
    def from_index(
        cls, index: Any, *, stages: Stages = 4, similarity_top_k: int = 2
    ) -> FaissRetriever:
        """Search a ``VectorStoreIndex`` whose vector store is a ``FaissVectorStore``.

        Shares its index and nodes. It equals ``index.as_retriever(similarity_top_k=)``.

        Args:
            index: The index.
            stages: See ``StagedFaissIndex``.
            similarity_top_k: How many to find.

        Raises:
            ConfigError: For an index over another store, or without stages.
        """
        try:
            client = index.vector_store.client
            nodes_dict, docstore = index.index_struct.nodes_dict, index.docstore
            embed_model = index._embed_model  # noqa: SLF001  (as_retriever takes it too)
        except AttributeError as error:
            raise ConfigError(
                "from_index takes a VectorStoreIndex over a FaissVectorStore, not "
                f"{type(index).__name__}: {error}"
            ) from error

        def node(number: int) -> BaseNode | None:
            name = nodes_dict.get(str(number))
            found = None if name is None else docstore.get_document(name, False)
            return found if isinstance(found, BaseNode) else None

        return cls(
            StagedFaissIndex(client, stages=stages),
            node,
            embed_model,
            similarity_top_k=similarity_top_k,
            callback_manager=index._callback_manager,  # noqa: SLF001
        )

    def _retrieve(
        self, query_bundle: QueryBundle, on_stage: OnStage | None = None
    ) -> list[NodeWithScore]:
        embedding = query_bundle.embedding
        if embedding is None:
            embedding = self._embed_model.get_agg_embedding_from_queries(
                query_bundle.embedding_strs
            )
        return self._search(embedding, on_stage)

    async def _aretrieve(
        self, query_bundle: QueryBundle, on_stage: OnStage | None = None
    ) -> list[NodeWithScore]:
        embedding = query_bundle.embedding
        if embedding is None:
            embedding = await self._embed_model.aget_agg_embedding_from_queries(
                query_bundle.embedding_strs
            )
        return await asyncio.to_thread(self._search, embedding, on_stage)

    def _search(
        self, embedding: list[float], on_stage: OnStage | None
    ) -> list[NodeWithScore]:
        for stage in self.index.stages(embedding, self.similarity_top_k):
            found = self._found(stage)
            if stage.last:
                return found
            if on_stage is not None:
                on_stage(found)
        raise AssertionError("a search has a last stage")

    def _found(self, stage: Stage) -> list[NodeWithScore]:
        found = []
        pairs = zip(stage.ids[0].tolist(), stage.distances[0].tolist(), strict=True)
        for number, distance in pairs:
            node = self._nodes(number) if number >= 0 else None
            if node is not None:
                found.append(NodeWithScore(node=node, score=distance))
        return found
