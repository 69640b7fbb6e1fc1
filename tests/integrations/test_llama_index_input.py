"""What reaches ``PCRLLM`` from outside: histories with calls, and what is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core.base.llms.types import (
    AudioBlock,
    ChatMessage,
    DocumentBlock,
    ImageBlock,
    ToolCallBlock,
    VideoBlock,
)
from llama_index.core.tools import FunctionTool
from pydantic import BaseModel

from pcr_core import ConfigError, RequestError
from pcr_integrations.llama_index import PCRLLM

MakeEngine = Callable[..., Any]
pytestmark = pytest.mark.timeout(60)

HELLO = [ChatMessage(role="user", content="Hello")]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
ASK = "1 + 2?"


def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


ADD = FunctionTool.from_defaults(add)


async def drain(stream: Any) -> list[Any]:
    return [item async for item in await stream]


# --- a call that is wanted ---


def test_a_required_tool_is_asked_for(make_engine: MakeEngine) -> None:
    engine = make_engine(reply='{"a": 1, "b": 2}', tools=False)
    llm = PCRLLM(engine=engine)
    required = llm.chat_with_tools([ADD], ASK, tool_required=True)
    llm.chat_with_tools([ADD], ASK)
    asked, offered = (engine.render(prompt) for prompt, *_ in engine.submitted)
    assert "You must call a function" in asked
    assert "You must call a function" not in offered
    (call,) = llm.get_tool_calls_from_response(required)  # bare arguments will do
    assert call.tool_kwargs == {"a": 1, "b": 2}


# --- calls in the history ---

RECORD = {
    "type": "function",
    "id": "i",
    "function": {"name": "add", "arguments": {"a": 1}},
}
TEXT_RECORD = {**RECORD, "function": {"name": "add", "arguments": '{"a": 1}'}}


class ForeignCall(BaseModel):
    """As the classes of other clients."""

    id: str = "i"
    function: dict[str, Any] = TEXT_RECORD["function"]  # type: ignore[assignment]


HISTORIES: list[ChatMessage] = [
    ChatMessage(
        role="assistant",
        blocks=[
            ToolCallBlock(tool_call_id="i", tool_name="add", tool_kwargs=arguments)
        ],
    )
    for arguments in ({"a": 1}, '{"a": 1}')
] + [
    ChatMessage(role="assistant", content="", additional_kwargs={"tool_calls": [call]})
    for call in (RECORD, TEXT_RECORD, ForeignCall())
]


@pytest.mark.parametrize("message", HISTORIES)
def test_earlier_calls_reach_the_template(
    make_engine: MakeEngine, message: ChatMessage
) -> None:
    engine = make_engine()
    PCRLLM(engine=engine).chat([*HELLO, message])
    assert engine.submitted[0][0][1]["tool_calls"] == [RECORD]


def test_a_call_that_is_none_is_refused(make_engine: MakeEngine) -> None:
    message = ChatMessage(role="assistant", additional_kwargs={"tool_calls": ["add"]})
    with pytest.raises(RequestError, match="not of the form"):
        PCRLLM(engine=make_engine()).chat([message])


def test_an_answer_goes_back_with_each_call_once(make_engine: MakeEngine) -> None:
    engine = make_engine(reply=CALL)
    llm = PCRLLM(engine=engine)
    answer = llm.chat_with_tools([ADD], ASK).message
    llm.chat([*HELLO, answer])
    assert len(engine.submitted[1][0][1]["tool_calls"]) == 1


# --- bad input ---

NOT_TEXT = [
    ImageBlock(image=b"x"),
    AudioBlock(audio=b"x"),
    VideoBlock(video=b"x"),
    DocumentBlock(data=b"x", title="t"),
]


@pytest.mark.parametrize("block", NOT_TEXT, ids=lambda block: type(block).__name__)
def test_what_is_not_text_is_refused_on_every_path(
    make_engine: MakeEngine, block: Any
) -> None:
    engine = make_engine()
    llm = PCRLLM(engine=engine)
    messages = [ChatMessage(role="user", blocks=[block])]
    calls: list[Callable[[], Any]] = [
        lambda: llm.chat(messages),
        lambda: list(llm.stream_chat(messages)),
        lambda: asyncio.run(llm.achat(messages)),
        lambda: asyncio.run(drain(llm.astream_chat(messages))),
        lambda: llm.chat_with_tools([ADD], chat_history=messages),
    ]
    for call in calls:
        with pytest.raises(RequestError, match=f"has a {type(block).__name__}"):
            call()
    assert not engine.submitted


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"temprature": 1}, "unknown call option 'temprature'"),
    ({"stop": [1]}, "stop"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"timeout": -1}, "timeout"),
    ({"tools": [{"name": "f"}]}, "a tool is"),
    ({"tool_choice": "required"}, "without any tools"),
    ({"response_format": "json"}, "response_format is"),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS, ids=str)
def test_bad_options_are_refused_on_every_path(
    make_engine: MakeEngine, options: dict[str, Any], message: str
) -> None:
    engine = make_engine()
    llm = PCRLLM(engine=engine)
    calls: list[Callable[[], Any]] = [
        lambda: llm.chat(HELLO, **options),
        lambda: list(llm.stream_chat(HELLO, **options)),
        lambda: llm.complete("q", **options),
        lambda: list(llm.stream_complete("q", **options)),
        lambda: asyncio.run(llm.achat(HELLO, **options)),
        lambda: asyncio.run(llm.acomplete("q", **options)),
        lambda: asyncio.run(drain(llm.astream_chat(HELLO, **options))),
        lambda: asyncio.run(drain(llm.astream_complete("q", **options))),
    ]
    for call in calls:
        with pytest.raises(RequestError, match=message):
            call()
    assert not engine.submitted


def test_bad_settings_are_refused_at_construction() -> None:
    bad: Any
    for bad in ({"stop": [1]}, {"max_tokens": 0}, {"temperature": "hot"}):
        with pytest.raises((ConfigError, RequestError), match=next(iter(bad))):
            PCRLLM(**bad)


def test_no_secret_and_no_model_in_what_is_stored(make_engine: MakeEngine) -> None:
    llm = PCRLLM(engine=make_engine())
    stored = json.dumps([llm.to_dict(), llm.to_payload()])
    assert "engine" not in llm.to_dict()
    assert "api_key" not in stored
    assert "ScriptedEngine" not in stored
