"""``ChatPCR`` as a Runnable: events, callbacks, caches, limits, retries, settings."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import (
    AsyncCallbackHandler,
    BaseCallbackHandler,
    UsageMetadataCallbackHandler,
)
from langchain_core.globals import set_llm_cache
from langchain_core.messages import AIMessage, HumanMessage, trim_messages
from langchain_core.rate_limiters import BaseRateLimiter
from langchain_core.runnables import ConfigurableField
from langchain_tests.utils.stream_lifecycle import assert_valid_event_stream

from pcr_core import EngineConfig, ModelError, RequestError
from pcr_integrations.langchain import PCRLLM, ChatPCR

MakeEngine = Callable[..., Any]
pytestmark = pytest.mark.timeout(60)

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
ADD = {"type": "function", "function": {"name": "add", "parameters": {}}}


async def acollect(stream: Any) -> list[Any]:
    return [item async for item in stream]


# The four ways into the model, each of which LangChain drives on another path.
WAYS: dict[str, Callable[..., Any]] = {
    "invoke": lambda llm, *a, **k: llm.invoke(*a, **k),
    "ainvoke": lambda llm, *a, **k: asyncio.run(llm.ainvoke(*a, **k)),
    "stream": lambda llm, *a, **k: list(llm.stream(*a, **k)),
    "astream": lambda llm, *a, **k: asyncio.run(acollect(llm.astream(*a, **k))),
}
every_way = pytest.mark.parametrize("ask", WAYS.values(), ids=WAYS)


def test_all_four_ways_are_its_own() -> None:
    for name in ("_generate", "_agenerate", "_stream", "_astream"):
        assert name in vars(ChatPCR)
        assert name in vars(PCRLLM)
    assert ChatPCR(model="m")._llm_type == "pcr-chat"
    assert PCRLLM(model="m")._llm_type == "pcr"


# --- callbacks ---


class Recorder(BaseCallbackHandler):
    """Names of what happened; tokens as they came."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_chat_model_start(self, *args: Any, **kwargs: Any) -> None:
        self.seen.append("start")

    def on_llm_new_token(self, token: str, **kwargs: Any) -> None:
        self.seen.append(f"token {token}")

    def on_llm_end(self, *args: Any, **kwargs: Any) -> None:
        self.seen.append("end")

    def on_llm_error(self, error: BaseException, **kwargs: Any) -> None:
        self.seen.append(type(error).__name__)


class AsyncRecorder(AsyncCallbackHandler):
    """As ``Recorder``, for a loop."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def on_chat_model_start(self, *args: Any, **kwargs: Any) -> None:
        self.seen.append("start")

    async def on_llm_new_token(self, token: str, **kwargs: Any) -> None:
        self.seen.append(f"token {token}")

    async def on_llm_end(self, *args: Any, **kwargs: Any) -> None:
        self.seen.append("end")

    async def on_llm_error(self, error: BaseException, **kwargs: Any) -> None:
        self.seen.append(type(error).__name__)


TOKENS = ["token a", "token  b", "token "]
EXPECTED = {
    "invoke": ["start", "end"],
    "ainvoke": ["start", "end"],
    "stream": ["start", *TOKENS, "end"],
    "astream": ["start", *TOKENS, "end"],
}


@pytest.mark.parametrize("way", WAYS)
def test_callbacks_once_each(make_engine: MakeEngine, way: str) -> None:
    llm, seen = ChatPCR(engine=make_engine(reply="a b")), Recorder()
    WAYS[way](llm, "q", {"callbacks": [seen]})
    assert seen.seen == EXPECTED[way]


@pytest.mark.parametrize("way", ["ainvoke", "astream"])
def test_async_callbacks_once_each(make_engine: MakeEngine, way: str) -> None:
    llm, seen = ChatPCR(engine=make_engine(reply="a b")), AsyncRecorder()
    WAYS[way](llm, "q", {"callbacks": [seen]})
    assert seen.seen == EXPECTED[way]


@every_way
def test_a_failure_is_reported_once(make_engine: MakeEngine, ask: Any) -> None:
    llm, seen = ChatPCR(engine=make_engine(reply=ModelError("broken"))), Recorder()
    with pytest.raises(ModelError, match="broken"):
        ask(llm, "q", {"callbacks": [seen]})
    assert seen.seen == ["start", "ModelError"]


@every_way
def test_usage_is_counted_once(make_engine: MakeEngine, ask: Any) -> None:
    llm = ChatPCR(engine=make_engine(reply="a b"))
    alone = llm.invoke("q").usage_metadata
    counter = UsageMetadataCallbackHandler()
    ask(llm, "q", {"callbacks": [counter]})
    usage = counter.usage_metadata["scripted"]
    assert usage["input_tokens"] == alone["input_tokens"]
    assert usage["output_tokens"] == 2
    assert usage["input_token_details"]["cache_read"] > 0


# --- events ---


@pytest.mark.parametrize("reply", ["a b", f"Adding. {CALL}", CALL])
def test_events_v2(make_engine: MakeEngine, reply: str) -> None:
    llm = ChatPCR(engine=make_engine(reply=reply)).bind(tools=[ADD])
    events = asyncio.run(acollect(llm.astream_events("q", version="v2")))
    assert events[0]["event"] == "on_chat_model_start"
    assert {event["event"] for event in events[1:-1]} == {"on_chat_model_stream"}
    end = events[-1]
    assert end["event"] == "on_chat_model_end"
    pieces = [event["data"]["chunk"] for event in events[1:-1]]
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    output = end["data"]["output"]
    assert output.content == whole.content
    assert output.tool_calls == whole.tool_calls
    assert len(output.tool_calls) == reply.count("<tool_call>")
    assert output.usage_metadata == whole.usage_metadata is not None


@pytest.mark.filterwarnings("ignore:.*is in beta")
@pytest.mark.parametrize("reply", ["a b", f"Adding. {CALL}", CALL, CALL + CALL])
def test_events_v3(make_engine: MakeEngine, reply: str) -> None:
    llm = ChatPCR(engine=make_engine(reply=reply))

    async def main() -> list[Any]:
        stream = await llm.astream_events("q", version="v3", tools=[ADD])
        return [event async for event in stream]

    stream = llm.stream_events("q", version="v3", tools=[ADD])
    for events in (list(stream), asyncio.run(main())):
        assert_valid_event_stream(events)
        kinds = [event["event"] for event in events]
        assert kinds[0] == "message-start"
        assert kinds[-1] == "message-finish"
    message = stream.output
    assert len(message.tool_calls) == reply.count("<tool_call>")
    assert message.usage_metadata["output_tokens"] > 0
    assert message.response_metadata["model_provider"] == "pcr"


# --- caches ---


@pytest.fixture
def global_cache() -> Iterator[InMemoryCache]:
    cache = InMemoryCache()
    set_llm_cache(cache)
    yield cache
    set_llm_cache(None)


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_a_cached_answer_needs_no_engine(
    make_engine: MakeEngine, global_cache: InMemoryCache, way: str
) -> None:
    engine = make_engine(reply=["first", "second"])
    llm = ChatPCR(engine=engine)
    assert [WAYS[way](llm, "q").content for _ in range(2)] == ["first", "first"]
    assert len(engine.submitted) == 1
    assert WAYS[way](ChatPCR(engine=engine, cache=False), "q").content == "second"


@pytest.mark.parametrize("model", [ChatPCR, PCRLLM])
@pytest.mark.parametrize("change", [{"seed": 1}, {"temperature": 0.5}, {"stop": ["x"]}])
def test_a_cache_keeps_settings_apart(
    make_engine: MakeEngine, global_cache: InMemoryCache, model: Any, change: Any
) -> None:
    engine = make_engine(reply=["first", "second", "third"])
    texts = [
        getattr(answer, "content", answer)
        for answer in (
            model(engine=engine).invoke("q"),
            model(engine=engine, **change).invoke("q"),
            model(engine=engine).invoke("q", **change),
            model(engine=engine).invoke("q"),
        )
    ]
    assert texts[1] != texts[0] != texts[2]
    assert texts[3] == texts[0]


def test_a_cache_keeps_two_models_apart(
    make_engine: MakeEngine, global_cache: InMemoryCache
) -> None:
    one, two = (
        make_engine(EngineConfig(model=name), reply=f"from {name}")
        for name in ("one", "two")
    )
    for _ in range(2):
        assert PCRLLM(engine=one).invoke("q") == "from one"
        assert PCRLLM(engine=two).invoke("q") == "from two"
    assert len(one.submitted) == len(two.submitted) == 1


def test_a_text_models_options_given_twice(make_engine: MakeEngine) -> None:
    llm = PCRLLM(engine=make_engine())
    with pytest.raises(RequestError, match="max_tokens was given twice"):
        llm.invoke("q", max_tokens=1, max_new_tokens=2)


def test_a_text_models_options_reach_the_engine(make_engine: MakeEngine) -> None:
    engine = make_engine()
    llm = PCRLLM(engine=engine, max_tokens=9)
    llm.invoke("q", seed=3, max_new_tokens=2, timeout=50)
    asyncio.run(llm.ainvoke("q", temperature=0.5))
    llm.batch(["q"], top_p=0.5)
    sent = [params for _, params, _ in engine.submitted]
    assert [(p.max_tokens, p.seed) for p in sent] == [(2, 3), (9, None), (9, None)]
    assert (sent[1].temperature, sent[2].top_p) == (0.5, 0.5)


def test_one_engine_and_its_settings_have_one_key(make_engine: MakeEngine) -> None:
    config = EngineConfig(model="m", exact=True, dram_bytes="1GiB")
    by_engine = ChatPCR(engine=make_engine(config))
    by_settings = ChatPCR(model="m", exact=True)
    assert by_engine._get_llm_string() == by_settings._get_llm_string()


# --- limits, retries, fallbacks ---


class CountingLimiter(BaseRateLimiter):
    """Lets everything through and counts it."""

    def __init__(self) -> None:
        self.acquired = 0

    def acquire(self, *, blocking: bool = True) -> bool:
        self.acquired += 1
        return True

    async def aacquire(self, *, blocking: bool = True) -> bool:
        return self.acquire()


@every_way
def test_the_rate_limiter_is_asked_once(make_engine: MakeEngine, ask: Any) -> None:
    limiter = CountingLimiter()
    ask(ChatPCR(engine=make_engine(), rate_limiter=limiter), "q")
    assert limiter.acquired == 1


@every_way
def test_fallbacks(make_engine: MakeEngine, ask: Any) -> None:
    broken, well = make_engine(reply=ModelError("broken")), make_engine(reply="well")
    llm = ChatPCR(engine=broken).with_fallbacks([ChatPCR(engine=well)])
    answer = ask(llm, "q")
    text = "".join(piece.content for piece in answer if isinstance(answer, list))
    assert "well" in (text or answer.content)
    assert len(broken.submitted) == 1


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_retries(make_engine: MakeEngine, way: str) -> None:
    engine = make_engine(reply=[ModelError("broken"), "well"])
    llm = ChatPCR(engine=engine).with_retry(
        stop_after_attempt=2, wait_exponential_jitter=False
    )
    assert WAYS[way](llm, "q").content == "well"


def test_nothing_is_repeated_that_cannot_succeed(make_engine: MakeEngine) -> None:
    engine = make_engine(reply="never")
    llm = ChatPCR(engine=engine).with_retry(
        retry_if_exception_type=(ModelError,), stop_after_attempt=3
    )
    with pytest.raises(RequestError):
        llm.invoke("q", frobnicate=1)
    assert not engine.submitted


# --- settings ---


def test_configurable_settings_load_nothing_twice(scripted_builds: list[Any]) -> None:
    llm = ChatPCR(model="m").configurable_fields(
        temperature=ConfigurableField(id="t"),
        model=ConfigurableField(id="model"),
    )
    for config in ({"t": 0.5}, {"t": 0.7}, {"model": "other"}, {"t": 0.1}):
        llm.invoke("q", {"configurable": config})
    assert [engine.config.model for engine in scripted_builds] == ["m", "other"]
    temperatures = [params.temperature for _, params, _ in scripted_builds[0].submitted]
    assert temperatures == [0.5, 0.7, 0.1]


def test_configurable_alternatives(make_engine: MakeEngine) -> None:
    llm = ChatPCR(engine=make_engine(reply="one")).configurable_alternatives(
        ConfigurableField(id="which"), two=ChatPCR(engine=make_engine(reply="two"))
    )
    assert llm.invoke("q").content == "one"
    assert llm.with_config(configurable={"which": "two"}).invoke("q").content == "two"


@pytest.mark.parametrize("disabled", [True, "tool_calling"])
def test_streaming_can_be_disabled(make_engine: MakeEngine, disabled: Any) -> None:
    llm = ChatPCR(engine=make_engine(reply="a b"), disable_streaming=disabled)
    (whole,) = llm.stream("q", tools=[ADD])
    assert whole.content == "a b"
    pieces = [piece.content for piece in llm.stream("q")]
    assert len(pieces) == (1 if disabled is True else 3)


def test_an_invoke_that_streams_has_everything(make_engine: MakeEngine) -> None:
    engine = make_engine(reply=f"Adding. {CALL}")
    plain = ChatPCR(engine=engine).invoke("q", tools=[ADD])
    streamed = ChatPCR(engine=engine, streaming=True).invoke("q", tools=[ADD])
    assert isinstance(streamed, AIMessage)
    assert streamed.content == plain.content
    assert streamed.tool_calls[0]["args"] == plain.tool_calls[0]["args"]
    assert streamed.usage_metadata["output_tokens"] == 8
    assert streamed.response_metadata["finish_reason"] == "tool_calls"


def test_the_profile_is_filled_when_the_engine_is_there(
    scripted_builds: list[Any],
) -> None:
    llm = ChatPCR(model="m")
    assert llm.profile is None
    llm.invoke("q", model="other")
    assert llm.profile is None  # that was another model
    llm.invoke("q")
    assert llm.profile is not None
    assert llm.profile["max_input_tokens"] == scripted_builds[-1].context_window
    assert llm.profile["tool_calling"] is True
    assert llm.profile["image_inputs"] is False
    assert ChatPCR(model="m").profile == llm.profile  # known at once by now


def test_a_profile_that_was_given_is_kept(make_engine: MakeEngine) -> None:
    llm = ChatPCR(engine=make_engine(), profile={"max_input_tokens": 7})
    llm.invoke("q")
    assert llm.profile == {"max_input_tokens": 7}


def test_trimming_keeps_what_fits(make_engine: MakeEngine) -> None:
    llm = ChatPCR(engine=make_engine())
    history = [HumanMessage(f"message number {i} of a long chat") for i in range(9)]
    kept = trim_messages(history, max_tokens=30, token_counter=llm, strategy="last")
    assert kept == history[-len(kept) :]
    assert llm.get_num_tokens_from_messages(kept) <= 30
    one_more = history[-len(kept) - 1 :]
    assert llm.get_num_tokens_from_messages(one_more) > 30
