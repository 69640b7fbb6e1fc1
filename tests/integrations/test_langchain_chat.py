"""``ChatPCR`` on a scripted engine."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.messages import (
    AIMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
    trim_messages,
)
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from pydantic import BaseModel

from pcr_core import PromptTooLongError, RequestError
from pcr_integrations.langchain import ChatPCR

MakeEngine = Callable[..., Any]
pytestmark = pytest.mark.timeout(60)

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


@tool
def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


def joined(chunks: list[Any]) -> Any:
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    return whole


# --- answers ---


def test_invoke(make_engine: MakeEngine) -> None:
    engine = make_engine(reply="It is Paris.")
    llm = ChatPCR(engine=engine)
    answer = llm.invoke([SystemMessage("Be brief."), HumanMessage("Capital?")])
    assert answer.content == "It is Paris."
    ((turns, _, tools),) = engine.submitted
    assert turns == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Capital?"},
    ]
    assert tools is None


def test_usage_and_metadata(make_engine: MakeEngine) -> None:
    llm = ChatPCR(engine=make_engine(reply="a b"))
    llm.invoke("what is it")
    answer = llm.invoke("what is it")
    usage = answer.usage_metadata
    assert usage is not None
    details = usage["input_token_details"]
    assert usage["output_tokens"] == 2
    assert usage["total_tokens"] == usage["input_tokens"] + 2
    assert details["cache_read"] == usage["input_tokens"] - 1
    assert details["cache_read"] + details["cache_creation"] == usage["input_tokens"]
    metadata = answer.response_metadata
    assert metadata["model_name"] == "scripted"
    assert metadata["model_provider"] == "pcr"
    assert metadata["finish_reason"] == "stop"
    assert metadata["pcr"]["usage"]["cached_by_tier"]["dram"] == details["cache_read"]
    assert metadata["pcr"]["timing"]["ttft"] == 0.25
    json.dumps(metadata)


def test_stream_ends_with_one_chunk_that_has_everything(
    make_engine: MakeEngine,
) -> None:
    chunks = list(ChatPCR(engine=make_engine(reply="a b c")).stream("hi"))
    assert [chunk.content for chunk in chunks] == ["a", " b", " c", ""]
    assert [chunk.chunk_position for chunk in chunks] == [None, None, None, "last"]
    assert all(not chunk.response_metadata for chunk in chunks[:-1])
    assert all(chunk.usage_metadata is None for chunk in chunks[:-1])
    whole = joined(chunks)
    assert whole.usage_metadata["output_tokens"] == 3
    assert whole.response_metadata["finish_reason"] == "stop"


def test_all_four_ways_give_the_same_answer(make_engine: MakeEngine) -> None:
    llm = ChatPCR(engine=make_engine(reply="the very same answer"))

    async def both() -> tuple[Any, Any]:
        return await llm.ainvoke("q"), joined([c async for c in llm.astream("q")])

    answers = [llm.invoke("q"), joined(list(llm.stream("q"))), *asyncio.run(both())]
    assert {answer.content for answer in answers} == {"the very same answer"}
    counts = [answer.usage_metadata["input_tokens"] for answer in answers]
    assert len(set(counts)) == 1


def test_logprobs(make_engine: MakeEngine) -> None:
    answer = ChatPCR(engine=make_engine(reply="a b"), logprobs=True).invoke("q")
    content = answer.response_metadata["logprobs"]["content"]
    assert [(one["token"], one["logprob"]) for one in content] == [
        ("a", -0.5),
        (" b", -0.5),
    ]


def test_in_a_chain_that_streams(make_engine: MakeEngine) -> None:
    llm = ChatPCR(engine=make_engine(reply=lambda prompt: prompt.split()[1]))
    chain = ChatPromptTemplate.from_template("{word} ?") | llm | StrOutputParser()
    assert chain.invoke({"word": "x"}) == "x"
    assert "".join(chain.stream({"word": "y"})) == "y"
    assert chain.batch([{"word": w} for w in "abc"]) == ["a", "b", "c"]


# --- messages ---


def test_messages_of_every_kind(make_engine: MakeEngine) -> None:
    engine = make_engine()
    ChatPCR(engine=engine).invoke(
        [
            HumanMessage([{"type": "text", "text": "a"}, "b"], name="Ann"),
            AIMessage(
                [
                    {"type": "reasoning", "reasoning": "hm"},
                    {"type": "text", "text": "c"},
                ],
                tool_calls=[{"name": "add", "args": {"a": 1}, "id": "i"}],
            ),
            ToolMessage(["3"], tool_call_id="i"),
        ]
    )
    ((turns, _, _),) = engine.submitted
    assert turns == [
        {"role": "user", "content": "ab", "name": "Ann"},
        {
            "role": "assistant",
            "content": "c",
            "tool_calls": [
                {
                    "type": "function",
                    "id": "i",
                    "function": {"name": "add", "arguments": {"a": 1}},
                }
            ],
        },
        {"role": "tool", "content": "3", "tool_call_id": "i"},
    ]


@pytest.mark.parametrize(
    "message",
    [HumanMessage([{"type": "reasoning", "reasoning": "x"}]), RemoveMessage(id="x")],
)
def test_what_no_model_is_told(make_engine: MakeEngine, message: Any) -> None:
    with pytest.raises(RequestError, match=r"text models|cannot be sent"):
        ChatPCR(engine=make_engine()).invoke([message])


# --- tools ---


def test_tools_reach_the_template_and_calls_come_back(make_engine: MakeEngine) -> None:
    engine = make_engine(reply=f"Adding. {CALL}")
    answer = ChatPCR(engine=engine).bind_tools([add]).invoke("1 + 2?")
    (_, _, tools) = engine.submitted[0]
    assert tools[0]["function"]["name"] == "add"
    assert set(tools[0]["function"]["parameters"]["properties"]) == {"a", "b"}
    assert answer.content == "Adding. "
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("add", {"a": 1, "b": 2})
    assert answer.response_metadata["finish_reason"] == "tool_calls"


def test_tools_in_a_stream(make_engine: MakeEngine) -> None:
    llm = ChatPCR(engine=make_engine(reply=f"Adding. {CALL}")).bind_tools([add])
    whole = joined(list(llm.stream("1 + 2?")))
    assert whole.content == "Adding. "
    (call,) = whole.tool_calls
    assert (call["name"], call["args"]) == ("add", {"a": 1, "b": 2})
    assert whole.response_metadata["finish_reason"] == "tool_calls"


def test_a_broken_call_is_invalid_either_way(make_engine: MakeEngine) -> None:
    broken = '<tool_call>{"name": "add", "arguments": {"a": 1'
    llm = ChatPCR(engine=make_engine(reply=broken)).bind_tools([add])
    for answer in (llm.invoke("q"), joined(list(llm.stream("q")))):
        assert not answer.tool_calls
        assert len(answer.invalid_tool_calls) == 1


def test_without_tools_nothing_is_taken_for_a_call(make_engine: MakeEngine) -> None:
    assert ChatPCR(engine=make_engine(reply=CALL)).invoke("q").content == CALL


def test_a_tool_loop(make_engine: MakeEngine) -> None:
    engine = make_engine(reply=[CALL, "It is 3."])
    llm = ChatPCR(engine=engine).bind_tools([add], tool_choice="auto")
    question = HumanMessage("1 + 2?")
    asked = llm.invoke([question])
    told = add.invoke(asked.tool_calls[0])
    answer = llm.invoke([question, asked, told])
    assert answer.content == "It is 3."
    turns = engine.submitted[1][0]
    assert turns[1]["tool_calls"][0]["id"] == turns[2]["tool_call_id"]


class Person(BaseModel):
    """A person."""

    name: str
    age: int


ANN = {"name": "Ann", "age": 3}
REPLIES = {
    "function_calling": json.dumps({"name": "Person", "arguments": ANN}),
    "json_schema": json.dumps(ANN),
    "json_mode": f"```json\n{json.dumps(ANN)}\n```",
}


@pytest.mark.parametrize("method", REPLIES)
def test_structured_output(make_engine: MakeEngine, method: str) -> None:
    llm = ChatPCR(engine=make_engine(reply=REPLIES[method]))
    assert llm.with_structured_output(Person, method=method).invoke("q") == Person(
        **ANN
    )
    schema = Person.model_json_schema()
    assert llm.with_structured_output(schema, method=method).invoke("q") == ANN
    raw = llm.with_structured_output(Person, method=method, include_raw=True).invoke(
        "q"
    )
    assert raw["parsed"] == Person(**ANN)
    assert isinstance(raw["raw"], AIMessage)
    assert raw["parsing_error"] is None


def test_structured_output_tells_the_model_the_schema(make_engine: MakeEngine) -> None:
    engine = make_engine(reply=REPLIES["json_schema"])
    ChatPCR(engine=engine).with_structured_output(Person, method="json_schema").invoke(
        "q"
    )
    assert '"age"' in engine.submitted[0][0][0]["content"]


def test_an_answer_that_does_not_parse(make_engine: MakeEngine) -> None:
    llm = ChatPCR(engine=make_engine(reply="no idea"))
    structured = llm.with_structured_output(
        Person, method="json_schema", include_raw=True
    )
    raw = structured.invoke("q")
    assert raw["parsed"] is None
    assert raw["parsing_error"] is not None


def test_an_unknown_method(make_engine: MakeEngine) -> None:
    with pytest.raises(RequestError, match="method='magic' is unknown"):
        ChatPCR(engine=make_engine()).with_structured_output(Person, method="magic")


# --- counting, caching, tracing ---


def test_counting_is_offline_and_is_the_prompts_length(make_engine: MakeEngine) -> None:
    llm = ChatPCR(engine=make_engine())
    messages = [HumanMessage("how long is this")]
    counted = llm.get_num_tokens_from_messages(messages)
    answer = llm.invoke(messages)
    assert answer.usage_metadata is not None
    assert counted == answer.usage_metadata["input_tokens"]
    assert llm.get_num_tokens_from_messages(messages, tools=[add]) > counted
    assert llm.get_num_tokens("two words") == 2
    assert llm.get_num_tokens_from_messages([]) == 0


def test_trim_messages_counts_beyond_the_window(make_engine: MakeEngine) -> None:
    llm = ChatPCR(engine=make_engine(window=20))
    history = [HumanMessage(f"message number {i} of a long chat") for i in range(9)]
    kept = trim_messages(history, max_tokens=19, token_counter=llm, strategy="last")
    assert 0 < len(kept) < 9
    assert llm.invoke(kept).content == "one two three"
    with pytest.raises(PromptTooLongError):
        llm.invoke(history)


def test_a_cache_keeps_two_models_apart(make_engine: MakeEngine) -> None:
    from pcr_core import EngineConfig

    cache = InMemoryCache()
    one = make_engine(EngineConfig(model="one"), reply="from one")
    two = make_engine(EngineConfig(model="two"), reply="from two")
    assert ChatPCR(engine=one, cache=cache).invoke("q").content == "from one"
    assert ChatPCR(engine=two, cache=cache).invoke("q").content == "from two"
    assert ChatPCR(engine=one, cache=cache).invoke("q").content == "from one"
    assert len(one.submitted) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 0.5},
        {"seed": 1},
        {"stop": "x"},
        {"model": "b"},
        {"exact": False},
    ],
)
def test_what_changes_answers_changes_the_cache_key(change: dict[str, Any]) -> None:
    base = {"model": "a"}
    assert (
        ChatPCR(**base)._get_llm_string()
        != ChatPCR(**{**base, **change})._get_llm_string()
    )


def test_budgets_do_not_change_the_cache_key() -> None:
    plain, roomy = ChatPCR(model="a"), ChatPCR(model="a", dram_bytes="8GiB")
    assert plain._get_llm_string() == roomy._get_llm_string()


def test_tracing_parameters() -> None:
    llm = ChatPCR(model="m", temperature=0.5, max_tokens=9, stop=["z"])
    assert llm._get_ls_params() == {
        "ls_provider": "pcr",
        "ls_model_type": "chat",
        "ls_model_name": "m",
        "ls_temperature": 0.5,
        "ls_max_tokens": 9,
        "ls_stop": ["z"],
    }
    assert llm._get_ls_params(stop=["y"], temperature=0.0)["ls_temperature"] == 0.0


def test_secrets_and_engines_are_not_shown(make_engine: MakeEngine) -> None:
    llm = ChatPCR(engine=make_engine(), api_key="sesame")
    assert "sesame" not in repr(llm)
    assert "sesame" not in str(llm.asdict())
    assert "engine" not in llm.model_dump()


# --- stopping, threads ---


def test_breaking_out_of_a_stream_frees_the_engine(make_engine: MakeEngine) -> None:
    engine = make_engine(stepwise=True)
    engine.step()
    for _ in ChatPCR(engine=engine).stream("q"):
        break
    assert engine.completions[0].cancelled
    engine.step()
    assert engine.ended.acquire(timeout=30)


def test_cancelling_a_task_frees_the_engine(make_engine: MakeEngine) -> None:
    engine = make_engine(stepwise=True)

    async def main() -> None:
        task = asyncio.ensure_future(ChatPCR(engine=engine).ainvoke("q"))
        while not engine.completions:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert engine.completions[0].cancelled


def test_the_loop_turns_while_it_waits(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.gate.clear()

    async def main() -> str:
        task = asyncio.ensure_future(ChatPCR(engine=engine).ainvoke("q"))
        while not engine.completions:
            await asyncio.sleep(0)
        for _ in range(100):
            await asyncio.sleep(0)
        assert not task.done()
        engine.gate.set()
        return str((await task).content)

    assert asyncio.run(main()) == "one two three"


def test_two_threads_get_their_own_answers(make_engine: MakeEngine) -> None:
    llm = ChatPCR(engine=make_engine(reply=lambda prompt: f"echo {prompt.split()[1]}"))
    answers: dict[str, list[str]] = {}

    def ask(name: str) -> None:
        answers[name] = [str(llm.invoke(f"{name}{i}").content) for i in range(20)]

    threads = [threading.Thread(target=ask, args=(name,)) for name in "xy"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {n: [f"echo {n}{i}" for i in range(20)] for n in "xy"}


def test_a_profile_comes_from_the_engine(make_engine: MakeEngine) -> None:
    profile = ChatPCR(engine=make_engine(window=512, tools=False)).profile
    assert profile is not None
    assert profile["max_input_tokens"] == 512
    assert profile["tool_calling"] is False
