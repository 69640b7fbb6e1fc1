"""Tools and structured output of ``ChatPCR`` on a scripted engine."""

from __future__ import annotations

import asyncio
import json
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import tool
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from pcr_core import RequestError
from pcr_integrations.langchain import ChatPCR

MakeEngine = Callable[..., Any]
pytestmark = pytest.mark.timeout(60)


def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


class Add(BaseModel):
    """Add two integers."""

    a: int
    b: int


ADD_SCHEMA = {
    "title": "add",
    "description": "Add two integers.",
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # "this API is in beta"
    ADD_RUNNABLE = RunnableLambda(lambda it: it["a"] + it["b"]).as_tool(
        name="add", description="Add two integers.", arg_types={"a": int, "b": int}
    )
KINDS = [add, tool(add), Add, ADD_SCHEMA, ADD_RUNNABLE]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
OTHER = CALL.replace("2}}", "3}}")


@tool
def look(at: str) -> str:
    """Look at something."""
    return f"{at} seen"


def joined(chunks: list[Any]) -> Any:
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    return whole


# --- tools ---


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: type(kind).__name__)
def test_every_kind_of_tool(make_engine: MakeEngine, kind: Any) -> None:
    engine = make_engine(reply=CALL)
    answer = ChatPCR(engine=engine).bind_tools([kind]).invoke("1 + 2?")
    ((_, _, (told,)),) = engine.submitted
    function = told["function"]
    assert told["type"] == "function"
    assert function["name"].lower() == "add"
    assert function["description"] == "Add two integers."
    assert set(function["parameters"]["properties"]) == {"a", "b"}
    assert answer.tool_calls[0]["args"] == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    ("choice", "told"),
    [
        (None, ["add", "look"]),
        ("auto", ["add", "look"]),
        ("any", ["add", "look"]),
        ("required", ["add", "look"]),
        (True, ["add", "look"]),
        ("look", ["look"]),
        ({"type": "function", "function": {"name": "look"}}, ["look"]),
        ("none", None),
        (False, None),
    ],
)
def test_tool_choice(make_engine: MakeEngine, choice: Any, told: Any) -> None:
    engine = make_engine()
    llm = ChatPCR(engine=engine).bind_tools([add, look], tool_choice=choice)
    llm.invoke("q")
    ((_, _, tools),) = engine.submitted
    names = [one["function"]["name"] for one in tools] if tools else None
    assert names == told


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        ([add], "subtract", "names no tool; there are: add"),
        ([], "any", "without any tools"),
    ],
)
def test_a_choice_that_cannot_be(
    make_engine: MakeEngine, tools: Any, choice: str, message: str
) -> None:
    llm = ChatPCR(engine=make_engine()).bind_tools(tools, tool_choice=choice)
    with pytest.raises(RequestError, match=message):
        llm.invoke("q")


@pytest.mark.parametrize(
    "bad",
    [
        [{"type": "function"}],
        [{"type": "function", "function": {"description": "no name"}}],
        ["add"],
    ],
)
def test_what_is_no_tool_is_refused(make_engine: MakeEngine, bad: Any) -> None:
    with pytest.raises(RequestError, match="a tool is"):
        ChatPCR(engine=make_engine()).invoke("q", tools=bad)


def takes_a_lock(lock: threading.Event) -> None:
    """Take something that no model can write."""


def takes_the_unknown(x: Nowhere) -> None:  # type: ignore[name-defined]  # noqa: F821
    """Take something that is not there."""


@pytest.mark.parametrize("bad", [takes_a_lock, takes_the_unknown, "add", {"x": 1}])
def test_a_tool_that_cannot_be_described(bad: Any) -> None:
    llm = ChatPCR(model="m")
    with pytest.raises(RequestError, match=r"the tool .* cannot be described"):
        llm.bind_tools([add, bad])
    with pytest.raises(RequestError, match=r"the tool .* cannot be described"):
        llm.get_num_tokens_from_messages([HumanMessage("q")], tools=[bad])


@pytest.mark.parametrize(
    "result",
    [
        ToolMessage("3", tool_call_id="i"),
        ToolMessage([{"type": "text", "text": "3"}], tool_call_id="i"),
        ToolMessage("3", tool_call_id="i", status="error"),
        ToolMessage("3", tool_call_id="i", artifact={"rows": 1}),
    ],
)
def test_results_of_every_form(make_engine: MakeEngine, result: Any) -> None:
    engine = make_engine(reply="It is 3.")
    call = {"name": "add", "args": {"a": 1, "b": 2}, "id": "i"}
    history = [HumanMessage("1 + 2?"), AIMessage("", tool_calls=[call]), result]
    answer = ChatPCR(engine=engine).bind_tools([add]).invoke(history)
    assert answer.content == "It is 3."
    turn = engine.submitted[0][0][-1]
    assert turn == {"role": "tool", "content": "3", "tool_call_id": "i"}


def test_parallel_calls_whole_and_streamed(make_engine: MakeEngine) -> None:
    llm = ChatPCR(engine=make_engine(reply=f"Both. {CALL}{OTHER}")).bind_tools([add])
    chunks = list(llm.stream("q"))
    pieces = [piece for chunk in chunks for piece in chunk.tool_call_chunks]
    assert [piece["index"] for piece in pieces] == [0, 1]
    for answer in (llm.invoke("q"), joined(chunks)):
        assert answer.content == "Both. "
        args = [call["args"] for call in answer.tool_calls]
        assert args == [{"a": 1, "b": 2}, {"a": 1, "b": 3}]
        ids = {call["id"] for call in answer.tool_calls}
        assert len(ids) == 2
        assert answer.response_metadata["finish_reason"] == "tool_calls"


def test_one_call_where_parallel_ones_are_not_welcome(make_engine: MakeEngine) -> None:
    llm = ChatPCR(engine=make_engine(reply=CALL + OTHER))
    bound = llm.bind_tools([add], parallel_tool_calls=False)
    assert len(bound.invoke("q").tool_calls) == 1


def test_invalid_and_valid_calls_side_by_side(make_engine: MakeEngine) -> None:
    broken = '<tool_call>{"name": "add", "arguments": [1, 2]}</tool_call>'
    llm = ChatPCR(engine=make_engine(reply=CALL + broken)).bind_tools([add])
    for answer in (llm.invoke("q"), joined(list(llm.stream("q")))):
        assert len(answer.tool_calls) == 1
        (invalid,) = answer.invalid_tool_calls
        assert "[1, 2]" in invalid["args"]


def test_calls_that_could_not_be_read_go_back_to_the_model(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(reply=['<tool_call>{"name": "add", "argu', "sorry"])
    llm = ChatPCR(engine=engine).bind_tools([add])
    question = HumanMessage("1 + 2?")
    llm.invoke([question, llm.invoke([question]), HumanMessage("that was broken")])
    (call,) = engine.submitted[1][0][1]["tool_calls"]
    assert "argu" in call["function"]["arguments"]


# --- structured output ---


class Person(BaseModel):
    """A person."""

    name: str
    age: int = Field(ge=0)


class PersonDict(TypedDict):
    """A person."""

    name: str
    age: int


ANN = {"name": "Ann", "age": 3}
SCHEMAS = {
    "pydantic": (Person, Person(**ANN)),
    "typeddict": (PersonDict, ANN),
    "json": ({**Person.model_json_schema(), "title": "Person"}, ANN),
}
METHODS = ["function_calling", "json_schema", "json_mode"]


def reply_for(method: str, value: Any, kind: str = "pydantic") -> str:
    name = "PersonDict" if kind == "typeddict" else "Person"
    if method == "function_calling":
        return json.dumps({"name": name, "arguments": value})
    return json.dumps(value)


@pytest.mark.parametrize("kind", SCHEMAS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("include_raw", [False, True])
def test_structured_output(
    make_engine: MakeEngine, method: str, kind: str, include_raw: bool
) -> None:
    schema, value = SCHEMAS[kind]
    llm = ChatPCR(engine=make_engine(reply=reply_for(method, ANN, kind)))
    structured = llm.with_structured_output(
        schema, method=method, include_raw=include_raw
    )

    async def both() -> list[Any]:
        streamed = [piece async for piece in structured.astream("q")]
        return [await structured.ainvoke("q"), streamed[-1]]

    got = [structured.invoke("q"), list(structured.stream("q"))[-1]]
    for answer in (*got, *asyncio.run(both())):
        if not include_raw:
            assert answer == value
        elif "raw" in answer:  # a stream yields the keys one by one
            assert answer["parsed"] == value
            assert answer["parsing_error"] is None
            assert isinstance(answer["raw"], AIMessage)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("value", [{"name": "Ann"}, {"name": "Ann", "age": -1}])
def test_what_the_schema_refuses(
    make_engine: MakeEngine, method: str, value: Any
) -> None:
    llm = ChatPCR(engine=make_engine(reply=reply_for(method, value)))
    raw = llm.with_structured_output(Person, method=method, include_raw=True).invoke(
        "q"
    )
    assert raw["parsed"] is None
    assert raw["parsing_error"] is not None
    with pytest.raises(ValueError, match="age"):
        llm.with_structured_output(Person, method=method).invoke("q")


@pytest.mark.parametrize("method", ["json_schema", "json_mode"])
def test_what_is_no_json(make_engine: MakeEngine, method: str) -> None:
    llm = ChatPCR(engine=make_engine(reply="no idea"))
    with pytest.raises(OutputParserException):
        llm.with_structured_output(Person, method=method).invoke("q")


def test_strict_is_in_the_tools_schema(make_engine: MakeEngine) -> None:
    engine = make_engine(reply=reply_for("function_calling", ANN))
    ChatPCR(engine=engine).with_structured_output(Person, strict=True).invoke("q")
    ((_, _, (told,)),) = engine.submitted
    assert told["function"]["strict"] is True


@pytest.mark.parametrize("method", METHODS)
def test_tracing_is_told_the_schema(method: str) -> None:
    structured = ChatPCR(model="m").with_structured_output(Person, method=method)
    traced = structured.first.kwargs["ls_structured_output_format"]
    assert traced == {"kwargs": {"method": method}, "schema": Person}
