"""LlamaIndex' ``PCRLLM`` on a scripted engine."""

from __future__ import annotations

import asyncio
import copy
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core import Settings
from llama_index.core.base.llms.base import BaseLLM
from llama_index.core.base.llms.types import (
    ChatMessage,
    ImageBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
)
from llama_index.core.callbacks import CallbackManager
from llama_index.core.utils import get_tokenizer

from pcr_core import ConfigError, ModelError, PromptTooLongError, RequestError
from pcr_integrations.llama_index import PCRLLM

MakeEngine = Callable[..., Any]
pytestmark = pytest.mark.timeout(60)

HELLO = [
    ChatMessage(role="system", content="Be brief."),
    ChatMessage(role="user", content="Hello"),
]


async def gather(stream: Any) -> list[Any]:
    return [response async for response in await stream]


def every_way(llm: PCRLLM) -> dict[str, list[Any]]:
    """Call all eight endpoints; a list of responses each."""
    return {
        "chat": [llm.chat(HELLO)],
        "complete": [llm.complete("Hello")],
        "stream_chat": list(llm.stream_chat(HELLO)),
        "stream_complete": list(llm.stream_complete("Hello")),
        "achat": [asyncio.run(llm.achat(HELLO))],
        "acomplete": [asyncio.run(llm.acomplete("Hello"))],
        "astream_chat": asyncio.run(gather(llm.astream_chat(HELLO))),
        "astream_complete": asyncio.run(gather(llm.astream_complete("Hello"))),
    }


def text_of(response: Any) -> str:
    return str(response.message.content if hasattr(response, "message") else response)


# --- answers ---


def test_all_eight_endpoints_give_the_same_answer(make_engine: MakeEngine) -> None:
    answers = every_way(PCRLLM(engine=make_engine(reply="a b c")))
    assert {name: text_of(got[-1]) for name, got in answers.items()} == dict.fromkeys(
        answers, "a b c"
    )


@pytest.mark.parametrize("way", ["stream_chat", "stream_complete"])
@pytest.mark.parametrize("prefix", ["", "a"])
def test_streams_have_all_text_and_what_is_new(
    make_engine: MakeEngine, way: str, prefix: str
) -> None:
    responses = every_way(PCRLLM(engine=make_engine(reply="a b c")))[prefix + way]
    assert [text_of(response) for response in responses] == [
        "a",
        "a b",
        "a b c",
        "a b c",
    ]
    assert [response.delta for response in responses] == ["a", " b", " c", ""]
    assert [response.raw is None for response in responses] == [True, True, True, False]


def test_raw_is_json_and_has_every_count(make_engine: MakeEngine) -> None:
    llm = PCRLLM(engine=make_engine(reply="a b"))
    llm.chat(HELLO)
    for name, responses in every_way(llm).items():
        raw = json.loads(json.dumps(responses[-1].raw))
        usage = raw["usage"]
        assert usage["completion_tokens"] == 2, name
        assert usage["total_tokens"] == usage["prompt_tokens"] + 2, name
        assert usage["cached_tokens"] == usage["cached_by_tier"]["dram"], name
        assert (
            usage["computed_tokens"] == usage["prompt_tokens"] - usage["cached_tokens"]
        ), name
        assert raw["timing"]["ttft"] == 0.25, name
        assert (raw["model"], raw["finish_reason"]) == ("scripted", "stop"), name


def test_logprobs(make_engine: MakeEngine) -> None:
    llm = PCRLLM(engine=make_engine(reply="a b"), logprobs=True)
    for responses in every_way(llm).values():
        (first, second) = responses[-1].logprobs
        assert (first[0].token, first[0].logprob) == ("a", -0.5)
        assert second[0].token == " b"
        assert responses[-1].raw["logprobs"][0]["logprob"] == -0.5
    assert PCRLLM(engine=make_engine()).chat(HELLO).logprobs is None


# --- prompts ---


def test_chat_turns(make_engine: MakeEngine) -> None:
    engine = make_engine()
    blocks = [TextBlock(text="a"), ThinkingBlock(content="hm"), TextBlock(text="b")]
    PCRLLM(engine=engine).chat([*HELLO, ChatMessage(role="assistant", blocks=blocks)])
    assert engine.submitted[0][0] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "a\nb"},
    ]


TURN = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize(
    ("chat", "override", "formatted", "sent"),
    [
        (True, None, False, TURN),
        (True, None, True, "Hello"),
        (False, None, False, "Hello"),
        (True, False, False, "Hello"),
        (False, True, False, TURN),
    ],
)
def test_completion_prompts(
    make_engine: MakeEngine,
    chat: bool,
    override: bool | None,
    formatted: bool,
    sent: Any,
) -> None:
    engine = make_engine(chat=chat)
    llm = PCRLLM(engine=engine, is_chat_model=override)
    llm.complete("Hello", formatted=formatted)
    list(llm.stream_complete("Hello", formatted))
    asyncio.run(llm.acomplete("Hello", formatted=formatted))
    asyncio.run(gather(llm.astream_complete("Hello", formatted=formatted)))
    assert [prompt for prompt, _, _ in engine.submitted] == [sent] * 4


def test_the_users_own_prompt_functions_are_used(make_engine: MakeEngine) -> None:
    engine = make_engine()
    llm = PCRLLM(
        engine=engine,
        messages_to_prompt=lambda messages: f"{len(messages)} messages",
        completion_to_prompt=lambda prompt: f"[{prompt}]",
    )
    llm.chat(HELLO)
    llm.complete("Hello")
    llm.complete("Hello", formatted=True)
    assert [p for p, _, _ in engine.submitted] == ["2 messages", "[Hello]", "Hello"]


def test_what_is_not_text_is_refused(make_engine: MakeEngine) -> None:
    image = ChatMessage(role="user", blocks=[ImageBlock(image=b"x")])
    with pytest.raises(RequestError, match="ImageBlock; PCR serves text models"):
        PCRLLM(engine=make_engine()).chat([image])


def test_an_asked_form_reaches_the_model(make_engine: MakeEngine) -> None:
    engine = make_engine()
    PCRLLM(engine=engine).chat(HELLO, response_format={"type": "json_object"})
    assert "one JSON object" in engine.submitted[0][0][0]["content"]


# --- options ---


def test_options_by_constructor_and_call(make_engine: MakeEngine) -> None:
    engine = make_engine()
    llm = PCRLLM(engine=engine, max_new_tokens=9, temperature=0.5, stop=["z"])
    llm.chat(HELLO)
    llm.complete("Hello", max_tokens=8, stop=["y"], seed=1, top_p=0.5)
    asyncio.run(llm.achat(HELLO, max_new_tokens=7, temperature=0.0))
    first, second, third = (params for _, params, _ in engine.submitted)
    assert (first.max_tokens, first.temperature, first.stop) == (9, 0.5, ("z",))
    assert (second.max_tokens, second.stop, second.seed) == (8, ("y",), 1)
    assert (third.max_tokens, third.temperature) == (7, 0.0)


def test_unknown_call_options_are_refused(make_engine: MakeEngine) -> None:
    llm = PCRLLM(engine=make_engine())
    for call in (llm.chat, llm.stream_chat):
        with pytest.raises(RequestError, match="unknown call option 'temprature'"):
            call(HELLO, temprature=1)
    with pytest.raises(RequestError, match="tools need chat messages"):
        llm.complete("q", tools=[{"type": "function", "function": {"name": "f"}}])


def test_unknown_settings_are_refused(make_engine: MakeEngine) -> None:
    with pytest.raises(ConfigError, match="did you mean 'context_window'"):
        PCRLLM(context_windw=3)
    with pytest.raises(ConfigError, match="engine= was given together with model"):
        PCRLLM(engine=make_engine(), model_name="x")


# --- what LlamaIndex asks about it ---


def test_metadata_follows_the_model(make_engine: MakeEngine) -> None:
    metadata = PCRLLM(engine=make_engine(window=1000, tools=False)).metadata
    assert metadata.context_window == 1000
    assert metadata.num_output == 256
    assert metadata.is_chat_model
    assert not metadata.is_function_calling_model
    assert metadata.model_name == "scripted"


def test_metadata_can_be_overridden(make_engine: MakeEngine) -> None:
    metadata = PCRLLM(
        engine=make_engine(),
        context_window=300,
        is_chat_model=False,
        is_function_calling_model=False,
    ).metadata
    assert metadata.context_window == 300
    assert metadata.num_output == 150  # half the window stays for the prompt
    assert not metadata.is_chat_model
    assert not metadata.is_function_calling_model


def test_class_and_payload(make_engine: MakeEngine) -> None:
    llm = PCRLLM(engine=make_engine())
    assert BaseLLM in type(llm).__mro__
    assert llm.class_name() == "PCRLLM"
    assert "engine" not in llm.to_dict()
    json.dumps(llm.to_payload())


def test_it_survives_its_own_dict(scripted_builds: list[Any]) -> None:
    llm = PCRLLM(model_name="m", max_tokens=5, stop=["x"], cache_dir="c")
    again = PCRLLM.from_dict(llm.to_dict())
    assert again.to_dict() == llm.to_dict()
    assert not scripted_builds


def test_nothing_is_built_before_it_is_needed(scripted_builds: list[Any]) -> None:
    llm = PCRLLM(model="m")
    assert llm.to_payload()["model_name"] == "m"
    assert not scripted_builds
    assert llm.metadata.model_name == "m"
    PCRLLM(model_name="m", temperature=0.3).complete("q")
    assert len(scripted_builds) == 1
    PCRLLM(model="m", exact=False).complete("q")
    assert len(scripted_builds) == 2


def test_settings_and_callback_manager(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Settings, "_llm", None)
    monkeypatch.setattr(Settings, "_callback_manager", CallbackManager())
    llm = PCRLLM(engine=make_engine())
    Settings.llm = llm
    assert Settings.llm is llm
    assert llm.callback_manager is Settings.callback_manager


def test_install_tokenizer(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    import llama_index.core

    monkeypatch.setattr(llama_index.core, "global_tokenizer", None)
    engine = make_engine()
    PCRLLM(engine=engine).install_tokenizer()
    expected = engine.tokenizer.encode("x y", add_special_tokens=False)
    assert get_tokenizer()("x y") == expected


def test_copies_share_the_engine(make_engine: MakeEngine) -> None:
    engine = make_engine()
    assert copy.deepcopy(PCRLLM(engine=engine)).engine is engine


# --- failures, stopping, threads, loops ---


def test_failures_reach_the_caller(make_engine: MakeEngine) -> None:
    llm = PCRLLM(engine=make_engine(reply=ModelError("broken")))
    calls: list[Callable[[], Any]] = [
        lambda: llm.chat(HELLO),
        lambda: llm.complete("q"),
        lambda: list(llm.stream_chat(HELLO)),
        lambda: list(llm.stream_complete("q")),
        lambda: asyncio.run(llm.achat(HELLO)),
        lambda: asyncio.run(llm.acomplete("q")),
        lambda: asyncio.run(gather(llm.astream_chat(HELLO))),
        lambda: asyncio.run(gather(llm.astream_complete("q"))),
    ]
    for call in calls:
        with pytest.raises(ModelError, match="broken"):
            call()


def test_a_prompt_beyond_the_window(make_engine: MakeEngine) -> None:
    llm = PCRLLM(engine=make_engine(window=3))
    with pytest.raises(PromptTooLongError, match="holds 3"):
        llm.chat(HELLO)


@pytest.mark.parametrize("way", ["stream_chat", "stream_complete"])
def test_closing_a_stream_frees_the_engine(make_engine: MakeEngine, way: str) -> None:
    engine = make_engine(stepwise=True)
    stream = getattr(PCRLLM(engine=engine), way)(HELLO if "chat" in way else "q")
    engine.step()
    assert next(stream).delta == "one"
    stream.close()
    assert engine.completions[0].cancelled
    engine.step()
    assert engine.ended.acquire(timeout=30)


@pytest.mark.parametrize("way", ["astream_chat", "astream_complete"])
def test_leaving_an_async_stream_frees_the_engine(
    make_engine: MakeEngine, way: str
) -> None:
    engine = make_engine(stepwise=True)

    async def main() -> None:
        llm = PCRLLM(engine=engine)
        stream = await getattr(llm, way)(HELLO if "chat" in way else "q")
        engine.step()
        assert (await anext(stream)).delta == "one"
        await stream.aclose()
        assert engine.completions[0].cancelled

    asyncio.run(main())


@pytest.mark.parametrize("way", ["achat", "acomplete"])
def test_cancelling_a_task_frees_the_engine(make_engine: MakeEngine, way: str) -> None:
    engine = make_engine(stepwise=True)

    async def main() -> None:
        llm = PCRLLM(engine=engine)
        call = getattr(llm, way)(HELLO if "chat" in way else "q")
        task = asyncio.ensure_future(call)
        while not engine.completions:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert engine.completions[0].cancelled


@pytest.mark.parametrize(
    "way", ["achat", "acomplete", "astream_chat", "astream_complete"]
)
def test_the_loop_turns_while_it_waits(make_engine: MakeEngine, way: str) -> None:
    engine = make_engine()
    engine.gate.clear()

    async def main() -> None:
        llm = PCRLLM(engine=engine)
        call = getattr(llm, way)(HELLO if "chat" in way else "q")
        task = asyncio.ensure_future(gather(call) if "stream" in way else call)
        while not engine.completions:
            await asyncio.sleep(0)
        for _ in range(100):
            await asyncio.sleep(0)
        assert not task.done()
        engine.gate.set()
        await task

    asyncio.run(main())


def test_two_loops_at_once(make_engine: MakeEngine) -> None:
    llm = PCRLLM(engine=make_engine(reply=lambda prompt: f"echo {prompt.split()[1]}"))
    answers: dict[str, list[str]] = {}

    async def ask(name: str) -> list[str]:
        calls = [llm.acomplete(f"{name}{i}") for i in range(10)]
        return [response.text for response in await asyncio.gather(*calls)]

    def run(name: str) -> None:
        answers[name] = asyncio.run(ask(name))

    threads = [threading.Thread(target=run, args=(name,)) for name in "xy"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {n: [f"echo {n}{i}" for i in range(10)] for n in "xy"}


def test_roles() -> None:
    from pcr_integrations.llama_index._messages import _ROLES

    assert set(_ROLES) == set(MessageRole)
