"""Waiting for the engine in threads and on loops, and stopping it when nobody waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest

from pcr_core import (
    CancelledError,
    Completion,
    ModelError,
    QueueFullError,
    RequestError,
    Result,
    SamplingParams,
    Timing,
    Usage,
)
from pcr_integrations._bridge import Batch, Call, Running
from pcr_integrations._options import CallOptions

MakeEngine = Callable[..., Any]
pytestmark = pytest.mark.timeout(60)  # a blocked loop shows as a hang


def call_to(engine: Any, *, timeout: float | None = None, prompt: Any = "hi") -> Call:
    options = CallOptions(SamplingParams(), timeout=timeout)
    return Call(lambda: engine, lambda _: prompt, options)


def started(engine: Any, **kwargs: Any) -> Running:
    return call_to(engine, **kwargs).start()


def test_result_and_pieces(make_engine: MakeEngine) -> None:
    engine = make_engine(reply="one two")
    assert started(engine).result().text == "one two"
    assert list(started(engine).pieces()) == ["one", " two"]


def test_text_that_came_before_reading_is_read_at_once(make_engine: MakeEngine) -> None:
    engine = make_engine(stepwise=True)
    running = started(engine)
    arrived = threading.Event()
    running.completion.subscribe(arrived.set)
    engine.step()
    assert arrived.wait(30)
    assert next(running.pieces()) == "one"  # though nothing more happens


@pytest.mark.parametrize("read", [Running.result, lambda r: list(r.pieces())])
def test_failures_reach_the_caller(make_engine: MakeEngine, read: Any) -> None:
    engine = make_engine(reply=ModelError("out of memory"))
    with pytest.raises(ModelError, match="out of memory"):
        read(started(engine))


async def _read_all(running: Running) -> list[str]:
    return [piece async for piece in running.apieces()]


@pytest.mark.parametrize("read", [Running.aresult, _read_all])
def test_failures_reach_the_task(make_engine: MakeEngine, read: Any) -> None:
    async def main() -> None:
        await read(await call_to(engine).astart())

    engine = make_engine(reply=ModelError("out of memory"))
    with pytest.raises(ModelError, match="out of memory"):
        asyncio.run(main())


def test_a_closed_stream_cancels(make_engine: MakeEngine) -> None:
    engine = make_engine(stepwise=True)
    pieces = started(engine).pieces()
    engine.step()
    assert next(pieces) == "one"
    pieces.close()
    assert engine.completions[0].cancelled
    engine.step()
    assert engine.ended.acquire(timeout=30)


def test_a_stream_read_to_its_end_is_not_cancelled(make_engine: MakeEngine) -> None:
    engine = make_engine()
    list(started(engine).pieces())
    assert not engine.completions[0].cancelled


@pytest.mark.parametrize("read", [Running.result, lambda r: list(r.pieces())])
def test_a_timeout_cancels_and_says_so(make_engine: MakeEngine, read: Any) -> None:
    engine = make_engine(stepwise=True)
    with pytest.raises(TimeoutError, match=r"0\.01 s.*larger timeout="):
        read(started(engine, timeout=0.01))
    assert engine.completions[0].cancelled


@pytest.mark.parametrize("read", [Running.aresult, _read_all])
def test_a_timeout_on_a_loop(make_engine: MakeEngine, read: Any) -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError, match="larger timeout="):
            await read(await call_to(engine, timeout=0.01).astart())

    engine = make_engine(stepwise=True)
    asyncio.run(main())
    assert engine.completions[0].cancelled


@pytest.mark.parametrize("read", [Running.aresult, _read_all])
def test_the_loop_goes_on_while_the_engine_works(
    make_engine: MakeEngine, read: Any
) -> None:
    async def main() -> Any:
        engine.gate.clear()
        task = asyncio.ensure_future(read(await call_to(engine).astart()))
        for _ in range(100):
            await asyncio.sleep(0)
        assert not task.done()
        engine.gate.set()
        return await task

    engine = make_engine(reply="one two")
    asyncio.run(main())


def test_everything_slow_happens_off_the_loop(make_engine: MakeEngine) -> None:
    engine = make_engine()
    where: list[int] = []

    def open_engine() -> Any:
        where.append(threading.get_ident())
        return engine

    def render(_: Any) -> str:
        where.append(threading.get_ident())
        return "hi"

    async def main() -> None:
        await Call(open_engine, render, CallOptions(SamplingParams())).astart()

    asyncio.run(main())
    assert len(where) == 2
    assert threading.get_ident() not in where


@pytest.mark.parametrize("read", [Running.aresult, _read_all])
def test_a_cancelled_task_cancels(make_engine: MakeEngine, read: Any) -> None:
    async def main() -> None:
        running = await call_to(engine).astart()
        task = asyncio.ensure_future(read(running))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    engine = make_engine(stepwise=True)
    asyncio.run(main())
    assert engine.completions[0].cancelled


def test_a_task_cancelled_while_the_model_loads_leaves_nothing_running(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(stepwise=True)
    loading, loaded = threading.Event(), threading.Event()

    def open_engine() -> Any:
        loading.set()
        assert loaded.wait(30)
        return engine

    async def main() -> None:
        call = Call(open_engine, lambda _: "hi", CallOptions(SamplingParams()))
        task = asyncio.ensure_future(call.astart())
        await asyncio.to_thread(loading.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        loaded.set()

    asyncio.run(main())  # waits for its threads at the end
    assert len(engine.completions) == 1
    assert engine.completions[0].cancelled


def test_a_loop_that_is_gone_does_not_disturb_the_engine(
    make_engine: MakeEngine,
) -> None:
    async def main() -> None:
        task = asyncio.ensure_future(started(engine).aresult())
        await asyncio.sleep(0)
        task.cancel()

    engine = make_engine(stepwise=True)
    asyncio.run(main())
    engine.step(3)
    assert engine.ended.acquire(timeout=30)  # its thread lived to the end
    assert engine.completions[0].done


def test_one_engine_many_loops(make_engine: MakeEngine) -> None:
    engine = make_engine(reply=lambda prompt: f"echo {prompt}")
    answers: dict[int, list[str]] = {}

    async def ask(loop: int) -> list[str]:
        calls = [call_to(engine, prompt=f"{loop}.{i}") for i in range(5)]
        runs = await asyncio.gather(*(call.astart() for call in calls))
        return [r.text for r in await asyncio.gather(*(run.aresult() for run in runs))]

    def thread(loop: int) -> None:
        answers[loop] = asyncio.run(ask(loop))

    threads = [threading.Thread(target=thread, args=(loop,)) for loop in (1, 2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert answers == {n: [f"echo {n}.{i}" for i in range(5)] for n in (1, 2)}


class EndsWhileRead(Completion):
    """Gets its last piece and its end right after a reader took the ones before."""

    def take(self) -> list[str]:
        pieces = super().take()
        self.emit(" late")
        self.finish(
            Result("early late", [], None, "stop", Usage(1, 2, {}), timing=Timing())
        )
        return pieces


def test_nothing_is_lost_when_the_end_comes_between_two_looks() -> None:
    def fresh() -> Running:
        completion: Any = EndsWhileRead()
        completion.emit("early")
        engine: Any = None
        return Running(engine, completion, CallOptions(SamplingParams()))

    assert list(fresh().pieces()) == ["early", " late"]
    assert asyncio.run(_read_all(fresh())) == ["early", " late"]


# --- batches ---

TEXTS = [f"prompt {i}" for i in range(4)]


def test_a_batch_is_submitted_before_any_of_it_is_waited_for(
    make_engine: MakeEngine,
) -> None:
    engine, batch = make_engine(stepwise=True), Batch()
    for text in TEXTS:
        batch.start(call_to(engine, prompt=text))
    assert [prompt for prompt, _, _ in engine.submitted] == TEXTS
    assert not any(completion.done for completion in engine.completions)


def test_a_batch_longer_than_the_queue_waits_for_room(make_engine: MakeEngine) -> None:
    engine, batch = make_engine(max_waiting=2), Batch()
    begun = [batch.start(call_to(engine, prompt=text)) for text in TEXTS]
    assert [running.result().text for running in begun] == ["one two three"] * 4


def test_waiting_for_room_is_not_bound_by_the_timeout_of_another_call(
    make_engine: MakeEngine,
) -> None:
    engine, batch = make_engine(max_waiting=1, stepwise=True), Batch()
    batch.start(call_to(engine, timeout=0.01))
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(batch.start, call_to(engine))
        assert late in wait([late], timeout=0.1).not_done
        engine.completions[0].cancel()
        engine.step()
        assert late.result(30).completion is engine.completions[1]


def test_nothing_is_submitted_for_a_batch_that_is_over(make_engine: MakeEngine) -> None:
    engine, batch = make_engine(), Batch()
    batch.cancel()
    with pytest.raises(CancelledError, match="over"):
        batch.start(call_to(engine))
    assert engine.submitted == []


def test_a_queue_full_of_others_is_an_error(make_engine: MakeEngine) -> None:
    engine = make_engine(max_waiting=1, stepwise=True)
    started(engine)
    with pytest.raises(QueueFullError):
        Batch().start(call_to(engine))


def test_a_cancelled_batch_cancels_what_is_yet_to_come(make_engine: MakeEngine) -> None:
    engine, batch = make_engine(stepwise=True), Batch()
    batch.add(started(engine))
    batch.cancel()
    batch.add(started(engine))
    assert [completion.cancelled for completion in engine.completions] == [True, True]


def test_text_prompts_take_no_tools(make_engine: MakeEngine) -> None:
    options = CallOptions(SamplingParams(), response_format={"type": "json_object"})
    with pytest.raises(RequestError, match="need chat messages"):
        Call(make_engine, lambda _: "x", options).start()


# --- tools on their way into the prompt ---

ADD = {"type": "function", "function": {"name": "add", "parameters": {}}}
HISTORY = [
    {"role": "user", "content": "1 + 2?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "type": "function",
                "id": "x",
                "function": {"name": "add", "arguments": {"a": 1}},
            }
        ],
    },
    {"role": "tool", "content": "3", "tool_call_id": "x"},
]


def with_tools(prompt: Any, choice: str | None = None) -> CallOptions:
    from pcr_integrations._options import read_options

    return read_options({}, {"tools": [ADD], "tool_choice": choice})


def test_a_template_with_tools_gets_them_as_they_are(make_engine: MakeEngine) -> None:
    engine = make_engine()
    Call(lambda: engine, lambda _: HISTORY, with_tools(HISTORY)).start()
    ((turns, _, tools),) = engine.submitted
    assert turns == HISTORY
    assert tools == [ADD]


def test_a_template_without_tools_is_told_in_words(make_engine: MakeEngine) -> None:
    engine = make_engine(tools=False)
    Call(lambda: engine, lambda _: HISTORY, with_tools(HISTORY, "any")).start()
    ((turns, _, tools),) = engine.submitted
    assert tools is None
    assert [turn["role"] for turn in turns] == ["system", "user", "assistant", "user"]
    assert '"name": "add"' in turns[0]["content"]
    assert "You must call a function" in turns[0]["content"]
    assert turns[2]["content"] == (
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    )
    assert turns[3]["content"] == "<tool_response>\n3\n</tool_response>"


def test_an_asked_form_joins_the_system_turn(make_engine: MakeEngine) -> None:
    engine = make_engine()
    turns = [{"role": "system", "content": "Be brief."}, *HISTORY[:1]]
    schema = {"type": "object", "title": "Answer"}
    form = {"type": "json_schema", "json_schema": schema}
    options = CallOptions(SamplingParams(), response_format=form)
    Call(lambda: engine, lambda _: turns, options).start()
    ((sent, _, _),) = engine.submitted
    assert sent[0]["content"].startswith("Be brief.\n\nAnswer with one JSON object")
    assert '"title": "Answer"' in sent[0]["content"]
    assert sent[1:] == turns[1:]
