"""Per-document statistics and ``explain`` in ordinary chains, on a real engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from langchain_core.documents import Document
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, TextNode

from pcr_core import RequestError
from pcr_integrations import langchain, llama_index

if TYPE_CHECKING:
    from pcr_core import Engine

MakeEngine = Callable[..., Any]
FOUND = [
    Document(id=name, page_content=f"The {name} has a page of its own, {name * 20}.")
    for name in ("ferry", "tides", "piers")
]
TEXT = "\n\n".join(one.page_content for one in FOUND)
TEMPLATE = ChatPromptTemplate.from_messages(
    [("system", "Use this:\n{context}"), ("human", "{question}")]
)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """On a busy machine two threads that wait for each other take 20 times longer."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _loop_of_this_thread() -> Iterator[None]:
    """LlamaIndex asks for the thread's loop, makes one if need be, never closes it."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    loop.close()
    asyncio.set_event_loop(None)


class Pages(BaseRetriever):
    """Finds the same nodes whatever it is asked."""

    def _retrieve(self, query_bundle: Any) -> list[NodeWithScore]:
        return [
            NodeWithScore(node=TextNode(id_=one.id or "", text=one.page_content))
            for one in FOUND
        ]


def langchain_chain(model: Any) -> Any:
    retriever = langchain.PCRRetriever(inner=RunnableLambda(lambda query: FOUND))
    joined = retriever | (lambda found: "\n\n".join(d.page_content for d in found))
    return {"context": joined, "question": lambda question: question} | TEMPLATE | model


def check(engine: Engine, records: list[dict[str, Any]], *, reused: bool) -> None:
    """The records of an answer: small, plain, and of the documents handed over."""
    assert json.loads(json.dumps(records)) == records
    assert [one["id"] for one in records] == [one.id for one in FOUND]
    for one, document in zip(records, FOUND, strict=True):
        assert set(one) == {"id", "tokens", "cached_tokens"}
        assert one["tokens"] == len(document.page_content)  # a token is a byte
        assert (one["cached_tokens"] > one["tokens"] - 32) is reused
    assert {one.id for one in engine.stats().documents} >= {d.id for d in FOUND}


def test_langchain_chat(real_engine: Engine) -> None:
    chain = langchain_chain(langchain.ChatPCR(engine=real_engine, max_tokens=2))
    first = chain.invoke("When does it leave?")
    check(real_engine, first.response_metadata["pcr"]["documents"], reused=False)
    whole = None
    for chunk in chain.stream("And when does it come?"):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    check(real_engine, whole.response_metadata["pcr"]["documents"], reused=True)
    plain = langchain.ChatPCR(engine=real_engine, max_tokens=2).invoke("hello")
    assert plain.response_metadata["pcr"]["documents"] == []


def test_langchain_text(real_engine: Engine) -> None:
    langchain.PCRRetriever(inner=RunnableLambda(lambda query: FOUND)).invoke("q")
    llm = langchain.PCRLLM(engine=real_engine, max_tokens=2)
    for reused in (False, True):
        ((found,),) = llm.generate([f"The text: {TEXT}\nq?"]).generations
        assert found.generation_info is not None
        check(real_engine, found.generation_info["pcr"]["documents"], reused=reused)


def test_llama_index(real_engine: Engine) -> None:
    llm = llama_index.PCRLLM(engine=real_engine, max_tokens=2)
    seen: list[dict[str, Any]] = []
    original = type(llm).chat

    class Watching(llama_index.PCRLLM):
        def chat(self, messages: Any, **kwargs: Any) -> Any:
            response = original(self, messages, **kwargs)
            seen.append(response.raw)
            return response

    query_engine = RetrieverQueryEngine.from_args(
        Pages(),
        llm=Watching(engine=real_engine, max_tokens=2),
        node_postprocessors=[llama_index.PCRPostprocessor()],
    )
    for question in ("When?", "Where?"):
        query_engine.query(question)
    cold, warm = (raw["pcr"]["documents"] for raw in seen)
    check(real_engine, cold, reused=False)
    check(real_engine, warm, reused=True)
    assert llm.complete("hello").raw["pcr"]["documents"] == []


# --- explain ---


def tool(city: str) -> str:
    """Look a city up."""
    return city


def test_explain_renders_as_a_call_does(real_engine: Engine) -> None:
    """Each prompt is asked, then explained: all of it but the end is there."""
    langchain.PCRRetriever(inner=RunnableLambda(lambda query: FOUND)).invoke("q")
    chat = langchain.ChatPCR(engine=real_engine, max_tokens=1)
    text = langchain.PCRLLM(engine=real_engine, max_tokens=1)
    llm = llama_index.PCRLLM(engine=real_engine, max_tokens=1)
    messages = [SystemMessage(f"Use this:\n{TEXT}"), HumanMessage("When, then?")]
    pairs: list[tuple[Any, Any]] = [
        (
            lambda: chat.invoke(messages).usage_metadata["input_tokens"],
            lambda: chat.explain(messages),
        ),
        (
            lambda: (
                chat.bind_tools([tool]).invoke(messages).usage_metadata["input_tokens"]
            ),
            lambda: chat.explain(messages, tools=[tool]),
        ),
        (
            lambda: chat.invoke(f"{TEXT}?").usage_metadata["input_tokens"],
            lambda: chat.explain(f"{TEXT}?"),
        ),
        (
            lambda: text.generate([f"{TEXT}!"]).llm_output["token_usage"][
                "prompt_tokens"
            ],
            lambda: text.explain(f"{TEXT}!"),
        ),
        (
            lambda: llm.chat([ChatMessage(content=f"{TEXT};")]).raw["usage"][
                "prompt_tokens"
            ],
            lambda: llm.explain([ChatMessage(content=f"{TEXT};")]),
        ),
        (
            lambda: llm.complete(f"{TEXT}:").raw["usage"]["prompt_tokens"],
            lambda: llm.explain(f"{TEXT}:"),
        ),
        (
            lambda: llm.complete(f"{TEXT}:", formatted=True).raw["usage"][
                "prompt_tokens"
            ],
            lambda: llm.explain(f"{TEXT}:", formatted=True),
        ),
    ]
    for ask, explain in pairs:
        size = ask()
        found = explain()
        assert found.prompt.tokens == size
        assert found.hit_tokens > size - 32
        assert [part.name for part in found.documents] == [d.id for d in FOUND]
        assert explain() == found


def test_explain_refuses_what_the_call_refuses(make_engine: MakeEngine) -> None:
    engine = make_engine()
    chat = langchain.ChatPCR(engine=engine)
    llm = llama_index.PCRLLM(engine=engine)
    for explain in (
        lambda: chat.explain("q", surprise=1),
        lambda: chat.explain("q", tools=[object()]),
        lambda: langchain.PCRLLM(engine=engine).explain("q", surprise=1),
        lambda: llm.explain("q", surprise=1),
        lambda: llm.explain([ChatMessage(content="q")], surprise=1),
    ):
        with pytest.raises(RequestError):
            explain()
    assert not engine.submitted
