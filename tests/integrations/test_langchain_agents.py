"""``create_agent`` and the retrieval chains, on a scripted engine."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import (
    ModelRetryMiddleware,
    SummarizationMiddleware,
    ToolCallLimitMiddleware,
)
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain.tools import tool
from langchain_classic.chains import create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from pydantic import BaseModel

from pcr_core import ModelError
from pcr_integrations.langchain import ChatPCR

MakeEngine = Callable[..., Any]
pytestmark = pytest.mark.timeout(60)

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
ASKED = {"messages": [{"role": "user", "content": "1 + 2?"}]}
DOCS = [Document("The Seine flows through Paris."), Document("Bern is on the Aare.")]


@tool
def add(a: int, b: int) -> int:
    """Add two integers."""
    if a < 0:
        raise ValueError("no negative numbers")
    return a + b


def an_agent(make_engine: MakeEngine, **options: Any) -> Any:
    engine = make_engine(reply=[f"Adding. {CALL}", "It is 3."])
    return create_agent(ChatPCR(engine=engine), tools=[add], **options)


# --- agents ---


@pytest.mark.parametrize("how", ["invoke", "ainvoke"])
def test_an_agent_finishes_a_tool_loop(make_engine: MakeEngine, how: str) -> None:
    agent = an_agent(make_engine, system_prompt="Be brief.")
    done = agent.invoke(ASKED) if how == "invoke" else asyncio.run(agent.ainvoke(ASKED))
    question, asked, told, answer = done["messages"]
    assert question.content == "1 + 2?"
    assert asked.tool_calls[0]["args"] == {"a": 1, "b": 2}
    assert (told.content, told.tool_call_id) == ("3", asked.tool_calls[0]["id"])
    assert answer.content == "It is 3."


def test_an_agent_streams_messages_token_by_token(make_engine: MakeEngine) -> None:
    stream = an_agent(make_engine).stream(ASKED, stream_mode="messages")
    pieces = [piece for piece, _ in stream]
    texts = [piece.content for piece in pieces if not isinstance(piece, ToolMessage)]
    assert [text for text in texts if text] == ["Adding.", " ", "It", " is", " 3."]
    assert any(getattr(piece, "tool_call_chunks", None) for piece in pieces)


@pytest.mark.parametrize("mode", ["values", "updates"])
def test_an_agent_streams_states(make_engine: MakeEngine, mode: str) -> None:
    steps = list(an_agent(make_engine).stream(ASKED, stream_mode=mode))
    last = steps[-1] if mode == "values" else steps[-1]["model"]
    assert last["messages"][-1].content == "It is 3."
    assert len(steps) == (4 if mode == "values" else 3)


@pytest.mark.skipif(
    sys.version_info < (3, 11),
    reason="agents lose their callbacks in tasks before Python 3.11",
)
def test_an_agents_events(make_engine: MakeEngine) -> None:
    agent = an_agent(make_engine)

    async def main() -> list[str]:
        events = agent.astream_events(ASKED, version="v2")
        return [event["event"] async for event in events]

    kinds = asyncio.run(main())
    assert kinds.count("on_chat_model_start") == 2
    assert kinds.count("on_chat_model_end") == 2
    assert kinds.count("on_tool_end") == 1
    assert kinds.count("on_chat_model_stream") > 4


class Sum(BaseModel):
    """A sum."""

    value: int


@pytest.mark.parametrize(
    ("strategy", "reply"),
    [
        (ToolStrategy(Sum), json.dumps({"name": "Sum", "arguments": {"value": 3}})),
        (ProviderStrategy(Sum), json.dumps({"value": 3})),
    ],
    ids=["tool", "provider"],
)
def test_an_agent_answers_with_an_object(
    make_engine: MakeEngine, strategy: Any, reply: str
) -> None:
    engine = make_engine(reply=[CALL, reply])
    agent = create_agent(ChatPCR(engine=engine), tools=[add], response_format=strategy)
    assert agent.invoke(ASKED)["structured_response"] == Sum(value=3)


def test_an_agents_tool_that_fails(make_engine: MakeEngine) -> None:
    bad = CALL.replace('"a": 1', '"a": "one"')
    engine = make_engine(reply=[bad, "Sorry."])
    done = create_agent(ChatPCR(engine=engine), tools=[add]).invoke(ASKED)
    assert done["messages"][2].status == "error"
    assert done["messages"][-1].content == "Sorry."
    assert engine.submitted[1][0][-1]["role"] == "tool"


def test_an_agent_summarises_when_the_profile_says_so(make_engine: MakeEngine) -> None:
    engine = make_engine(reply=["a summary", "the answer"], window=60)
    llm = ChatPCR(engine=engine)
    middleware = SummarizationMiddleware(
        llm, trigger=("fraction", 0.5), keep=("messages", 1)
    )
    history = [
        HumanMessage("word " * 20),
        AIMessage("word " * 20),
        HumanMessage("and now?"),
    ]
    middleware.summary_prompt = "Sum up: {messages}"  # its own is a page long
    agent = create_agent(llm, tools=[], middleware=[middleware])
    done = agent.invoke({"messages": history})
    assert done["messages"][-1].content == "the answer"
    assert any("a summary" in str(message.content) for message in done["messages"])


def test_an_agents_retries(make_engine: MakeEngine) -> None:
    engine = make_engine(reply=[ModelError("broken"), "There."])
    retry = ModelRetryMiddleware(max_retries=1, initial_delay=0, jitter=False)
    limit = ToolCallLimitMiddleware(run_limit=1)
    agent = create_agent(ChatPCR(engine=engine), [], middleware=[retry, limit])
    assert agent.invoke(ASKED)["messages"][-1].content == "There."
    assert len(engine.submitted) == 2


# --- chains ---

DOCS_FIRST = ChatPromptTemplate.from_messages(
    [("system", "Answer from:\n\n{context}"), ("human", "{input}")]
)
RETRIEVER = RunnableLambda(lambda _: DOCS)
CONTEXT = "The Seine flows through Paris.\n\nBern is on the Aare."


def test_stuff_and_retrieval_chain(make_engine: MakeEngine) -> None:
    engine = make_engine(reply="Through Paris.")
    stuff = create_stuff_documents_chain(ChatPCR(engine=engine), DOCS_FIRST)
    chain = create_retrieval_chain(RETRIEVER, stuff)
    assert chain.invoke({"input": "Where?"})["answer"] == "Through Paris."
    again = asyncio.run(chain.ainvoke({"input": "And Bern?"}))
    assert again["context"] == DOCS
    pieces = [one["answer"] for one in chain.stream({"input": "q"}) if "answer" in one]
    assert "".join(pieces) == "Through Paris."
    turns = engine.submitted[0][0]
    assert turns[0] == {"role": "system", "content": f"Answer from:\n\n{CONTEXT}"}
    assert turns[1] == {"role": "user", "content": "Where?"}


def test_lcel(make_engine: MakeEngine) -> None:
    engine = make_engine(reply="Through Paris.")
    join = RunnableLambda(lambda docs: "\n\n".join(d.page_content for d in docs))
    chain = (
        {"context": RETRIEVER | join, "input": RunnablePassthrough()}
        | DOCS_FIRST
        | ChatPCR(engine=engine)
        | StrOutputParser()
    )
    assert chain.invoke("Where?") == "Through Paris."
    assert "".join(chain.stream("Where?")) == "Through Paris."
    assert chain.batch(["a", "b"]) == ["Through Paris."] * 2
    assert asyncio.run(chain.ainvoke("Where?")) == "Through Paris."
    assert CONTEXT in engine.submitted[0][0][0]["content"]


def test_an_agent_with_a_retriever_tool(make_engine: MakeEngine) -> None:
    @tool
    def search(query: str) -> str:
        """Search."""
        return "\n\n".join(doc.page_content for doc in DOCS)

    call = '<tool_call>{"name": "search", "arguments": {"query": "Seine"}}</tool_call>'
    engine = make_engine(reply=[call, "Through Paris."])
    done = create_agent(ChatPCR(engine=engine), [search]).invoke(ASKED)
    assert done["messages"][-1].content == "Through Paris."
    assert engine.submitted[1][0][-1]["content"] == CONTEXT
