"""``PCRPostprocessor``: the last node postprocessor of a query or chat engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import BaseNode, NodeWithScore, QueryBundle
from pydantic import Field, PrivateAttr

from pcr_integrations._fields import check_names
from pcr_integrations.documents import DocumentSource
from pcr_integrations.documents._source import SourceReports
from pcr_integrations.llama_index._nodes import in_order, items


class PCRPostprocessor(SourceReports, BaseNodePostprocessor):
    """Does for the final nodes of an engine what ``PCRRetriever`` does.

    Put it last in ``node_postprocessors``: it must see the nodes as the prompt will
    have them.

    Args:
        order: See ``PCRRetriever``, as for the others.
        score_tolerance: See there.
        document_id: See there.

    Example:
        >>> pcr = PCRPostprocessor()                                # doctest: +SKIP
        >>> index.as_query_engine(node_postprocessors=[pcr])        # doctest: +SKIP

    May be used from any number of threads and event loops at once.

    Raises:
        ConfigError: For an unknown or bad setting, at construction.
    """

    order: str = "retrieval"
    score_tolerance: float | None = None
    document_id: Callable[[BaseNode], str] | None = Field(default=None, exclude=True)

    _source: DocumentSource = PrivateAttr()

    def __init__(self, **settings: Any) -> None:
        check_names(type(self).model_fields, settings)
        super().__init__(**settings)
        name = "PCRPostprocessor"
        self._source = DocumentSource(name, self.order, self.score_tolerance)

    @classmethod
    def class_name(cls) -> str:
        """Return the name LlamaIndex stores in serialised components."""
        return "PCRPostprocessor"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        query = "" if query_bundle is None else query_bundle.query_str
        done = self._source.hand_over(query, items(nodes, self.document_id))
        return in_order(nodes, done)

    async def _apostprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        if self.order != "cache":
            return self._postprocess_nodes(nodes, query_bundle)
        return await asyncio.to_thread(self._postprocess_nodes, nodes, query_bundle)
