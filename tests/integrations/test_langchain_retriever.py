"""``PCRRetriever`` and ``PCRDocumentCompressor``: the same documents, known by name."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from typing import Any
from uuid import UUID

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import BaseDocumentCompressor, Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda
from pydantic import Field

from pcr_core import ConfigError, RequestError
from pcr_integrations.documents import DocumentRegistry
from pcr_integrations.langchain import (
    ChatPCR,
    PCRDocumentCompressor,
    PCRRetriever,
)

MakeEngine = Callable[..., Any]
FOUND = [
    Document(
        id="a",
        page_content="  First of the three documents.\n",
        metadata={"relevance_score": 0.9},
    ),
    Document(page_content="Second of the three documents.", metadata={"n": 2}),
    Document(
        id="c",
        page_content="Third of the three documents.",
        metadata={"relevance_score": "0.5"},
    ),
]


class Fixed(BaseRetriever):
    calls: list[dict[str, Any]] = Field(default_factory=list)

    def _get_relevant_documents(
        self, query: str, *, run_manager: Any, **kwargs: Any
    ) -> list[Document]:
        self.calls.append(kwargs)
        return FOUND[: kwargs.get("k", 3)]

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: Any, **kwargs: Any
    ) -> list[Document]:
        return FOUND[: kwargs.get("k", 3)]


class Plain(BaseRetriever):
    def _get_relevant_documents(
        self, query: str, *, run_manager: Any
    ) -> list[Document]:
        return FOUND


class Recorder(BaseCallbackHandler):
    def __init__(self) -> None:
        self.started: list[tuple[str, UUID, UUID | None]] = []
        self.ended = 0

    def on_retriever_start(
        self, serialized: Any, query: str, *, run_id: UUID, **kwargs: Any
    ) -> None:
        self.started.append((kwargs["name"], run_id, kwargs["parent_run_id"]))

    def on_retriever_end(self, documents: Any, **kwargs: Any) -> None:
        self.ended += 1


def test_the_same_documents_in_the_same_order() -> None:
    retriever = PCRRetriever(inner=Fixed())
    before = copy.deepcopy(FOUND)
    for found in (retriever.invoke("q"), asyncio.run(retriever.ainvoke("q"))):
        assert [id(one) for one in found] == [id(one) for one in FOUND]
    assert before == FOUND
    assert retriever.last is not None
    assert retriever.last.order == (0, 1, 2)
    assert retriever.last.ids[0] == "a"


def test_options_of_the_search_are_handed_through() -> None:
    inner = Fixed()
    retriever = PCRRetriever(inner=inner, k=2)
    assert len(retriever.invoke("q")) == 2
    assert len(retriever.invoke("q", k=1, filter="x")) == 1
    assert inner.calls == [{"k": 2}, {"k": 1, "filter": "x"}]
    assert len(asyncio.run(retriever.ainvoke("q", k=1))) == 1


def test_options_that_would_be_dropped_are_refused() -> None:
    with pytest.raises(RequestError, match="Plain takes no search options, but got k"):
        PCRRetriever(inner=Plain(), k=2).invoke("q")


def test_a_runnable_as_retriever() -> None:
    retriever = PCRRetriever(inner=RunnableLambda(lambda query: FOUND[:1]))
    assert retriever.invoke("q") == FOUND[:1]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_callbacks_are_nested_and_come_once(mode: str) -> None:
    recorder = Recorder()
    retriever = PCRRetriever(inner=Fixed())
    config: Any = {"callbacks": [recorder]}
    if mode == "sync":
        retriever.invoke("q", config)
    else:
        asyncio.run(retriever.ainvoke("q", config))
    (outer, run, parent), (inner, _, of_inner) = recorder.started
    assert (outer, inner, parent, of_inner) == ("PCRRetriever", "Fixed", None, run)
    assert recorder.ended == 2


def test_the_engine_knows_the_documents_by_their_ids(make_engine: MakeEngine) -> None:
    engine = make_engine()
    found = PCRRetriever(inner=Fixed()).invoke("q")
    ChatPCR(engine=engine).invoke(" ".join(one.page_content for one in found))
    ((first, second, third),) = engine.documents
    assert (first, third) == ("a", "c")
    assert second.startswith("text-")
    named = PCRRetriever(inner=Fixed(), document_id=lambda one: f"n{one.metadata}")
    named.invoke("q")
    assert named.last is not None
    assert named.last.ids[1] == "n{'n': 2}"


def test_documents_without_text_are_handed_on() -> None:
    empty = [Document(page_content=" "), *FOUND[:1]]
    retriever = PCRRetriever(inner=RunnableLambda(lambda query: empty))
    assert retriever.invoke("q") == empty
    assert retriever.last is not None
    assert retriever.last.ids == ("a",)


def test_the_stable_order() -> None:
    flipped = RunnableLambda(lambda query: FOUND[::-1])
    one = PCRRetriever(inner=Fixed(), order="stable")
    other = PCRRetriever(inner=flipped, order="stable")
    assert one.invoke("q") == other.invoke("q")
    assert one.last is not None
    assert other.last is not None
    assert one.last.order == tuple(2 - index for index in other.last.order)
    assert sum(r.stats.reordered for r in (one, other)) >= 1
    # One of the documents has no score.
    kept = PCRRetriever(inner=Fixed(), order="stable", score_tolerance=0.1)
    assert kept.invoke("q") == FOUND


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_order_of_which_most_is_cached(make_engine: MakeEngine, mode: str) -> None:
    engine = make_engine()
    model = ChatPCR(engine=engine)
    orders = [FOUND, FOUND[::-1], [FOUND[1], FOUND[2], FOUND[0]]]
    inner = RunnableLambda(lambda query: orders[int(query)])
    retriever = PCRRetriever(inner=inner, order="cache")

    def ask(query: str) -> list[Document]:
        if mode == "sync":
            found = retriever.invoke(query)
        else:
            found = asyncio.run(retriever.ainvoke(query))
        text = "\n".join(one.page_content for one in found)
        model.invoke(f"Read this:\n{text}\nquestion {query}")
        return found

    assert ask("0") == FOUND
    assert retriever.last is not None
    assert retriever.last.cached_tokens is None  # no prompt was seen before
    assert ask("1") == FOUND
    assert (retriever.last.order, retriever.stats.reordered) == ((2, 1, 0), 1)
    assert retriever.last.cached_tokens is not None
    assert retriever.last.cached_tokens > 10
    assert ask("2") == FOUND
    assert retriever.last.order == (2, 0, 1)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="order='random'"):
        PCRRetriever(inner=Fixed(), order="random")
    with pytest.raises(ConfigError, match="did you mean 'order'"):
        PCRRetriever(inner=Fixed(), ordr="stable")
    with pytest.raises(ConfigError, match="score_tolerance"):
        PCRDocumentCompressor(score_tolerance=-1)


class LastFirst(BaseDocumentCompressor):
    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Any = None
    ) -> Sequence[Document]:
        return list(documents)[::-1][:2]


def test_the_compressor(known_documents: DocumentRegistry) -> None:
    alone = PCRDocumentCompressor()
    assert alone.compress_documents(FOUND, "q") == FOUND
    assert len(known_documents) == 3
    known_documents.clear()
    around = PCRDocumentCompressor(inner=LastFirst())
    expected = [FOUND[2], FOUND[1]]
    assert around.compress_documents(FOUND, "q") == expected
    assert asyncio.run(around.acompress_documents(FOUND, "q")) == expected
    assert len(known_documents) == 2
    assert around.last is not None
    assert around.last.ids[0] == "c"
    assert around.stats.retrievals == 2
    cached = PCRDocumentCompressor(order="cache")
    assert asyncio.run(cached.acompress_documents(FOUND, "q")) == FOUND
