"""Each item of a batch is an ``invoke``: traced, cached and limited as one."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.rate_limiters import BaseRateLimiter

from pcr_core import ModelError
from pcr_integrations.langchain import PCRLLM, ChatPCR
from tests.integrations.asking import PROMPTS, WAYS, abatch, asked, batch, echo, texts

MakeEngine = Callable[..., Any]
pytestmark = pytest.mark.timeout(60)
every_way = pytest.mark.parametrize("ask", WAYS)


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
