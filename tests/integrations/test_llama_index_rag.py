"""``PCRLLM`` inside LlamaIndex: query engines, chat engines, tools, structure."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from llama_index.core import PromptTemplate
from llama_index.core.base.llms.types import ChatMessage, TextBlock, ToolCallBlock
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.core.tools import FunctionTool
from pydantic import BaseModel

from pcr_integrations.llama_index import PCRLLM

MakeEngine = Callable[..., Any]
pytestmark = pytest.mark.timeout(120)

DOCS = ["The Seine flows through Paris.", "The Thames flows through London."]


@pytest.fixture(autouse=True)
def _loop_of_this_thread() -> Iterator[None]:
    """LlamaIndex asks for the thread's loop, makes one if need be, never closes it."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    loop.close()
    asyncio.set_event_loop(None)


class Fixed(BaseRetriever):
    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [NodeWithScore(node=TextNode(text=text), score=1.0) for text in DOCS]


@pytest.mark.parametrize(
    "mode", ["compact", "refine", "tree_summarize", "accumulate", "simple_summarize"]
)
@pytest.mark.parametrize("chat", [True, False])
def test_query_engines(make_engine: MakeEngine, mode: str, chat: bool) -> None:
    engine = make_engine(reply="Paris.", chat=chat)
    llm = PCRLLM(engine=engine)
    answers = RetrieverQueryEngine.from_args(Fixed(), llm=llm, response_mode=mode)
    assert "Paris." in str(answers.query("Which city?"))
    assert "Paris." in str(asyncio.run(answers.aquery("Which city?")))
    prompt, _, _ = engine.submitted[0]
    assert isinstance(prompt, list) is chat
    assert "The Seine flows through Paris." in engine.render(prompt)


def test_documents_are_reused_on_the_second_question(make_engine: MakeEngine) -> None:
    engine = make_engine()
    answers = RetrieverQueryEngine.from_args(Fixed(), llm=PCRLLM(engine=engine))
    answers.query("First question?")
    answers.query("Second question?")
    usage = engine.completions[1].result().usage
    assert usage.cached_tokens > usage.prompt_tokens / 2


# --- tools ---

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


ADD = FunctionTool.from_defaults(add)


def test_tools_reach_the_template_and_calls_come_back(make_engine: MakeEngine) -> None:
    engine = make_engine(reply=f"Adding. {CALL}")
    llm = PCRLLM(engine=engine)
    response = llm.chat_with_tools([ADD], user_msg="1 + 2?")
    ((turns, _, tools),) = engine.submitted
    assert turns == [{"role": "user", "content": "1 + 2?"}]
    assert tools[0]["function"]["name"] == "add"
    assert response.message.content == "Adding. "
    (selection,) = llm.get_tool_calls_from_response(response)
    assert (selection.tool_name, selection.tool_kwargs) == ("add", {"a": 1, "b": 2})
    assert response.raw["finish_reason"] == "tool_calls"


def test_tools_in_streams(make_engine: MakeEngine) -> None:
    llm = PCRLLM(engine=make_engine(reply=f"Adding. {CALL}"))

    async def last() -> Any:
        stream = await llm.astream_chat_with_tools([ADD], user_msg="1 + 2?")
        return [response async for response in stream][-1]

    for end in (
        list(llm.stream_chat_with_tools([ADD], "1 + 2?"))[-1],
        asyncio.run(last()),
    ):
        assert end.message.content == "Adding. "
        (call,) = llm.get_tool_calls_from_response(end)
        assert call.tool_kwargs == {"a": 1, "b": 2}


def test_one_call_unless_more_are_welcome(make_engine: MakeEngine) -> None:
    llm = PCRLLM(engine=make_engine(reply=CALL + CALL))
    one = llm.chat_with_tools([ADD], "q")
    two = llm.chat_with_tools([ADD], "q", allow_parallel_tool_calls=True)
    assert len(llm.get_tool_calls_from_response(one)) == 1
    assert len(llm.get_tool_calls_from_response(two)) == 2


def test_no_call(make_engine: MakeEngine) -> None:
    llm = PCRLLM(engine=make_engine(reply="I cannot."))
    response = llm.chat_with_tools([ADD], "q", tool_required=True)
    assert llm.get_tool_calls_from_response(response, error_on_no_tool_call=False) == []
    with pytest.raises(ValueError, match=r"'I cannot\.'"):
        llm.get_tool_calls_from_response(response)


def test_a_broken_call_stays_visible(make_engine: MakeEngine) -> None:
    llm = PCRLLM(engine=make_engine(reply='Hm. <tool_call>{"name": "add", "argu'))
    whole = llm.chat_with_tools([ADD], "q")
    stream = list(llm.stream_chat_with_tools([ADD], "q"))
    text = 'Hm. {"name": "add", "argu'
    assert whole.message.content == text
    assert stream[-1].message.content == text
    assert "".join(response.delta for response in stream) == text


def test_predict_and_call(make_engine: MakeEngine) -> None:
    llm = PCRLLM(engine=make_engine(reply=CALL))
    assert str(llm.predict_and_call([ADD], "1 + 2?")) == "3"
    assert str(asyncio.run(llm.apredict_and_call([ADD], "1 + 2?"))) == "3"


def test_results_of_tools_go_back(make_engine: MakeEngine) -> None:
    engine = make_engine()
    call = ToolCallBlock(tool_call_id="i", tool_name="add", tool_kwargs={"a": 1})
    history = [
        ChatMessage(role="user", content="1 + 2?"),
        ChatMessage(role="assistant", blocks=[TextBlock(text="Adding."), call]),
        ChatMessage(role="tool", content="3", additional_kwargs={"tool_call_id": "i"}),
    ]
    PCRLLM(engine=engine).chat_with_tools([ADD], chat_history=history)
    ((turns, _, _),) = engine.submitted
    assert turns[1] == {
        "role": "assistant",
        "content": "Adding.",
        "tool_calls": [
            {
                "type": "function",
                "id": "i",
                "function": {"name": "add", "arguments": {"a": 1}},
            }
        ],
    }
    assert turns[2] == {"role": "tool", "content": "3", "tool_call_id": "i"}


# --- structure ---


class Person(BaseModel):
    """A person."""

    name: str
    age: int


ANN = {"name": "Ann", "age": 3}
PROMPT = PromptTemplate("Describe {who}.")


@pytest.mark.parametrize(
    ("tools", "reply"),
    [(True, {"name": "Person", "arguments": ANN}), (True, ANN), (False, ANN)],
)
def test_structured_predict(make_engine: MakeEngine, tools: bool, reply: Any) -> None:
    llm = PCRLLM(engine=make_engine(reply=json.dumps(reply), tools=tools))
    assert llm.structured_predict(Person, PROMPT, who="Ann") == Person(**ANN)
    found = asyncio.run(llm.astructured_predict(Person, PROMPT, who="Ann"))
    assert found == Person(**ANN)
    structured = llm.as_structured_llm(Person)
    assert structured.complete("Describe Ann.").raw == Person(**ANN)
