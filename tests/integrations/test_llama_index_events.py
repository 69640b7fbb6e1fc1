"""Events and token counts: one start and one end per call, on every path."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.base import BaseEvent

from pcr_integrations.llama_index import PCRLLM

MakeEngine = Callable[..., Any]
pytestmark = pytest.mark.timeout(60)
HELLO = [ChatMessage(role="user", content="Hello")]


class Keeper(BaseEventHandler):
    """Keeps every event, exceptions with their tracebacks included."""

    seen: list[Any] = []  # noqa: RUF012 - a pydantic field

    @classmethod
    def class_name(cls) -> str:
        return "Keeper"

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        self.seen.append(event)

    def counts(self) -> Counter[str]:
        return Counter(type(event).__name__ for event in self.seen)


@pytest.fixture
def events() -> Iterator[Keeper]:
    root, keeper = get_dispatcher(), Keeper(seen=[])
    root.add_event_handler(keeper)
    yield keeper
    root.event_handlers.remove(keeper)


async def drain(stream: Any) -> None:
    async for _ in await stream:
        pass


PATHS: dict[str, Callable[[PCRLLM], Any]] = {
    "chat": lambda llm: llm.chat(HELLO),
    "complete": lambda llm: llm.complete("q"),
    "stream_chat": lambda llm: list(llm.stream_chat(HELLO)),
    "stream_complete": lambda llm: list(llm.stream_complete("q")),
    "achat": lambda llm: asyncio.run(llm.achat(HELLO)),
    "acomplete": lambda llm: asyncio.run(llm.acomplete("q")),
    "astream_chat": lambda llm: asyncio.run(drain(llm.astream_chat(HELLO))),
    "astream_complete": lambda llm: asyncio.run(drain(llm.astream_complete("q"))),
}


@pytest.mark.parametrize("path", PATHS)
def test_one_start_and_one_end(
    make_engine: MakeEngine, events: Keeper, path: str
) -> None:
    PATHS[path](PCRLLM(engine=make_engine(reply="a b")))
    kind = "Chat" if "chat" in path else "Completion"
    expected = {f"LLM{kind}StartEvent": 1, f"LLM{kind}EndEvent": 1}
    if "stream" in path:
        expected[f"LLM{kind}InProgressEvent"] = 3  # two pieces and the end
    assert events.counts() == expected


@pytest.mark.parametrize("path", PATHS)
def test_tokens_are_counted_once(make_engine: MakeEngine, path: str) -> None:
    counter = TokenCountingHandler(tokenizer=lambda text: [0] * 1000)
    llm = PCRLLM(
        engine=make_engine(reply="a b"), callback_manager=CallbackManager([counter])
    )
    PATHS[path](llm)
    assert len(counter.llm_token_counts) == 1
    assert counter.completion_llm_token_count == 2
    assert 0 < counter.prompt_llm_token_count < 1000


@pytest.mark.parametrize("path", ["stream_chat", "stream_complete"])
def test_a_kept_exception_does_not_keep_the_request_running(
    make_engine: MakeEngine, events: Keeper, path: str
) -> None:
    engine = make_engine(stepwise=True)
    llm = PCRLLM(engine=engine)
    stream: Any = getattr(llm, path)(HELLO if "chat" in path else "q")
    engine.step()
    next(stream)
    stream.close()
    assert events.counts()["ExceptionEvent"] == 1
    assert engine.completions[0].cancelled


@pytest.mark.parametrize("path", ["astream_chat", "astream_complete"])
def test_nor_on_a_loop(make_engine: MakeEngine, events: Keeper, path: str) -> None:
    engine = make_engine(stepwise=True)

    async def main() -> None:
        llm = PCRLLM(engine=engine)
        stream = await getattr(llm, path)(HELLO if "chat" in path else "q")
        engine.step()
        await anext(stream)
        await stream.aclose()
        assert engine.completions[0].cancelled

    asyncio.run(main())
    assert events.counts()["ExceptionEvent"] == 1


def test_the_start_event_describes_the_model_without_loading_it(
    scripted_builds: list[Any], events: Keeper
) -> None:
    stream = PCRLLM(model="m", temperature=0.5).stream_chat(HELLO)
    (start,) = events.seen
    assert start.model_dict["model_name"] == "m"
    assert start.model_dict["temperature"] == 0.5
    assert not scripted_builds
    stream.close()
