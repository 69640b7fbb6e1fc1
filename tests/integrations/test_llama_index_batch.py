"""``batch_query``: prompts early, answers in order, errors where they belong."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core import Settings
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.indices.query.query_transform import HyDEQueryTransform
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.query_engine import (
    CustomQueryEngine,
    RetrieverQueryEngine,
    TransformQueryEngine,
)
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

from pcr_core import ModelError, PromptTooLongError, QueueFullError, RequestError
from pcr_integrations.llama_index import PCRLLM, abatch_query, batch_query
from tests.ctrl_c import press_ctrl_c

MakeEngine = Callable[..., Any]
pytestmark = pytest.mark.timeout(60)

PATIENCE = 30


class Numbered(BaseRetriever):
    """Gives a document that repeats the question; counts who is inside."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.loops: list[bool] = []
        self.before: Callable[[str], None] = lambda question: None

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        question = query_bundle.query_str
        self.before(question)
        self.asked.append(question)
        text = f"Document about {question}"
        return [NodeWithScore(node=TextNode(text=text), score=1.0)]

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        self.loops.append(True)
        return self._retrieve(query_bundle)


def echo(prompt: str) -> str:
    """Answer with the question."""
    return prompt.split("Query: ")[1].split("\n")[0]


def build(engine: Any, retriever: Any = None, **options: Any) -> RetrieverQueryEngine:
    return RetrieverQueryEngine.from_args(
        retriever or Numbered(), llm=PCRLLM(engine=engine), **options
    )


def run_async(query_engine: Any, questions: Any, **options: Any) -> list[Any]:
    return asyncio.run(abatch_query(query_engine, questions, **options))


WAYS: dict[str, Callable[..., list[Any]]] = {"sync": batch_query, "async": run_async}
both_ways = pytest.mark.parametrize("ask", WAYS.values(), ids=WAYS)
QUESTIONS = [f"question{number}" for number in range(12)]


def texts(answers: list[Any]) -> list[str]:
    return [str(answer) for answer in answers]


class InThread:
    """Runs a call beside the test; ``result()`` waits for it."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._value: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(call,))
        self._thread.start()

    def _run(self, call: Callable[[], Any]) -> None:
        try:
            self._value = call()
        except BaseException as error:
            self._error = error

    def result(self) -> Any:
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error
        return self._value


@pytest.fixture
def arrivals(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, int], None]:
    """Waits until a scripted engine has so many requests."""
    from pcr_core import Completion

    arrived = threading.Condition()
    original = Completion.subscribe

    def subscribe(self: Completion, listener: Any) -> None:
        original(self, listener)
        with arrived:
            arrived.notify_all()

    monkeypatch.setattr(Completion, "subscribe", subscribe)

    def wait(engine: Any, count: int) -> None:
        with arrived:
            assert arrived.wait_for(lambda: len(engine.submitted) >= count, PATIENCE)

    return wait


# --- the point of it ---


@both_ways
@pytest.mark.parametrize("chat", [True, False])
def test_answers_in_order(make_engine: MakeEngine, ask: Any, chat: bool) -> None:
    engine = make_engine(reply=echo, chat=chat)
    assert texts(ask(build(engine), QUESTIONS)) == QUESTIONS
    assert texts(ask(build(engine), iter(QUESTIONS[:2]))) == QUESTIONS[:2]


@both_ways
def test_every_prompt_is_submitted_before_any_is_answered(
    make_engine: MakeEngine, arrivals: Any, ask: Any
) -> None:
    engine = make_engine(reply=echo)
    engine.gate.clear()
    running = InThread(lambda: ask(build(engine), QUESTIONS))
    arrivals(engine, len(QUESTIONS))
    assert not any(completion.done for completion in engine.completions)
    engine.gate.set()
    assert texts(running.result()) == QUESTIONS


@both_ways
def test_prompts_come_in_the_order_of_the_questions(
    make_engine: MakeEngine, ask: Any
) -> None:
    engine = make_engine(reply=echo)
    ask(build(engine), QUESTIONS)
    assert [echo(engine.render(prompt)) for prompt, *_ in engine.submitted] == QUESTIONS


def test_answers_come_while_later_questions_are_retrieved(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(reply=echo)
    retriever = Numbered()

    def wait_for_the_first_answer(question: str) -> None:
        if question == QUESTIONS[-1]:
            assert engine.ended.acquire(timeout=PATIENCE)

    retriever.before = wait_for_the_first_answer
    assert texts(batch_query(build(engine, retriever), QUESTIONS)) == QUESTIONS


@both_ways
@pytest.mark.parametrize("mode", ["refine", "tree_summarize", "accumulate"])
def test_it_answers_as_query_does(make_engine: MakeEngine, ask: Any, mode: str) -> None:
    query_engine = build(make_engine(reply=lambda p: str(len(p))), response_mode=mode)
    alone = [query_engine.query(question) for question in QUESTIONS[:3]]
    together = ask(query_engine, QUESTIONS[:3])
    assert texts(together) == texts(alone)
    assert [answer.source_nodes[0].text for answer in together] == [
        answer.source_nodes[0].text for answer in alone
    ]


@both_ways
def test_what_streams_is_read_to_the_end(make_engine: MakeEngine, ask: Any) -> None:
    answers = ask(build(make_engine(reply=echo), streaming=True), QUESTIONS)
    assert [answer.response for answer in answers] == QUESTIONS


def test_bundles_are_questions_too(make_engine: MakeEngine) -> None:
    questions = [QueryBundle("one", custom_embedding_strs=["x"]), "two"]
    answers = batch_query(build(make_engine(reply=echo)), questions)
    assert texts(answers) == ["one", "two"]


def test_no_questions_no_answers(make_engine: MakeEngine) -> None:
    assert batch_query(build(make_engine()), []) == []


# --- limits ---


@both_ways
def test_max_concurrency(make_engine: MakeEngine, arrivals: Any, ask: Any) -> None:
    engine = make_engine(reply=echo)
    retriever = Numbered()
    engine.gate.clear()
    query_engine = build(engine, retriever)
    running = InThread(lambda: ask(query_engine, QUESTIONS, max_concurrency=3))
    arrivals(engine, 3)
    retrieved_all = threading.Event()
    while len(retriever.asked) < len(QUESTIONS):  # retrieval is not held up
        retrieved_all.wait(0.001)
    assert len(engine.submitted) == 3
    engine.gate.set()
    assert texts(running.result()) == QUESTIONS


def test_retrieval_workers(make_engine: MakeEngine) -> None:
    retriever = Numbered()
    meeting = threading.Barrier(3, timeout=PATIENCE)
    retriever.before = lambda question: meeting.wait() and None
    answers = batch_query(
        build(make_engine(reply=echo), retriever), QUESTIONS, retrieval_workers=3
    )
    assert texts(answers) == QUESTIONS


def test_one_retrieval_at_a_time_unless_told_otherwise(make_engine: MakeEngine) -> None:
    retriever, inside = Numbered(), threading.Lock()

    def alone(question: str) -> None:
        assert inside.acquire(blocking=False)
        inside.release()

    retriever.before = alone
    batch_query(build(make_engine(reply=echo), retriever), QUESTIONS)
    assert retriever.asked == QUESTIONS


@both_ways
@pytest.mark.parametrize("mode", ["compact", "tree_summarize"])
def test_a_full_queue_is_waited_for(
    make_engine: MakeEngine, ask: Any, mode: str
) -> None:
    engine = make_engine(reply=echo, max_waiting=2)
    assert texts(ask(build(engine, response_mode=mode), QUESTIONS)) == QUESTIONS


@both_ways
def test_but_not_if_it_is_full_of_others(make_engine: MakeEngine, ask: Any) -> None:
    with pytest.raises(QueueFullError):
        ask(build(make_engine(max_waiting=0)), QUESTIONS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_concurrency": 0}, "max_concurrency is a whole number above 0, not 0"),
        ({"max_concurrency": True}, "max_concurrency"),
        ({"retrieval_workers": None}, "retrieval_workers .* not None"),
        ({"questions": "one"}, "a list of questions, not one"),
        ({"questions": ["one", 2]}, "question 1 is a int"),
        ({"query_engine": object()}, "a query engine, not object"),
    ],
)
@both_ways
def test_bad_arguments(
    make_engine: MakeEngine, ask: Any, options: dict[str, Any], message: str
) -> None:
    given = {"query_engine": build(make_engine()), "questions": QUESTIONS, **options}
    with pytest.raises(RequestError, match=message):
        ask(**given)


# --- failures ---


def failing(engine: MakeEngine) -> Any:
    return engine(reply=["one", ModelError("broken"), "three"])


@both_ways
def test_errors_in_place_of_answers(make_engine: MakeEngine, ask: Any) -> None:
    query_engine = build(failing(make_engine))
    answers = ask(query_engine, ["1", "2", "3"], return_exceptions=True)
    assert texts(answers) == ["one", "broken", "three"]
    assert type(answers[1]) is ModelError


@both_ways
def test_a_failed_retrieval(make_engine: MakeEngine, ask: Any) -> None:
    retriever = Numbered()

    def fail(question: str) -> None:
        if question == "2":
            raise OSError("the index is gone")

    retriever.before = fail
    query_engine = build(make_engine(reply=echo), retriever)
    answers = ask(query_engine, ["1", "2", "3"], return_exceptions=True)
    assert texts(answers) == ["1", "the index is gone", "3"]
    with pytest.raises(OSError, match="the index is gone"):
        ask(query_engine, ["1", "2", "3"])


@both_ways
def test_the_first_error_ends_it_and_cancels_the_rest(
    make_engine: MakeEngine, arrivals: Any, ask: Any
) -> None:
    engine = make_engine(stepwise=True)
    running = InThread(lambda: ask(build(engine), QUESTIONS))
    arrivals(engine, len(QUESTIONS))
    engine.completions[3].fail(ModelError("broken"))
    with pytest.raises(ModelError, match="broken") as caught:
        running.result()
    others = [c for i, c in enumerate(engine.completions) if i != 3]
    assert all(completion.cancelled for completion in others)
    if hasattr(caught.value, "__notes__"):
        assert caught.value.__notes__ == ["while answering question 3: 'question3'"]


@both_ways
def test_a_prompt_that_is_too_long(make_engine: MakeEngine, ask: Any) -> None:
    query_engine = build(make_engine(reply=echo, window=1000))
    # Few tokens for LlamaIndex, which packs by another tokenizer; many for the engine.
    long = "a" + " " * 2000 + "b"
    answers = ask(query_engine, ["short", long], return_exceptions=True)
    assert str(answers[0]) == "short"
    assert isinstance(answers[1], PromptTooLongError)


# --- other query engines ---


class Whole(CustomQueryEngine):
    llm: PCRLLM

    def custom_query(self, query_str: str) -> str:
        return self.llm.complete(f"Query: {query_str}\n", formatted=True).text


@both_ways
def test_an_engine_without_two_steps_is_asked_whole(
    make_engine: MakeEngine, ask: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "pcr_integrations.llama_index"):
        answers = ask(Whole(llm=PCRLLM(engine=make_engine(reply=echo))), QUESTIONS)
    assert texts(answers) == QUESTIONS
    (record,) = caplog.records
    assert record.getMessage().startswith("Whole does not offer retrieve()")


def test_which_also_has_its_prompts_in_the_queue_early(
    make_engine: MakeEngine, arrivals: Any
) -> None:
    engine = make_engine(reply=echo)
    engine.gate.clear()
    whole = Whole(llm=PCRLLM(engine=engine))
    running = InThread(lambda: batch_query(whole, QUESTIONS))
    arrivals(engine, len(QUESTIONS))
    engine.gate.set()
    assert texts(running.result()) == QUESTIONS


@both_ways
def test_a_transformed_question_is_transformed_once(
    make_engine: MakeEngine, ask: Any
) -> None:
    engine = make_engine(reply=lambda p: echo(p) if "Query: " in p else "imagined")
    hyde = HyDEQueryTransform(llm=PCRLLM(engine=engine))
    answers = ask(TransformQueryEngine(build(engine), hyde), QUESTIONS[:3])
    assert texts(answers) == QUESTIONS[:3]
    assert len(engine.submitted) == 6


class OnlySync(RetrieverQueryEngine):
    asynthesize = RetrieverQueryEngine.__mro__[1].asynthesize  # type: ignore[assignment]


@both_ways
def test_an_engine_that_synthesizes_in_threads(
    make_engine: MakeEngine, ask: Any
) -> None:
    query_engine = OnlySync.from_args(
        Numbered(), llm=PCRLLM(engine=make_engine(reply=echo)), streaming=True
    )
    assert texts(ask(query_engine, QUESTIONS)) == QUESTIONS


# --- where it runs ---


def test_in_a_notebook_whose_loop_runs(make_engine: MakeEngine) -> None:
    retriever = Numbered()
    query_engine = build(make_engine(reply=echo), retriever)

    async def cell() -> list[Any]:
        return batch_query(query_engine, QUESTIONS)

    assert texts(asyncio.run(cell())) == QUESTIONS
    assert not retriever.loops  # what belongs to the notebook's loop stays there


def test_it_leaves_no_thread_and_no_loop(
    make_engine: MakeEngine, check_thread_leaks: None
) -> None:
    engine = make_engine(reply=echo)
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        batch_query(build(engine), QUESTIONS)
        assert asyncio.get_event_loop_policy().get_event_loop() is loop
    finally:
        asyncio.set_event_loop(None)
        loop.close()
    engine.close()


def test_the_loop_turns_meanwhile(make_engine: MakeEngine) -> None:
    engine = make_engine(reply=echo)
    engine.gate.clear()

    async def main() -> list[Any]:
        asked = abatch_query(build(engine), QUESTIONS)
        task = asyncio.ensure_future(asked)
        while len(engine.submitted) < len(QUESTIONS):
            await asyncio.sleep(0)
        assert not task.done()
        engine.gate.set()
        return await task

    assert texts(asyncio.run(main())) == QUESTIONS


def test_cancelling_the_task_cancels_the_requests(make_engine: MakeEngine) -> None:
    engine = make_engine(stepwise=True, max_waiting=5)

    async def main() -> None:
        task = asyncio.ensure_future(abatch_query(build(engine), QUESTIONS))
        while len(engine.submitted) < 5:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert len(engine.submitted) == 5  # those that waited for room were not submitted
    assert all(completion.cancelled for completion in engine.completions)


@pytest.mark.parametrize("kind", ["two steps", "whole"])
def test_ctrl_c_cancels_the_requests(
    make_engine: MakeEngine, arrivals: Any, kind: str
) -> None:
    engine = make_engine(stepwise=True)
    query_engine = (
        build(engine) if kind == "two steps" else Whole(llm=PCRLLM(engine=engine))
    )

    def press() -> None:
        arrivals(engine, len(QUESTIONS))
        press_ctrl_c(lambda: all(one.cancelled for one in engine.completions))
        engine.step(1000)  # the engine notices within one step

    pressing = InThread(press)
    with pytest.raises(KeyboardInterrupt):
        batch_query(query_engine, QUESTIONS)
    pressing.result()
    assert all(completion.cancelled for completion in engine.completions)


def test_two_batches_at_once(make_engine: MakeEngine) -> None:
    query_engine = build(make_engine(reply=echo, max_waiting=6))
    names = [[f"{letter}{number}" for number in range(8)] for letter in "xyz"]
    asked = [
        InThread(lambda some=some: batch_query(query_engine, some)) for some in names
    ]
    assert [texts(one.result()) for one in asked] == names


# --- what is seen of it ---


class Keeper(BaseEventHandler):
    seen: list[str] = []  # noqa: RUF012 - a pydantic field

    def handle(self, event: Any, **kwargs: Any) -> None:
        self.seen.append(type(event).__name__)


def test_events_are_those_of_query(make_engine: MakeEngine) -> None:
    query_engine = build(make_engine(reply=echo))
    counts = []
    for asked in (
        lambda: [asyncio.run(query_engine.aquery(q)) for q in QUESTIONS],
        lambda: batch_query(query_engine, QUESTIONS),
        lambda: run_async(query_engine, QUESTIONS),
    ):
        root, keeper = get_dispatcher(), Keeper(seen=[])
        root.add_event_handler(keeper)
        asked()
        root.event_handlers.remove(keeper)
        counts.append(Counter(keeper.seen))
    assert counts[1] == counts[0]
    assert counts[2] == counts[0]
    assert counts[0]["QueryEndEvent"] == len(QUESTIONS)


def test_tokens_are_counted_once(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = TokenCountingHandler(tokenizer=lambda text: [0] * 1000)
    monkeypatch.setattr(Settings, "_callback_manager", CallbackManager([counter]))
    batch_query(build(make_engine(reply=echo)), QUESTIONS)
    assert len(counter.llm_token_counts) == len(QUESTIONS)
    assert counter.completion_llm_token_count == len(QUESTIONS)


def test_a_bar_with_what_was_reused(
    make_engine: MakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    batch_query(build(make_engine(reply=echo)), QUESTIONS)
    shown = capsys.readouterr().err
    assert "answering: 100%" in shown
    assert "12/12" in shown
    assert "% of prompts reused" in shown
    batch_query(build(make_engine(reply=echo)), QUESTIONS, show_progress=False)
    assert capsys.readouterr().err == ""
