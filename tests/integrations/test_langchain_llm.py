"""LangChain's text model on a scripted engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from pcr_core import ModelError, RequestError
from pcr_integrations.langchain import PCRLLM

MakeEngine = Callable[..., Any]
pytestmark = pytest.mark.timeout(60)


def test_the_prompt_goes_in_as_it_is(make_engine: MakeEngine) -> None:
    engine = make_engine(reply=" Paris")
    assert PCRLLM(engine=engine, max_tokens=4).invoke("The capital is") == " Paris"
    ((prompt, params, _),) = engine.submitted
    assert prompt == "The capital is"
    assert params.max_tokens == 4


def test_a_batch_is_in_the_queue_before_the_first_answer(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(reply=lambda prompt: f"<{prompt}>")
    engine.gate.clear()
    prompts = [f"p{i}" for i in range(7)]
    answers: list[str] = []
    waiting = threading.Thread(
        target=lambda: answers.extend(PCRLLM(engine=engine).batch(list(prompts)))
    )
    waiting.start()
    while len(engine.submitted) < 7:
        assert waiting.is_alive()
    engine.gate.set()
    waiting.join()
    assert answers == [f"<{prompt}>" for prompt in prompts]


def test_a_failure_in_a_batch_cancels_the_rest(make_engine: MakeEngine) -> None:
    engine = make_engine(reply=[ModelError("broken"), "never"], stepwise=True)
    with pytest.raises(ModelError, match="broken"):
        PCRLLM(engine=engine).generate(["a", "b"])
    assert engine.completions[1].cancelled


def test_result_and_usage(make_engine: MakeEngine) -> None:
    llm = PCRLLM(engine=make_engine(reply="a b"))
    result = llm.generate(["one two", "one two"])
    assert result.llm_output is not None
    assert result.llm_output["model_name"] == "scripted"
    usage = result.llm_output["token_usage"]
    assert usage["completion_tokens"] == 4
    info = result.generations[1][0].generation_info
    assert info is not None
    assert info["finish_reason"] == "stop"
    assert info["pcr"]["usage"]["completion_tokens"] == 2


def test_streams(make_engine: MakeEngine) -> None:
    llm = PCRLLM(engine=make_engine(reply="a b"))

    async def read() -> list[str]:
        return [piece async for piece in llm.astream("q")]

    assert list(llm.stream("q")) == ["a", " b", ""]
    assert asyncio.run(read()) == ["a", " b", ""]
    last = list(llm._stream("q"))[-1].generation_info
    assert last is not None
    assert last["pcr"]["timing"]["ttft"] == 0.25


def test_async_batch(make_engine: MakeEngine) -> None:
    llm = PCRLLM(engine=make_engine(reply=lambda prompt: f"<{prompt}>"))
    assert asyncio.run(llm.abatch(["a", "b"])) == ["<a>", "<b>"]
    assert asyncio.run(llm.ainvoke("c")) == "<c>"


def test_cancelling_an_async_batch_cancels_all_of_it(make_engine: MakeEngine) -> None:
    engine = make_engine(stepwise=True)

    async def main() -> None:
        task = asyncio.ensure_future(PCRLLM(engine=engine).agenerate(["a", "b", "c"]))
        while len(engine.completions) < 3:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert all(completion.cancelled for completion in engine.completions)


def test_breaking_out_of_a_stream_frees_the_engine(make_engine: MakeEngine) -> None:
    engine = make_engine(stepwise=True)
    engine.step()
    for _ in PCRLLM(engine=engine).stream("q"):
        break
    assert engine.completions[0].cancelled


@pytest.mark.parametrize(
    "bad",
    [
        {"frobnicate": 1},
        {"response_format": {"type": "json_object"}},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
    ],
)
def test_bad_call_options(make_engine: MakeEngine, bad: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        PCRLLM(engine=make_engine()).invoke("q", **bad)


def test_counting_and_tracing(make_engine: MakeEngine) -> None:
    llm = PCRLLM(engine=make_engine(), stop=["x"])
    assert llm.get_num_tokens("three words here") == 3
    assert llm._get_ls_params()["ls_model_type"] == "llm"
    assert llm._get_ls_params()["ls_stop"] == ["x"]
    assert llm._llm_type == "pcr"
    assert llm._identifying_params["model"] == "scripted"


def test_equal_settings_share_an_engine_with_the_chat_model(
    scripted_builds: list[Any],
) -> None:
    from pcr_integrations.langchain import ChatPCR

    PCRLLM(model="m").invoke("q")
    ChatPCR(model="m").invoke("q")
    assert len(scripted_builds) == 1
