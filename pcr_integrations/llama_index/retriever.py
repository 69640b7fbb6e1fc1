"""``PCRRetriever``: a LlamaIndex retriever whose nodes the engine knows by name."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle

from pcr_integrations.documents import DocumentSource, Item
from pcr_integrations.documents._source import SourceReports
from pcr_integrations.llama_index._nodes import DocumentId, in_order, items
from pcr_integrations.speculation import Speculation, SpeculationStats, Speculator
from pcr_integrations.speculation._wrappers import speculator_for


class PCRRetriever(SourceReports, BaseRetriever):
    """Wraps a retriever; hands on the same nodes with the same scores.

    What it adds: the nodes are found in the prompts of ``PCRLLM``, so that
    ``engine.explain`` and ``engine.forget`` know them by their ids. Once a prompt with
    its nodes was seen, the beginning of the next one is predicted, and prefetched from
    SSD as soon as the nodes are known. Where a postprocessor changes the nodes, use
    ``PCRPostprocessor`` behind it instead.

    Events are emitted once, by this retriever, with the callback manager of ``inner``.

    Args:
        inner: A retriever.
        order: ``"retrieval"`` leaves the order alone. ``"stable"`` sorts by text, so
            that equal sets make equal prompts. ``"cache"`` takes the order of which
            most is stored; it asks the engine, so it waits for the running step.
        score_tolerance: With another order, no node is placed in front of one whose
            score is higher by more than this; ``None`` leaves scores out of account.
        document_id: Returns a node's id for ``engine.forget``. The default is
            ``node.node_id``; ``lambda node: node.ref_doc_id`` names the source.
        speculate: Let an idle engine compute what the search has found so far while it
            goes on. ``inner`` must report stages: ``retrieval.llama_index``'s
            ``FaissRetriever``. ``speculation`` counts.

    Example:
        >>> retriever = PCRRetriever(index.as_retriever())          # doctest: +SKIP
        >>> RetrieverQueryEngine.from_args(retriever, llm=PCRLLM()) # doctest: +SKIP

    May be used from any number of threads and event loops at once.

    Raises:
        ConfigError: For an unknown order or a negative tolerance, at construction.
    """

    def __init__(
        self,
        inner: BaseRetriever,
        *,
        order: str = "retrieval",
        score_tolerance: float | None = None,
        document_id: DocumentId | None = None,
        speculate: bool = False,
    ) -> None:
        super().__init__(
            callback_manager=inner.callback_manager,
            object_map=inner.object_map,
            verbose=inner._verbose,  # noqa: SLF001  (it has no other name)
        )
        self.inner = inner
        self._blocks = order == "cache"
        self._document_id = document_id
        name = f"PCRRetriever({type(inner).__name__})"
        self._source = DocumentSource(name, order, score_tolerance)
        self._speculator: Speculator | None = None
        if speculate:
            search = inner._retrieve  # noqa: SLF001  (see below)
            self._speculator = speculator_for(self._source, order, search)

    @property
    def speculation(self) -> SpeculationStats:
        """What was computed ahead, and what came of it; zeros without ``speculate``."""
        return (
            SpeculationStats() if self._speculator is None else self._speculator.stats
        )

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        if self._speculator is not None:
            with self._speculator.begin() as speculation:
                search: Any = self.inner._retrieve  # noqa: SLF001
                found = search(
                    query_bundle, on_stage=speculation.watcher(self._arranged)
                )
                return self._finish(query_bundle, found, speculation)
        if _has_own(self.inner, "retrieve"):
            found = self.inner.retrieve(query_bundle)
        else:
            # What ``retrieve`` adds, events and recursion, is added to this one.
            found = self.inner._retrieve(query_bundle)  # noqa: SLF001
        return self._hand_over(query_bundle, found)

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        if self._speculator is not None:
            with self._speculator.begin() as speculation:
                search: Any = self.inner._aretrieve  # noqa: SLF001
                found = await search(
                    query_bundle, on_stage=speculation.watcher(self._arranged)
                )
                return self._finish(query_bundle, found, speculation)
        if _has_own(self.inner, "aretrieve"):
            found = await self.inner.aretrieve(query_bundle)
        else:
            found = await self.inner._aretrieve(query_bundle)  # noqa: SLF001
        if not self._blocks:
            return self._hand_over(query_bundle, found)
        return await asyncio.to_thread(self._hand_over, query_bundle, found)

    def _arranged(self, found: list[NodeWithScore]) -> list[Item]:
        return self._source.arranged(items(found, self._document_id))

    def _finish(
        self, query: QueryBundle, found: list[NodeWithScore], speculation: Speculation
    ) -> list[NodeWithScore]:
        handed = self._hand_over(query, found)
        speculation.finish(items(handed, self._document_id))
        return handed

    def _hand_over(
        self, query: QueryBundle, found: list[NodeWithScore]
    ) -> list[NodeWithScore]:
        done = self._source.hand_over(query.query_str, items(found, self._document_id))
        return in_order(found, done)


def _has_own(retriever: BaseRetriever, method: str) -> bool:
    """Whether a retriever replaces what ``BaseRetriever`` does around a retrieval."""
    own = inspect.getattr_static(type(retriever), method)
    return own is not inspect.getattr_static(BaseRetriever, method)
