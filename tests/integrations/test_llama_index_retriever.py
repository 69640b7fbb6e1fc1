"""``PCRRetriever`` and ``PCRPostprocessor``: the same nodes, known by name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.callbacks import CallbackManager, LlamaDebugHandler
from llama_index.core.callbacks.schema import CBEventType
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.retrieval import (
    RetrievalEndEvent,
    RetrievalStartEvent,
)
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import (
    IndexNode,
    MetadataMode,
    NodeWithScore,
    QueryBundle,
    TextNode,
)

from pcr_core import ConfigError
from pcr_integrations.llama_index import PCRLLM, PCRPostprocessor, PCRRetriever

MakeEngine = Callable[..., Any]
NODES = [
    NodeWithScore(
        node=TextNode(
            id_=name,
            text=f"  The {name} of the documents.",
            metadata={"file": f"{name}.txt"},
        ),
        score=score,
    )
    for name, score in (("first", 0.9), ("second", 0.8), ("third", 0.1))
]


class Fixed(BaseRetriever):
    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return list(NODES)


class Events(BaseEventHandler):
    seen: list[Any]

    def handle(self, event: Any, **kwargs: Any) -> None:
        if isinstance(event, (RetrievalStartEvent, RetrievalEndEvent)):
            self.seen.append(type(event))


@pytest.fixture
def events() -> Iterator[Events]:
    handler, root = Events(seen=[]), get_dispatcher()
    root.add_event_handler(handler)
    yield handler
    root.event_handlers.remove(handler)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_same_nodes_and_events_once(events: Events, mode: str) -> None:
    debug = LlamaDebugHandler(print_trace_on_end=False)
    inner = Fixed(callback_manager=CallbackManager([debug]))
    retriever = PCRRetriever(inner)
    if mode == "sync":
        found = retriever.retrieve("q")
    else:
        found = asyncio.run(retriever.aretrieve("q"))
    assert [id(one) for one in found] == [id(one) for one in NODES]
    assert events.seen == [RetrievalStartEvent, RetrievalEndEvent]
    assert len(debug.get_event_pairs(CBEventType.RETRIEVE)) == 1
    assert retriever.last is not None
    assert retriever.last.ids == ("first", "second", "third")


def test_nodes_that_stand_for_others_are_followed() -> None:
    class Pointing(BaseRetriever):
        def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
            return [NodeWithScore(node=IndexNode(text="to it", index_id="x"), score=1)]

    objects = {"x": TextNode(id_="target", text="What the index node stands for.")}
    inner = Pointing(object_map=objects)
    (found,) = PCRRetriever(inner).retrieve("q")
    assert found.node_id == "target"


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_retriever_with_a_retrieve_of_its_own(mode: str) -> None:
    class Own(Fixed):
        def retrieve(self, str_or_query_bundle: Any) -> list[NodeWithScore]:
            return NODES[:1]

        async def aretrieve(self, str_or_query_bundle: Any) -> list[NodeWithScore]:
            return NODES[:2]

    retriever = PCRRetriever(Own())
    if mode == "sync":
        assert retriever.retrieve("q") == NODES[:1]
    else:
        assert asyncio.run(retriever.aretrieve("q")) == NODES[:2]


@pytest.mark.parametrize("wrapped", ["retriever", "postprocessor"])
def test_the_engine_knows_the_nodes(make_engine: MakeEngine, wrapped: str) -> None:
    engine = make_engine()
    llm = PCRLLM(engine=engine)
    last = PCRPostprocessor()
    answers = (
        RetrieverQueryEngine.from_args(PCRRetriever(Fixed()), llm=llm)
        if wrapped == "retriever"
        else RetrieverQueryEngine.from_args(
            Fixed(), llm=llm, node_postprocessors=[last]
        )
    )
    answers.query("Which?")
    assert engine.documents == [["first", "second", "third"]]
    asyncio.run(answers.aquery("Which one?"))
    assert engine.documents[1] == ["first", "second", "third"]
    if wrapped == "postprocessor":
        assert (last.stats.predicted, last.stats.confirmed) == (1, 1)


def test_the_text_alone_is_found_too(make_engine: MakeEngine) -> None:
    engine = make_engine()
    PCRRetriever(Fixed()).retrieve("q")
    text = NODES[1].node.get_content(metadata_mode=MetadataMode.NONE)
    PCRLLM(engine=engine).complete(f"Source 1:\n{text}")
    assert engine.documents == [["second"]]


def test_nodes_cut_to_fit_the_window_are_known(make_engine: MakeEngine) -> None:
    class Long(BaseRetriever):
        def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
            return [
                NodeWithScore(
                    node=TextNode(
                        id_=name,
                        text=" ".join(
                            f"Line {n} of {name} is here." for n in range(60)
                        ),
                    )
                )
                for name in ("one", "two", "three")
            ]

    engine = make_engine(reply="Yes.")
    llm = PCRLLM(engine=engine, max_tokens=50, context_window=900)
    RetrieverQueryEngine.from_args(PCRRetriever(Long()), llm=llm).query("Which?")
    assert len(engine.documents) > 1
    for (turns, _, _), ids in zip(engine.submitted, engine.documents, strict=True):
        content = " ".join(turn["content"] for turn in turns)
        lines = {name: content.count(f"of {name}") for name in ("one", "two", "three")}
        assert {name for name in lines if lines[name] > 8} <= set(ids)
        assert set(ids) <= {name for name in lines if lines[name]}
    assert {id for ids in engine.documents for id in ids} == {"one", "two", "three"}


def test_orders_and_ids() -> None:
    post = PCRPostprocessor(
        order="stable", document_id=lambda node: node.metadata["file"]
    )
    query = QueryBundle("q")
    one = post.postprocess_nodes(list(NODES), query)
    other = post.postprocess_nodes(NODES[::-1])
    assert [node.node_id for node in one] == [node.node_id for node in other]
    assert post.last is not None
    assert set(post.last.ids) == {"first.txt", "second.txt", "third.txt"}
    near = PCRPostprocessor(order="stable", score_tolerance=0.2)
    assert near.postprocess_nodes(list(NODES), query)[2] is NODES[2]
    assert asyncio.run(near.apostprocess_nodes(list(NODES), query))[2] is NODES[2]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_order_of_which_most_is_cached(make_engine: MakeEngine, mode: str) -> None:
    class Turning(BaseRetriever):
        nodes: Sequence[NodeWithScore] = NODES

        def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
            return list(self.nodes)

    engine, inner = make_engine(), Turning()
    retriever = PCRRetriever(inner, order="cache")
    answers = RetrieverQueryEngine.from_args(retriever, llm=PCRLLM(engine=engine))
    answers.query("Which?")
    inner.nodes = NODES[::-1]
    if mode == "sync":
        found = answers.query("Which of them?").source_nodes
    else:
        found = asyncio.run(answers.aquery("Which of them?")).source_nodes
    assert found == NODES
    assert retriever.last is not None
    assert retriever.last.order == (2, 1, 0)
    assert PCRPostprocessor(order="cache").class_name() == "PCRPostprocessor"
    kept = PCRPostprocessor(order="cache").postprocess_nodes(list(NODES))
    assert kept == NODES
    assert (
        asyncio.run(PCRPostprocessor(order="cache").apostprocess_nodes(kept)) == NODES
    )


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="order='random'"):
        PCRRetriever(Fixed(), order="random")
    with pytest.raises(ConfigError, match="did you mean 'order'"):
        PCRPostprocessor(oder="stable")
