"""Batches of both LangChain models: all in the queue first, each one an ``invoke``."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate

from pcr_core import ModelError, PromptTooLongError
from pcr_integrations.langchain import PCRLLM, ChatPCR
from pcr_integrations.langchain._batches import Turns
from tests.ctrl_c import press_ctrl_c
from tests.integrations.asking import PROMPTS, WAYS, abatch, asked, batch, echo, texts

MakeEngine = Callable[..., Any]
pytestmark = pytest.mark.timeout(60)  # a call that waits for ever shows as a hang


every_way = pytest.mark.parametrize("ask", WAYS)
both_models = pytest.mark.parametrize("model", [ChatPCR, PCRLLM])


def until(condition: Callable[[], bool], thread: threading.Thread) -> None:
    while not condition():
        thread.join(0.001)
        assert thread.is_alive() or condition()


@contextmanager
def in_a_thread(work: Callable[[], Any]) -> Iterator[threading.Thread]:
    """Run ``work`` beside the block, which ends it; its failure fails the test."""
    failures: list[BaseException] = []

    def go() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=go)
    thread.start()
    yield thread
    thread.join()
    if failures:
        raise failures[0]


# --- all of it is in the queue first ---


@both_models
@every_way
def test_all_prompts_are_in_the_queue_before_one_is_answered(
    make_engine: MakeEngine, model: Any, ask: Any
) -> None:
    engine = make_engine(reply=echo)
    engine.gate.clear()
    answers: list[Any] = []
    llm = model(engine=engine)
    with in_a_thread(lambda: answers.extend(ask(llm, PROMPTS))) as thread:
        until(lambda: len(engine.submitted) == len(PROMPTS), thread)
        engine.gate.set()
    assert asked(engine) == PROMPTS
    assert texts(answers) == [f"answer to {prompt}" for prompt in PROMPTS]


@pytest.mark.parametrize("ask", [batch, abatch])
@pytest.mark.parametrize(
    "around",
    [
        lambda llm: ChatPromptTemplate.from_template("{input}") | llm,
        lambda llm: llm.bind(stop=["x"]),
        lambda llm: llm.with_retry(),
        lambda llm: llm.with_fallbacks([llm]),
        lambda llm: llm.with_config(tags=["t"]) | StrOutputParser(),
    ],
    ids=["chain", "bind", "retry", "fallbacks", "config"],
)
def test_a_batch_around_the_model_is_a_batch_of_the_model(
    make_engine: MakeEngine, ask: Any, around: Any
) -> None:
    engine = make_engine(reply=echo)
    engine.gate.clear()
    answers: list[Any] = []
    chain = around(ChatPCR(engine=engine))
    with in_a_thread(lambda: answers.extend(ask(chain, PROMPTS))) as thread:
        until(lambda: len(engine.submitted) == len(PROMPTS), thread)
        engine.gate.set()
    assert sorted(asked(engine)) == sorted(PROMPTS)
    assert texts(answers) == [f"answer to {prompt}" for prompt in PROMPTS]


@every_way
def test_calls_that_stream_are_queued_in_order_too(
    make_engine: MakeEngine, ask: Any
) -> None:
    engine = make_engine(reply=echo)
    answers = ask(ChatPCR(engine=engine, streaming=True), PROMPTS)
    assert asked(engine) == PROMPTS
    assert texts(answers) == [f"answer to {prompt}" for prompt in PROMPTS]


@both_models
@every_way
def test_a_batch_longer_than_the_queue_waits_for_room(
    make_engine: MakeEngine, model: Any, ask: Any
) -> None:
    engine = make_engine(reply=echo, max_waiting=3)
    answers = ask(model(engine=engine), PROMPTS)
    assert texts(answers) == [f"answer to {prompt}" for prompt in PROMPTS]


@both_models
@every_way
def test_max_concurrency_limits_what_is_under_way(
    make_engine: MakeEngine, model: Any, ask: Any
) -> None:
    engine, under_way = make_engine(reply=echo), []
    engine.gate.clear()
    submit = engine.submit

    def counting(*args: Any, **kwargs: Any) -> Any:
        completion = submit(*args, **kwargs)
        under_way.append(sum(not one.done for one in engine.completions))
        return completion

    engine.submit = counting
    llm, config, answers = model(engine=engine), {"max_concurrency": 3}, []
    with in_a_thread(lambda: answers.extend(ask(llm, PROMPTS, config))) as thread:
        until(lambda: len(under_way) == 3, thread)
        engine.gate.set()
    assert max(under_way) == 3
    assert texts(answers) == [f"answer to {prompt}" for prompt in PROMPTS]


@every_way
@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_that_allows_nothing(
    make_engine: MakeEngine, ask: Any, limit: int
) -> None:
    with pytest.raises(ValueError, match="max_concurrency must be at least 1"):
        ask(ChatPCR(engine=make_engine()), PROMPTS, {"max_concurrency": limit})


@both_models
@every_way
@pytest.mark.parametrize("count", [0, 1])
def test_none_and_one(
    make_engine: MakeEngine, model: Any, ask: Any, count: int
) -> None:
    answers = ask(model(engine=make_engine(reply=echo)), PROMPTS[:count])
    assert texts(answers) == ["answer to prompt-0"][:count]


# --- failures ---


@both_models
@every_way
def test_failures_are_returned_in_their_places(
    make_engine: MakeEngine, model: Any, ask: Any
) -> None:
    engine = make_engine(reply=["one", ModelError("broken"), "three"], window=50)
    inputs = ["a", "b", "word " * 60, "c"]
    answers = ask(model(engine=engine), inputs, return_exceptions=True)
    assert [type(answer) for answer in answers[1:3]] != [str, str]
    assert isinstance(answers[1], ModelError)
    assert isinstance(answers[2], PromptTooLongError)
    assert texts([answers[0], answers[3]]) == ["one", "three"]


@both_models
@every_way
def test_the_first_failure_is_raised_and_the_rest_cancelled(
    make_engine: MakeEngine, model: Any, ask: Any
) -> None:
    engine = make_engine(reply=["slow one", ModelError("broken")], stepwise=True)
    llm = model(engine=engine)

    def work() -> None:
        with pytest.raises(ModelError, match="broken"):
            ask(llm, ["a", "b"])

    with in_a_thread(work) as thread:
        until(lambda: bool(engine.completions), thread)
        until(lambda: engine.completions[0].cancelled, thread)
        engine.step(2)
    assert len(engine.completions) == 2


@both_models
def test_leaving_as_completed_early_cancels_the_rest(
    make_engine: MakeEngine, model: Any
) -> None:
    engine = make_engine(reply=["now", "later on"], stepwise=True)
    submitted = threading.Event()
    engine.step()

    def work() -> None:
        running = model(engine=engine).batch_as_completed(["a", "b"])
        assert next(running)[0] == 0
        assert submitted.wait(30)
        running.close()

    with in_a_thread(work) as thread:
        until(lambda: len(engine.completions) == 2, thread)
        submitted.set()
        until(lambda: engine.completions[1].cancelled, thread)
        engine.step(2)


@both_models
@pytest.mark.parametrize("method", ["abatch", "abatch_as_completed"])
def test_cancelling_the_task_cancels_all_of_it(
    make_engine: MakeEngine, model: Any, method: str
) -> None:
    engine = make_engine(stepwise=True)

    async def work() -> None:
        running = getattr(model(engine=engine), method)(PROMPTS)
        if method == "abatch":
            await running
        else:
            [answer async for answer in running]

    async def main() -> None:
        task = asyncio.ensure_future(work())
        while len(engine.completions) < 5:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert all(completion.cancelled for completion in engine.completions)


@both_models
def test_ctrl_c_cancels_all_of_it(make_engine: MakeEngine, model: Any) -> None:
    engine = make_engine(stepwise=True)
    main = threading.main_thread()

    def press() -> None:
        until(lambda: len(engine.completions) == 5, main)
        press_ctrl_c(lambda: all(one.cancelled for one in engine.completions))
        engine.step(5)

    with in_a_thread(press), pytest.raises(KeyboardInterrupt):
        model(engine=engine).batch(PROMPTS[:5])


def test_as_completed_is_in_the_order_of_completion(make_engine: MakeEngine) -> None:
    first_may_end = threading.Event()

    def reply(prompt: str) -> str:
        if "prompt-0" in prompt:
            assert first_may_end.wait(30)
        return echo(prompt)

    running = ChatPCR(engine=make_engine(reply=reply)).batch_as_completed(PROMPTS[:3])
    ends = [next(running)[0], next(running)[0]]
    first_may_end.set()
    assert sorted(ends) == [1, 2]
    assert [index for index, _ in running] == [0]


def test_the_loop_turns_while_a_batch_waits(make_engine: MakeEngine) -> None:
    engine = make_engine(reply=echo)
    engine.gate.clear()

    async def main() -> list[Any]:
        task = asyncio.ensure_future(ChatPCR(engine=engine).abatch(PROMPTS))
        while len(engine.completions) < len(PROMPTS):
            await asyncio.sleep(0)
        for _ in range(100):
            await asyncio.sleep(0)
        assert not task.done()
        engine.gate.set()
        return await task

    assert len(asyncio.run(main())) == len(PROMPTS)


# --- together ---


@both_models
def test_batches_of_six_threads_at_once(make_engine: MakeEngine, model: Any) -> None:
    llm = model(engine=make_engine(reply=echo))
    answers: dict[int, list[str]] = {}

    def ask(number: int) -> None:
        prompts = [f"prompt-{number}.{index}" for index in range(15)]
        answers[number] = texts(llm.batch(prompts))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(6):
        expected = [f"answer to prompt-{number}.{index}" for index in range(15)]
        assert answers[number] == expected


# --- the order itself ---


@given(st.integers(0, 12), st.one_of(st.none(), st.integers(1, 5)), st.randoms())
def test_turns(count: int, at_most: int | None, chance: Any) -> None:
    turns, order, running, queued = Turns(count, at_most), [], [], set()
    while not turns.over:
        if (index := turns.next()) is not None:
            order.append(index)
            running.append(index)
            assert all(one in queued for one in running[:-1])  # one begins at a time
            assert at_most is None or len(running) <= at_most
            assert turns.next() is None
        index = chance.choice(running)
        if index not in queued and chance.random() < 0.7:
            queued.add(index)
            turns.begun(index)
        else:
            running.remove(index)
            turns.ended(index)
    assert order == list(range(count))
    assert not running
