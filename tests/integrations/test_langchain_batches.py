"""Batches of both LangChain models: all in the queue first, each one an ``invoke``."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.rate_limiters import BaseRateLimiter

from pcr_core import ModelError, PromptTooLongError
from pcr_integrations.langchain import PCRLLM, ChatPCR
from pcr_integrations.langchain._batches import Turns

MakeEngine = Callable[..., Any]
pytestmark = pytest.mark.timeout(60)  # a call that waits for ever shows as a hang


def batch(llm: Any, inputs: Any, config: Any = None, **options: Any) -> list[Any]:
    return list(llm.batch(inputs, config, **options))


def abatch(llm: Any, inputs: Any, config: Any = None, **options: Any) -> list[Any]:
    return list(asyncio.run(llm.abatch(inputs, config, **options)))


def as_completed(llm: Any, inputs: Any, config: Any = None, **opts: Any) -> list[Any]:
    found = dict(llm.batch_as_completed(inputs, config, **opts))
    return [found[index] for index in range(len(inputs))]


def aas_completed(llm: Any, inputs: Any, config: Any = None, **opts: Any) -> list[Any]:
    async def main() -> dict[int, Any]:
        running = llm.abatch_as_completed(inputs, config, **opts)
        return {index: answer async for index, answer in running}

    found = asyncio.run(main())
    return [found[index] for index in range(len(inputs))]


WAYS = [batch, abatch, as_completed, aas_completed]
every_way = pytest.mark.parametrize("ask", WAYS)
both_models = pytest.mark.parametrize("model", [ChatPCR, PCRLLM])
PROMPTS = [f"prompt-{index}" for index in range(20)]  # more than a pool has threads


def echo(prompt: str) -> str:
    return "answer to " + next(word for word in prompt.split() if "prompt-" in word)


def texts(answers: Any) -> list[str]:
    return [getattr(answer, "content", answer) for answer in answers]


def asked(engine: Any) -> list[str]:
    """What was submitted, in the order of the queue."""
    return [
        prompt if isinstance(prompt, str) else prompt[-1]["content"]
        for prompt, _, _ in engine.submitted
    ]


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
    engine.step()

    def work() -> None:
        running = model(engine=engine).batch_as_completed(["a", "b"])
        assert next(running)[0] == 0
        running.close()

    with in_a_thread(work) as thread:
        until(lambda: len(engine.completions) == 2, thread)
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


# --- each is an invoke ---


class Trace(BaseCallbackHandler):
    """What tracing tools get to see, without ids and times."""

    def __init__(self) -> None:
        self.started: list[dict[str, Any]] = []
        self.ended: list[Any] = []
        self.failed: list[str] = []
        self.run_ids: list[Any] = []
        self.seen_by: list[str] = []

    def on_chat_model_start(
        self, serialized: Any, messages: Any, *, run_id: Any, **rest: Any
    ) -> None:
        self.run_ids.append(run_id)
        self.seen_by.append(_CALLER.get())
        text = [[message.content for message in turns] for turns in messages]
        parent = rest.pop("parent_run_id") is not None
        self.started.append({**rest, "messages": text, "has_parent": parent})

    def on_llm_start(self, serialized: Any, prompts: Any, **rest: Any) -> None:
        self.started.append({"prompts": prompts, "tags": rest["tags"]})

    def on_llm_end(self, response: Any, **rest: Any) -> None:
        self.ended.append(response.generations[0][0].text)

    def on_llm_error(self, error: BaseException, **rest: Any) -> None:
        self.failed.append(type(error).__name__)


_CALLER: ContextVar[str] = ContextVar("caller", default="nobody")


def configs(traces: list[Trace]) -> list[dict[str, Any]]:
    return [
        {
            "callbacks": [trace],
            "tags": [f"tag-{index}"],
            "metadata": {"index": index},
            "run_name": f"run-{index}",
        }
        for index, trace in enumerate(traces)
    ]


@every_way
def test_each_item_is_traced_as_an_invoke(make_engine: MakeEngine, ask: Any) -> None:
    llm = ChatPCR(engine=make_engine(reply=echo))
    batched, alone = [[Trace() for _ in range(3)] for _ in range(2)]
    token = _CALLER.set("this test")
    try:
        ask(llm, PROMPTS[:3], configs(batched), stop=["z"])
        for prompt, config in zip(PROMPTS, configs(alone), strict=False):
            llm.invoke(prompt, config, stop=["z"])
    finally:
        _CALLER.reset(token)
    assert [t.started for t in batched] == [t.started for t in alone]
    assert [t.ended for t in batched] == [t.ended for t in alone]
    assert [t.seen_by for t in batched] == [["this test"]] * 3
    assert [t.started[0]["name"] for t in batched] == ["run-0", "run-1", "run-2"]
    assert [t.started[0]["tags"] for t in batched] == [["tag-0"], ["tag-1"], ["tag-2"]]


@every_way
def test_the_text_models_callbacks_and_tags(make_engine: MakeEngine, ask: Any) -> None:
    traces = [Trace() for _ in range(3)]
    ask(PCRLLM(engine=make_engine(reply=echo)), PROMPTS[:3], configs(traces))
    for index, trace in enumerate(traces):
        expected = {"prompts": [PROMPTS[index]], "tags": [f"tag-{index}"]}
        assert trace.started == [expected]
        assert trace.ended == [f"answer to {PROMPTS[index]}"]


@pytest.mark.parametrize("ask", [batch, abatch])
def test_items_are_children_of_their_chains(make_engine: MakeEngine, ask: Any) -> None:
    trace = Trace()
    chain = ChatPromptTemplate.from_template("{input}") | ChatPCR(engine=make_engine())
    ask(chain, PROMPTS[:4], {"callbacks": [trace]})
    assert [start["has_parent"] for start in trace.started] == [True] * 4
    assert len(set(trace.run_ids)) == 4


def test_a_failure_is_reported_to_its_own_callbacks(make_engine: MakeEngine) -> None:
    llm = ChatPCR(engine=make_engine(reply=["one", ModelError("broken"), "three"]))
    traces = [Trace() for _ in range(3)]
    llm.batch(["a", "b", "c"], configs(traces), return_exceptions=True)
    assert [trace.failed for trace in traces] == [[], ["ModelError"], []]
    assert [trace.ended for trace in traces] == [["one"], [], ["three"]]


@every_way
def test_what_is_cached_needs_no_engine(make_engine: MakeEngine, ask: Any) -> None:
    engine = make_engine(reply=echo)
    llm = ChatPCR(engine=engine, cache=InMemoryCache())
    llm.invoke(PROMPTS[1])
    answers = ask(llm, PROMPTS[:3])
    assert asked(engine) == [PROMPTS[1], PROMPTS[0], PROMPTS[2]]
    assert texts(answers) == [f"answer to {prompt}" for prompt in PROMPTS[:3]]


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
def test_the_rate_limiter_is_asked_once_a_call(
    make_engine: MakeEngine, ask: Any
) -> None:
    limiter = CountingLimiter()
    ask(ChatPCR(engine=make_engine(), rate_limiter=limiter), PROMPTS)
    assert limiter.acquired == len(PROMPTS)


def test_a_call_from_within_an_item_has_no_place_in_the_batch(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(reply=["slow one", ModelError("broken"), "other"])
    other = make_engine(stepwise=True)

    class AsksAnother(BaseCallbackHandler):
        def on_llm_end(self, response: Any, **rest: Any) -> None:
            left.append(ChatPCR(engine=other).stream("beside it"))
            other.step()
            next(left[0])

    left: list[Any] = []
    llm = ChatPCR(engine=engine)
    with pytest.raises(ModelError):
        llm.batch(["a", "b"], [{"callbacks": [AsksAnother()]}, {}])
    assert not any(completion.cancelled for completion in other.completions)
    for stream in left:
        stream.close()


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
