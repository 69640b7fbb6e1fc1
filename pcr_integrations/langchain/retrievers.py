"""``PCRRetriever``: a LangChain retriever whose documents the engine knows by name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from langchain_core.callbacks import (
    AsyncCallbackManagerForRetrieverRun,
    CallbackManagerForRetrieverRun,
)
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableConfig
from pydantic import Field, PrivateAttr

from pcr_core import RequestError
from pcr_integrations._fields import check_names
from pcr_integrations.documents import DocumentSource, Item
from pcr_integrations.documents._source import SourceReports
from pcr_integrations.langchain._documents import Reader, in_order
from pcr_integrations.speculation import Speculation, SpeculationStats, Speculator
from pcr_integrations.speculation._wrappers import speculator_for


class PCRRetriever(SourceReports, BaseRetriever):
    """Wraps a retriever; hands on the same documents.

    What it adds: the documents are found in the prompts of ``ChatPCR`` and ``PCRLLM``,
    so that ``engine.explain`` and ``engine.forget`` know them by their ids. Once a
    prompt with its documents was seen, the beginning of the next one is predicted, and
    prefetched from SSD as soon as the documents are known.

    Args:
        inner: A retriever, or another runnable from a query to documents.
        k: Number of documents, passed on to ``inner``; a call's own ``k`` comes first.
        order: ``"retrieval"`` leaves the order alone. ``"stable"`` sorts by text, so
            that equal sets make equal prompts. ``"cache"`` takes the order of which
            most is stored; it asks the engine, so it waits for the running step.
        score_tolerance: With another order, no document is placed in front of one whose
            score is higher by more than this; ``None`` leaves scores out of account.
        score_key: Metadata key of the score.
        document_id: Returns a document's id for ``engine.forget``. The default is
            ``document.id``, or a digest of the text.
        speculate: Let an idle engine compute what the search has found so far while it
            goes on. ``inner`` must report stages: ``retrieval.langchain``'s
            ``FaissRetriever``. ``speculation`` counts.

    Example:
        >>> retriever = PCRRetriever(inner=store.as_retriever())   # doctest: +SKIP
        >>> retriever.invoke("When is high water?", k=2)           # doctest: +SKIP
        >>> print(retriever.stats)                                 # doctest: +SKIP

    May be used from any number of threads and event loops at once.

    Raises:
        ConfigError: For an unknown or bad setting, at construction.
        RequestError: For search options that ``inner`` does not take.
    """

    inner: Runnable[str, list[Document]]
    k: int | None = Field(default=None, gt=0)
    order: str = "retrieval"
    score_tolerance: float | None = None
    score_key: str = "relevance_score"
    document_id: Callable[[Document], str] | None = Field(default=None, exclude=True)
    speculate: bool = False

    _source: DocumentSource = PrivateAttr()
    _speculator: Speculator | None = PrivateAttr(default=None)

    def __init__(self, **settings: Any) -> None:
        check_names(type(self).model_fields, settings)
        super().__init__(**settings)
        name = f"PCRRetriever({type(self.inner).__name__})"
        self._source = DocumentSource(name, self.order, self.score_tolerance)
        if self.speculate:
            search = getattr(self.inner, "_get_relevant_documents", self.inner.invoke)
            self._speculator = speculator_for(self._source, self.order, search)

    @property
    def speculation(self) -> SpeculationStats:
        """What was computed ahead, and what came of it; zeros without ``speculate``."""
        return (
            SpeculationStats() if self._speculator is None else self._speculator.stats
        )

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        child = RunnableConfig(callbacks=run_manager.get_child())
        options = self._search_options(kwargs)
        if self._speculator is None:
            return self._hand_over(query, self.inner.invoke(query, child, **options))
        with self._speculator.begin() as speculation:
            watch = speculation.watcher(self._arranged)
            found = self.inner.invoke(query, child, on_stage=watch, **options)
            return self._finish(query, found, speculation)

    async def _aget_relevant_documents(
        self,
        query: str,
        *,
        run_manager: AsyncCallbackManagerForRetrieverRun,
        **kwargs: Any,
    ) -> list[Document]:
        child = RunnableConfig(callbacks=run_manager.get_child())
        options = self._search_options(kwargs)
        if self._speculator is not None:
            with self._speculator.begin() as speculation:
                watch = speculation.watcher(self._arranged)
                found = await self.inner.ainvoke(
                    query, child, on_stage=watch, **options
                )
                return self._finish(query, found, speculation)
        found = await self.inner.ainvoke(query, child, **options)
        if self.order != "cache":
            return self._hand_over(query, found)
        return await asyncio.to_thread(self._hand_over, query, found)

    def _arranged(self, found: list[Document]) -> list[Item]:
        items = Reader(self.document_id, self.score_key).items(found)
        return self._source.arranged(items)

    def _finish(
        self, query: str, found: list[Document], speculation: Speculation
    ) -> list[Document]:
        handed = self._hand_over(query, found)
        speculation.finish(Reader(self.document_id, self.score_key).items(handed))
        return handed

    def _hand_over(self, query: str, found: list[Document]) -> list[Document]:
        items = Reader(self.document_id, self.score_key).items(found)
        return in_order(found, self._source.hand_over(query, items))

    def _search_options(self, given: dict[str, Any]) -> dict[str, Any]:
        options = {**({} if self.k is None else {"k": self.k}), **given}
        if options and _drops_options(self.inner):
            raise RequestError(
                f"{type(self.inner).__name__} takes no search options, but got "
                f"{', '.join(sorted(options))}; set them on the retriever itself"
            )
        return options


def _drops_options(inner: Runnable[str, list[Document]]) -> bool:
    """Whether a retriever would drop the options of a call without a word."""
    return isinstance(inner, BaseRetriever) and not inner._expects_other_args  # noqa: SLF001
