"""Retrievers over a staged index find what the frameworks' own find."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.runnables import RunnableLambda
from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.core.vector_stores.types import (
    BasePydanticVectorStore,
    VectorStoreQueryResult,
)

import pcr_integrations.langchain as lc
import pcr_integrations.llama_index as li
from pcr_core import Completion, ConfigError, EngineConfig, RequestError, SamplingParams
from pcr_integrations.retrieval import Stage, StagedFaissIndex
from pcr_integrations.retrieval.langchain import FaissRetriever as LangChainFaiss
from pcr_integrations.retrieval.llama_index import FaissRetriever as LlamaIndexFaiss
from pcr_integrations.speculation import SpeculationStats
from pcr_integrations.speculation._pace import Pace
from pcr_integrations.speculation._worker import WORKER
from tests.integrations.conftest import ScriptedEngine

faiss = pytest.importorskip("faiss")

DIMENSIONS = 8
TEXTS = [f"Page {i} is about the harbour, its piers and its boats." for i in range(40)]


@pytest.fixture(autouse=True)
def worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' searches take no time, so nothing would ever be started for them."""
    monkeypatch.setattr(Pace, "left", lambda self, stage: None)


def vector(text: str) -> list[float]:
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
    made: list[float] = np.random.default_rng(seed).standard_normal(DIMENSIONS).tolist()
    return made


class Hashed(Embeddings):
    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [vector(text) for text in texts]

    def embed_query(self, text: str) -> list[float]:
        return vector(text)


class HashedForLlamaIndex(BaseEmbedding):
    def _get_query_embedding(self, query: str) -> list[float]:
        return vector(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return vector(query)

    def _get_text_embedding(self, text: str) -> list[float]:
        return vector(text)


def ivf() -> Any:
    data = np.array([vector(text) for text in TEXTS], dtype=np.float32)
    index = faiss.index_factory(DIMENSIONS, "IVF8,Flat")
    index.cp.min_points_per_centroid = 1
    index.train(data)
    index.nprobe = 6
    return index


class Store:
    """LangChain's FAISS vector store: what ``from_store`` and a search use of it."""

    def __init__(self, *, normalize: bool = False) -> None:
        self.index = ivf()
        self.embedding_function: Any = Hashed()
        self.index_to_docstore_id = {i: f"id-{i}" for i in range(len(TEXTS))}
        documents = {
            f"id-{i}": Document(id=f"id-{i}", page_content=text)
            for i, text in enumerate(TEXTS)
        }
        self.docstore = SimpleNamespace(
            search=lambda name: documents.get(name, f"ID {name} not found.")
        )
        self._normalize_L2 = normalize
        data = np.array([vector(text) for text in TEXTS], dtype=np.float32)
        if normalize:
            faiss.normalize_L2(data)
        self.index.add(data)

    def search(self, query: str, k: int) -> list[Document]:
        """As ``similarity_search`` does."""
        asked = np.array([vector(query)], dtype=np.float32)
        if self._normalize_L2:
            faiss.normalize_L2(asked)
        _, numbers = self.index.search(asked, k)
        names = [self.index_to_docstore_id[i] for i in numbers[0].tolist() if i >= 0]
        return [self.docstore.search(name) for name in names]


class FaissStore(BasePydanticVectorStore):
    """LlamaIndex's ``FaissVectorStore``: the same, in its words."""

    stores_text: bool = False
    index: Any = None

    @property
    def client(self) -> Any:
        return self.index

    def add(self, nodes: Any, **_: Any) -> list[str]:
        first = self.index.ntotal
        for node in nodes:
            self.index.add(np.array([node.get_embedding()], dtype=np.float32))
        return [str(first + i) for i in range(len(nodes))]

    def delete(self, ref_doc_id: str, **_: Any) -> None:
        raise NotImplementedError

    def query(self, query: Any, **_: Any) -> VectorStoreQueryResult:
        asked = np.array([query.query_embedding], dtype=np.float32)
        distances, numbers = self.index.search(asked, query.similarity_top_k)
        found = [
            (distance, str(number))
            for distance, number in zip(
                distances[0].tolist(), numbers[0].tolist(), strict=True
            )
            if number >= 0
        ]
        return VectorStoreQueryResult(
            similarities=[distance for distance, _ in found],
            ids=[number for _, number in found],
        )


def vector_store_index() -> VectorStoreIndex:
    nodes = [TextNode(id_=f"node-{i}", text=text) for i, text in enumerate(TEXTS)]
    context = StorageContext.from_defaults(vector_store=FaissStore(index=ivf()))
    return VectorStoreIndex(
        nodes, storage_context=context, embed_model=HashedForLlamaIndex()
    )


QUERIES = ("Where are the boats?", "Which pier is new?", "When is high water?")


# --- LangChain ---


@pytest.mark.parametrize("normalize", [False, True])
def test_langchain_finds_what_the_store_finds(normalize: bool) -> None:
    store = Store(normalize=normalize)
    retriever = LangChainFaiss.from_store(store, k=5)
    for query in QUERIES:
        plain = store.search(query, 5)
        assert retriever.invoke(query) == plain
        assert asyncio.run(retriever.ainvoke(query)) == plain
    assert retriever.invoke(QUERIES[0], k=2) == store.search(QUERIES[0], 2)
    assert retriever.invoke(QUERIES[0], k=100) == store.search(QUERIES[0], 100)


def test_langchain_tells_of_each_stage_but_the_last() -> None:
    store = Store()
    retriever = LangChainFaiss.from_store(store, stages=(1, 3), k=4)
    seen: list[list[Document]] = []
    final = retriever.invoke(QUERIES[0], on_stage=seen.append)
    wide = []
    for probes in (1, 3, 6):
        store.index.nprobe = probes
        wide.append(store.search(QUERIES[0], 4))
    assert [*seen, final] == wide


def test_langchain_sees_what_is_added_and_leaves_out_what_has_no_document() -> None:
    store = Store()
    retriever = LangChainFaiss.from_store(store, k=3)
    best = retriever.invoke(QUERIES[0])
    number = int(best[0].id.removeprefix("id-"))
    del store.index_to_docstore_id[number]
    assert retriever.invoke(QUERIES[0]) == best[1:]


def test_from_store_says_what_it_takes() -> None:
    with pytest.raises(ConfigError, match="has no index, docstore"):
        LangChainFaiss.from_store(object())
    store = Store()
    store.embedding_function = vector
    with pytest.raises(ConfigError, match="plain function"):
        LangChainFaiss.from_store(store)


def test_an_embedding_of_another_dimension_is_refused() -> None:
    retriever = LangChainFaiss.from_store(Store())
    retriever.index = StagedFaissIndex(faiss.IndexFlatL2(3))
    with pytest.raises(RequestError, match="model that has embedded"):
        retriever.invoke(QUERIES[0])


# --- LlamaIndex ---


def shown(found: list[NodeWithScore]) -> list[tuple[str, Any]]:
    return [(one.node.node_id, one.score) for one in found]


def test_llama_index_finds_what_the_index_finds() -> None:
    index = vector_store_index()
    plain = index.as_retriever(similarity_top_k=5)
    staged = LlamaIndexFaiss.from_index(index, similarity_top_k=5)
    for query in QUERIES:
        expected = shown(plain.retrieve(query))
        assert len(expected) == 5
        assert shown(staged.retrieve(query)) == expected
        assert shown(asyncio.run(staged.aretrieve(query))) == expected
    bundle = QueryBundle("unused", embedding=vector(QUERIES[0]))
    assert shown(staged.retrieve(bundle)) == shown(plain.retrieve(bundle))


def test_llama_index_tells_of_each_stage_but_the_last() -> None:
    index = vector_store_index()
    staged = LlamaIndexFaiss.from_index(index, stages=(1, 3), similarity_top_k=4)
    seen: list[list[NodeWithScore]] = []
    final = staged._retrieve(QueryBundle(QUERIES[0]), on_stage=seen.append)
    wide = []
    for probes in (1, 3, 6):
        index.vector_store.client.nprobe = probes
        wide.append(shown(index.as_retriever(similarity_top_k=4).retrieve(QUERIES[0])))
    assert [shown(one) for one in [*seen, final]] == wide


def test_from_index_says_what_it_takes() -> None:
    with pytest.raises(ConfigError, match="VectorStoreIndex"):
        LlamaIndexFaiss.from_index(object())


# --- the wrappers ---


class PausedIndex(StagedFaissIndex):
    """Goes on with the search only when all that was begun beside it has ended."""

    engine: ScriptedEngine

    def stages(self, queries: Any, k: int) -> Iterator[Stage]:
        for stage in super().stages(queries, k):
            yield stage
            before = -1
            while not stage.last and before != len(self.engine._threads):
                before = len(self.engine._threads)
                for thread in list(self.engine._threads):
                    thread.join(60)
                assert WORKER.wait(60)


class IdleEngine(ScriptedEngine):
    """Also says whether it is idle."""

    @property
    def idle(self) -> bool:
        return all(completion.done for completion in self.completions)


@pytest.fixture
def engine() -> Iterator[IdleEngine]:
    made = IdleEngine(EngineConfig(model="scripted"))
    yield made
    made.close()


def context(found: list[Document]) -> str:
    return "Use this:\n" + "\n\n".join(one.page_content for one in found)


def staged(engine: IdleEngine, k: int = 2) -> LangChainFaiss:
    retriever = LangChainFaiss.from_store(Store(), k=k)
    index = PausedIndex(retriever.index.index, stages=(4, 5))
    index.engine = engine
    retriever.index = index
    return retriever


def test_langchain_speculates(engine: IdleEngine) -> None:
    inner = staged(engine)
    retriever = lc.PCRRetriever(inner=inner, speculate=True)
    llm = lc.ChatPCR(engine=engine, max_tokens=2)
    chain = retriever | RunnableLambda(context) | llm
    chain.invoke(QUERIES[0])
    assert retriever.speculation.unknown > 0  # nothing was known of the prompt yet
    assert retriever.speculation.launched == 0
    before = len(engine.submitted)
    chain.invoke(QUERIES[1])
    stats = retriever.speculation
    assert (stats.launched, stats.used, stats.failed) == (1, 1, 0)
    prompts = [prompt for prompt, _, _ in engine.submitted[before:]]
    contents = [prompt[-1]["content"] for prompt in prompts]
    assert contents == [
        context(inner.invoke(QUERIES[1])[:1]),
        context(inner.invoke(QUERIES[1])),
        context(inner.invoke(QUERIES[1])),
    ]
    assert stats.wasted_tokens == 0
    assert stats.hints >= 1
    for query in QUERIES:
        assert retriever.invoke(query) == inner.invoke(query)
        assert asyncio.run(retriever.ainvoke(query)) == inner.invoke(query)


def test_llama_index_speculates(engine: IdleEngine) -> None:
    index = vector_store_index()
    inner = LlamaIndexFaiss.from_index(index)
    paused = PausedIndex(inner.index.index, stages=(4, 5))
    paused.engine = engine
    inner.index = paused
    retriever = li.PCRRetriever(inner, speculate=True)
    llm = li.PCRLLM(engine=engine, max_tokens=2)
    plain = index.as_retriever(similarity_top_k=2)
    for query in QUERIES:
        found = retriever.retrieve(query)
        assert shown(found) == shown(plain.retrieve(query))
        assert shown(asyncio.run(retriever.aretrieve(query))) == shown(found)
        llm.complete("Use this:\n" + "\n\n".join(one.text for one in found))
    assert retriever.speculation.launched >= 2
    assert retriever.speculation.used == retriever.speculation.launched
    assert retriever.speculation.failed == 0


def test_an_engine_that_refuses_everything_changes_no_result(
    engine: IdleEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = staged(engine)
    retriever = lc.PCRRetriever(inner=inner, speculate=True)
    chain = retriever | RunnableLambda(context) | lc.ChatPCR(engine=engine)
    chain.invoke(QUERIES[0])

    def refuse(*_: Any, **__: Any) -> Completion:
        raise RequestError("no")

    monkeypatch.setattr(engine, "submit", refuse)
    monkeypatch.setattr(engine, "prefetch", refuse)
    assert retriever.invoke(QUERIES[1]) == inner.invoke(QUERIES[1])
    assert retriever.speculation.failed >= 2


def test_a_document_that_cannot_be_read_is_a_failure_of_the_final_one_only(
    engine: IdleEngine,
) -> None:
    inner = staged(engine)
    final = {one.id for one in inner.invoke(QUERIES[0], k=5)}

    def name(document: Document) -> str:
        assert document.id in final, "only a candidate"
        return str(document.id)

    retriever = lc.PCRRetriever(inner=inner, document_id=name, speculate=True, k=5)
    inner.index = StagedFaissIndex(inner.index.index, stages=(1, 2))
    assert len(retriever.invoke(QUERIES[0])) == 5
    assert retriever.speculation.failed >= 1
    assert "only a candidate" in retriever.speculation.last_error


def test_speculation_needs_stages_and_a_known_order() -> None:
    with pytest.raises(ConfigError, match="reports its stages"):
        lc.PCRRetriever(inner=RunnableLambda(lambda query: []), speculate=True)
    plain = vector_store_index().as_retriever()
    with pytest.raises(ConfigError, match="reports its stages"):
        li.PCRRetriever(plain, speculate=True)
    inner = LangChainFaiss.from_store(Store())
    with pytest.raises(ConfigError, match="order='cache'"):
        lc.PCRRetriever(inner=inner, order="cache", speculate=True)
    assert lc.PCRRetriever(inner=inner).speculation == SpeculationStats()


def test_copies_of_a_wrapper_share_their_speculator(engine: IdleEngine) -> None:
    retriever = lc.PCRRetriever(inner=staged(engine), speculate=True)
    assert copy.copy(retriever)._speculator is retriever._speculator
    assert copy.deepcopy(retriever._speculator) is retriever._speculator
    again = pickle.loads(pickle.dumps(retriever._speculator))
    assert again.stats == SpeculationStats()


def test_one_token_is_asked_for(engine: IdleEngine) -> None:
    inner = staged(engine)
    retriever = lc.PCRRetriever(inner=inner, speculate=True)
    chain = retriever | RunnableLambda(context) | lc.ChatPCR(engine=engine)
    chain.invoke(QUERIES[0])
    before = len(engine.submitted)
    retriever.invoke(QUERIES[1])
    asked = [params for _, params, _ in engine.submitted[before:]]
    assert asked == [SamplingParams(max_tokens=1)] * 2
