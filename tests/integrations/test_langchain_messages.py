"""What ``ChatPCR`` makes of messages, and what it says of those it cannot serve."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import (
    AIMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

from pcr_core import PromptTooLongError, RequestError
from pcr_integrations.langchain import PCRLLM, ChatPCR
from pcr_integrations.langchain._errors import PromptOverflowError

MakeEngine = Callable[..., Any]
pytestmark = pytest.mark.timeout(60)


def turns_of(make_engine: MakeEngine, messages: Any, **settings: Any) -> Any:
    """What the engine is sent for these messages."""
    engine = make_engine()
    ChatPCR(engine=engine, **settings).invoke(messages)
    ((turns, _, _),) = engine.submitted
    return turns


# --- what is sent ---


@pytest.mark.parametrize(
    ("message", "turn"),
    [
        ("text", {"role": "user", "content": "text"}),
        (("system", "s"), {"role": "system", "content": "s"}),
        ({"role": "user", "content": "d"}, {"role": "user", "content": "d"}),
        (SystemMessage("s"), {"role": "system", "content": "s"}),
        (
            HumanMessage("h", name="Ann"),
            {"role": "user", "content": "h", "name": "Ann"},
        ),
        (AIMessage("a"), {"role": "assistant", "content": "a"}),
        (AIMessage(""), {"role": "assistant", "content": ""}),
        (ChatMessage("c", role="human"), {"role": "user", "content": "c"}),
        (ChatMessage("c", role="developer"), {"role": "system", "content": "c"}),
        (ChatMessage("c", role="critic"), {"role": "critic", "content": "c"}),
        (
            ToolMessage("t", tool_call_id="i"),
            {"role": "tool", "content": "t", "tool_call_id": "i"},
        ),
        (
            FunctionMessage("f", name="add"),
            {"role": "tool", "content": "f", "name": "add"},
        ),
    ],
)
def test_kinds(make_engine: MakeEngine, message: Any, turn: Any) -> None:
    assert turns_of(make_engine, [message]) == [turn]


def test_turns_of_one_role_in_a_row_stay_as_they_are(make_engine: MakeEngine) -> None:
    """Merging and folding is the engine's part: it knows the template."""
    messages = [
        SystemMessage("one"),
        SystemMessage("two"),
        HumanMessage("three"),
        HumanMessage("four"),
        AIMessage("five"),
        AIMessage("six"),
        HumanMessage("seven"),
    ]
    turns = turns_of(make_engine, messages)
    roles = ["system"] * 2 + ["user"] * 2 + ["assistant"] * 2 + ["user"]
    assert [turn["role"] for turn in turns] == roles
    assert [turn["content"] for turn in turns] == [m.content for m in messages]


TEXT_BLOCKS = [
    ["a", "b"],
    [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
    [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, "b"],
    [
        {"type": "text", "text": "a", "annotations": []},
        {"type": "text-plain", "text": "b", "mime_type": "text/plain"},
    ],
]


@pytest.mark.parametrize("blocks", TEXT_BLOCKS)
@pytest.mark.parametrize("kind", [SystemMessage, HumanMessage, AIMessage])
def test_text_blocks_are_joined_as_they_are(
    make_engine: MakeEngine, kind: Any, blocks: Any
) -> None:
    (turn,) = turns_of(make_engine, [kind(blocks)])
    assert turn["content"] == "ab"


def test_text_is_passed_on_byte_for_byte(make_engine: MakeEngine) -> None:
    text = "  \n\ttwo  spaces \r\n é — \u00a0 {curly} <|im_end|> "
    (turn,) = turns_of(make_engine, [HumanMessage(text)])
    assert turn["content"] == text


@pytest.mark.parametrize("version", ["v0", "v1"])
def test_output_versions(make_engine: MakeEngine, version: str) -> None:
    llm = ChatPCR(engine=make_engine(reply="a b"), output_version=version)
    chunks = list(llm.stream("q"))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    for answer in (llm.invoke("q"), whole):
        assert answer.text == "a b"
        (block,) = answer.content_blocks
        assert (block["type"], block["text"]) == ("text", "a b")
        assert isinstance(answer.content, str if version == "v0" else list)
        assert answer.usage_metadata["output_tokens"] == 2


def test_an_answer_of_either_version_can_be_sent_back(make_engine: MakeEngine) -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    sent = []
    for version in ("v0", "v1"):
        engine = make_engine(reply=[f"Calling. {call}", "Done."])
        llm = ChatPCR(engine=engine, output_version=version).bind(tools=tools)
        asked = llm.invoke("q")
        result = ToolMessage("r", tool_call_id=asked.tool_calls[0]["id"])
        llm.invoke([HumanMessage("q"), asked, result])
        turn = engine.submitted[1][0][1]
        sent.append((turn["content"], turn["tool_calls"][0]["function"]))
    assert sent[0] == sent[1] == ("Calling. ", {"name": "f", "arguments": {}})


# --- what is refused ---

NOT_TEXT = [
    {"type": "image", "url": "https://x/y.png"},
    {"type": "image", "base64": "aGk=", "mime_type": "image/png"},
    {"type": "image_url", "image_url": {"url": "https://x/y.png"}},
    {"type": "audio", "base64": "aGk=", "mime_type": "audio/wav"},
    {"type": "input_audio", "input_audio": {"data": "aGk=", "format": "wav"}},
    {"type": "video", "url": "https://x/y.mp4"},
    {"type": "file", "base64": "aGk=", "mime_type": "application/pdf"},
    {"type": "non_standard", "value": {}},
    {"text": "no type"},
    {"type": "text", "text": 3},
]
CARRIERS = [
    HumanMessage,
    AIMessage,
    lambda content: ToolMessage(content, tool_call_id="i"),
]


@pytest.mark.parametrize("block", NOT_TEXT, ids=lambda block: block.get("type"))
@pytest.mark.parametrize("carrier", CARRIERS, ids=["human", "ai", "tool"])
def test_what_is_not_text_is_refused_before_the_engine(
    make_engine: MakeEngine, carrier: Any, block: Any
) -> None:
    engine = make_engine()
    llm = ChatPCR(engine=engine)
    message = carrier([{"type": "text", "text": "look"}, block])
    with pytest.raises(RequestError, match="PCR serves text models"):
        llm.invoke([message])
    with pytest.raises(RequestError, match="PCR serves text models"):
        list(llm.stream([message]))
    with pytest.raises(RequestError, match="PCR serves text models"):
        asyncio.run(llm.ainvoke([message]))
    assert not engine.submitted


@pytest.mark.parametrize(
    "bad",
    [
        {"frobnicate": True},
        {"max_tokens": "many"},
        {"temperature": -1},
        {"stop": [3]},
        {"stop": ["x", None]},
        {"timeout": 0},
        {"response_format": "json"},
        {"response_format": {"type": "xml"}},
        {"seed": "x"},
        {"logit_bias": {"x": 1}},
    ],
    ids=str,
)
@pytest.mark.parametrize("how", ["call", "bind", "stream", "batch"])
def test_bad_call_options(make_engine: MakeEngine, bad: Any, how: str) -> None:
    llm = ChatPCR(engine=make_engine())
    ways: dict[str, Callable[[], Any]] = {
        "call": lambda: llm.invoke("q", **bad),
        "bind": lambda: llm.bind(**bad).invoke("q"),
        "stream": lambda: list(llm.stream("q", **bad)),
        "batch": lambda: llm.batch(["q", "q"], **bad),
    }
    with pytest.raises(RequestError):
        ways[how]()


# --- longer than the window ---


@pytest.mark.parametrize("model", [ChatPCR, PCRLLM])
@pytest.mark.parametrize("how", ["invoke", "ainvoke", "stream", "astream", "batch"])
@pytest.mark.parametrize("name", [PromptTooLongError, ContextOverflowError])
def test_overflow_has_langchains_name_and_ours(
    make_engine: MakeEngine, model: Any, how: str, name: Any
) -> None:
    engine = make_engine(window=20)
    llm, text = model(engine=engine), "word " * 30

    async def read() -> None:
        [piece async for piece in llm.astream(text)]

    ways: dict[str, Callable[[], Any]] = {
        "invoke": lambda: llm.invoke(text),
        "ainvoke": lambda: asyncio.run(llm.ainvoke(text)),
        "stream": lambda: list(llm.stream(text)),
        "astream": lambda: asyncio.run(read()),
        "batch": lambda: llm.batch([text, text]),
    }
    with pytest.raises(name, match="context window holds 20") as caught:
        ways[how]()
    assert caught.value.prompt_tokens > 30
    assert not engine.submitted


def test_overflow_survives_a_pickle() -> None:
    error = pickle.loads(pickle.dumps(PromptOverflowError(30, 20)))
    assert isinstance(error, ContextOverflowError)
    assert (error.prompt_tokens, error.context_window) == (30, 20)
