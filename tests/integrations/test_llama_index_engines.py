"""Every way LlamaIndex calls ``PCRLLM``: paired events, right counts, no lost error.

The invariant behind most tests: each request of the engine is one start event, one end
event, one entry of ``TokenCountingHandler`` with the engine's own counts, one span.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from llama_index.core import PromptTemplate, Settings
from llama_index.core.base.llms.types import (
    ChatMessage,
)
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.chat_engine import (
    CondensePlusContextChatEngine,
    CondenseQuestionChatEngine,
    ContextChatEngine,
    SimpleChatEngine,
)
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.span_handlers import NullSpanHandler
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.core.tools import FunctionTool
from pydantic import BaseModel

from pcr_core import (
    ModelError,
    PcrError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
)
from pcr_integrations.llama_index import PCRLLM

MakeEngine = Callable[..., Any]
pytestmark = [
    pytest.mark.timeout(60),
    # LlamaIndex reads a pydantic attribute that is deprecated, on its own object.
    pytest.mark.filterwarnings("ignore:The `__fields:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Accessing the 'model:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The `json` method is deprecated"),
    pytest.mark.filterwarnings("ignore:is_running called from:DeprecationWarning"),
]

HELLO = [ChatMessage(role="user", content="Hello")]
DOCS = ["The Seine flows through Paris.", "The Thames flows through London."]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


ADD = FunctionTool.from_defaults(add)


class Person(BaseModel):
    """A person."""

    name: str
    age: int


ANN = Person(name="Ann", age=3)
PROMPT = PromptTemplate("Describe {who}.")


class Fixed(BaseRetriever):
    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [NodeWithScore(node=TextNode(text=text), score=1.0) for text in DOCS]


@pytest.fixture(autouse=True)
def _loop_of_this_thread() -> Iterator[None]:
    """LlamaIndex asks for the thread's loop, makes one if need be, never closes it."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    loop.close()
    asyncio.set_event_loop(None)


async def drain(stream: Any) -> list[Any]:
    return [item async for item in await stream]


# --- every path, and what is seen of it ---


class Events(BaseEventHandler):
    seen: list[str] = []  # noqa: RUF012 - a pydantic field

    def handle(self, event: Any, **kwargs: Any) -> None:
        self.seen.append(type(event).__name__)


class Spans(NullSpanHandler):
    seen: list[str] = []  # noqa: RUF012 - a pydantic field

    def span_enter(self, id_: str, **kwargs: Any) -> None:
        self.seen.append(id_.rpartition("-")[0].split("-")[0])


class Watch:
    """What handlers saw of the calls made inside the block."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counter = TokenCountingHandler(tokenizer=lambda text: [0] * 10_000)
        manager = CallbackManager([self.counter])
        monkeypatch.setattr(Settings, "_callback_manager", manager)
        self.manager = manager
        self.events, self.spans = Events(seen=[]), Spans()
        self.spans.seen = []

    def __enter__(self) -> Watch:
        self._root = get_dispatcher()
        self._root.add_event_handler(self.events)
        self._root.add_span_handler(self.spans)
        return self

    def __exit__(self, *args: Any) -> None:
        self._root.event_handlers.remove(self.events)
        self._root.span_handlers.remove(self.spans)

    def check(self, engine: Any) -> None:
        """One of everything for every request of the engine, and its counts."""
        requests = len(engine.submitted)
        assert requests > 0
        seen = Counter(self.events.seen)
        starts = seen["LLMChatStartEvent"] + seen["LLMCompletionStartEvent"]
        ends = seen["LLMChatEndEvent"] + seen["LLMCompletionEndEvent"]
        assert (starts, ends) == (requests, requests)
        usages = [completion.result().usage for completion in engine.completions]
        counted = self.counter
        assert len(counted.llm_token_counts) == requests
        assert counted.prompt_llm_token_count == sum(u.prompt_tokens for u in usages)
        assert counted.completion_llm_token_count == sum(
            u.completion_tokens for u in usages
        )
        calls = [span for span in self.spans.seen if span in ENDPOINTS]
        assert len(calls) == requests


ENDPOINTS = {
    f"PCRLLM.{prefix}{name}"
    for prefix in ("", "a", "stream_", "astream_")
    for name in ("chat", "complete")
}
ASK = "1 + 2?"
TOOLS: dict[str, Callable[[PCRLLM], Any]] = {
    "chat": lambda llm: llm.chat(HELLO),
    "achat": lambda llm: asyncio.run(llm.achat(HELLO)),
    "stream_chat": lambda llm: list(llm.stream_chat(HELLO)),
    "astream_chat": lambda llm: asyncio.run(drain(llm.astream_chat(HELLO))),
    "complete": lambda llm: llm.complete("q"),
    "acomplete": lambda llm: asyncio.run(llm.acomplete("q")),
    "stream_complete": lambda llm: list(llm.stream_complete("q")),
    "astream_complete": lambda llm: asyncio.run(drain(llm.astream_complete("q"))),
    "chat_with_tools": lambda llm: llm.chat_with_tools([ADD], ASK),
    "achat_with_tools": lambda llm: asyncio.run(llm.achat_with_tools([ADD], ASK)),
    "stream_chat_with_tools": lambda llm: list(llm.stream_chat_with_tools([ADD], ASK)),
    "astream_chat_with_tools": lambda llm: asyncio.run(
        drain(llm.astream_chat_with_tools([ADD], ASK))
    ),
    "predict_and_call": lambda llm: llm.predict_and_call([ADD], ASK),
    "apredict_and_call": lambda llm: asyncio.run(llm.apredict_and_call([ADD], ASK)),
    "predict": lambda llm: llm.predict(PROMPT, who="Ann"),
    "apredict": lambda llm: asyncio.run(llm.apredict(PROMPT, who="Ann")),
    "stream": lambda llm: list(llm.stream(PROMPT, who="Ann")),
    "astream": lambda llm: asyncio.run(drain(llm.astream(PROMPT, who="Ann"))),
}


@pytest.mark.parametrize("path", TOOLS)
def test_one_pair_of_events_for_calls(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    engine = make_engine(reply=CALL)
    with Watch(monkeypatch) as watch:
        TOOLS[path](PCRLLM(engine=engine, callback_manager=watch.manager))
    assert len(engine.submitted) == 1
    watch.check(engine)


STRUCTURE: dict[str, Callable[[PCRLLM], Any]] = {
    "sync": lambda llm: llm.structured_predict(Person, PROMPT, who="Ann"),
    "async": lambda llm: asyncio.run(
        llm.astructured_predict(Person, PROMPT, who="Ann")
    ),
    "stream": lambda llm: list(
        llm.stream_structured_predict(Person, PROMPT, who="Ann")
    )[-1],
    "astream": lambda llm: asyncio.run(
        drain(llm.astream_structured_predict(Person, PROMPT, who="Ann"))
    )[-1],
    "llm.chat": lambda llm: llm.as_structured_llm(Person).chat(HELLO).raw,
    "llm.complete": lambda llm: llm.as_structured_llm(Person).complete("q").raw,
    "llm.achat": lambda llm: (
        asyncio.run(llm.as_structured_llm(Person).achat(HELLO)).raw
    ),
    "llm.stream_chat": lambda llm: (
        list(llm.as_structured_llm(Person).stream_chat(HELLO))[-1].raw
    ),
}


@pytest.mark.parametrize("tools", [True, False])
@pytest.mark.parametrize("path", STRUCTURE)
def test_structure(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, path: str, tools: bool
) -> None:
    reply: dict[str, Any] = ANN.model_dump()
    if tools:
        reply = {"name": "Person", "arguments": reply}
    engine = make_engine(reply=json.dumps(reply), tools=tools)
    with Watch(monkeypatch) as watch:
        found = STRUCTURE[path](PCRLLM(engine=engine, callback_manager=watch.manager))
    assert Person(**found.model_dump()) == ANN  # a stream gives a flexible twin
    assert len(engine.submitted) == 1
    if not path.startswith("llm."):  # LlamaIndex' StructuredLLM has events of its own
        watch.check(engine)


@pytest.mark.parametrize("mode", ["compact", "refine", "tree_summarize", "accumulate"])
@pytest.mark.parametrize("tools", [True, False])
def test_output_cls(make_engine: MakeEngine, mode: str, tools: bool) -> None:
    reply: dict[str, Any] = ANN.model_dump()
    if tools:
        reply = {"name": "Person", "arguments": reply}
    llm = PCRLLM(engine=make_engine(reply=json.dumps(reply), tools=tools))
    query_engine = RetrieverQueryEngine.from_args(
        Fixed(), llm=llm, response_mode=mode, output_cls=Person
    )
    for answer in (
        query_engine.query("Who?"),
        asyncio.run(query_engine.aquery("Who?")),
    ):
        assert "Ann" in str(answer)
        assert "Empty Response" not in str(answer)
        if mode != "accumulate":  # which makes text of the objects
            assert answer.response == ANN


# --- query engines ---

MODES = ["compact", "refine", "tree_summarize", "accumulate", "simple_summarize"]


def ask(query_engine: Any, way: str) -> str:
    """Ask in one of four ways; the whole text."""
    if way == "query":
        return str(query_engine.query("Which city?"))
    if way == "stream":
        return "".join(query_engine.query("Which city?").response_gen)

    async def main() -> str:
        answer = await query_engine.aquery("Which city?")
        if way == "aquery":
            return str(answer)
        return "".join([text async for text in answer.async_response_gen()])

    return asyncio.run(main())


WAYS = ["query", "aquery", "stream", "astream"]


def query_engine_of(llm: PCRLLM, mode: str, way: str) -> RetrieverQueryEngine:
    streaming = "stream" in way
    return RetrieverQueryEngine.from_args(
        Fixed(), llm=llm, response_mode=mode, streaming=streaming
    )


COMBINATIONS = [
    (mode, way)
    for mode in MODES
    for way in WAYS
    if mode != "accumulate" or "stream" not in way  # upstream: it cannot stream
]


@pytest.mark.parametrize(("mode", "way"), COMBINATIONS)
@pytest.mark.parametrize("chat", [True, False])
def test_query_engines(
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    way: str,
    chat: bool,
) -> None:
    engine = make_engine(reply="It is Paris.", chat=chat)
    with Watch(monkeypatch) as watch:
        answer = ask(query_engine_of(PCRLLM(engine=engine), mode, way), way)
    assert "It is Paris." in answer
    watch.check(engine)


ERRORS: dict[str, tuple[type[PcrError], dict[str, Any]]] = {
    "overflow": (PromptTooLongError, {"window": 1000}),
    "queue": (QueueFullError, {"max_waiting": 0}),
    "model": (ModelError, {"reply": ModelError("broken")}),
    "request": (RequestError, {"reply": RequestError("refused")}),
}


@pytest.mark.parametrize(("mode", "way"), COMBINATIONS)
@pytest.mark.parametrize("kind", ERRORS)
def test_no_error_becomes_an_empty_response(
    make_engine: MakeEngine, mode: str, way: str, kind: str
) -> None:
    error, script = ERRORS[kind]
    engine = make_engine(**script)
    query_engine = query_engine_of(PCRLLM(engine=engine), mode, way)
    if kind == "overflow":  # few tokens for LlamaIndex' tokenizer, many for the engine
        blanks = "a" + " " * 2000 + "b"
        query_engine.retriever._retrieve = lambda bundle: [
            NodeWithScore(node=TextNode(text=blanks))
        ]
    with pytest.raises(error):
        ask(query_engine, way)
    if kind == "overflow":
        assert not engine.submitted


# --- chat engines ---


def chat_engine(kind: str, llm: PCRLLM, *, streaming: bool) -> Any:
    memory = ChatMemoryBuffer.from_defaults(llm=llm)  # the default is a database
    if kind == "context":
        return ContextChatEngine.from_defaults(Fixed(), llm=llm, memory=memory)
    if kind == "condense_plus_context":
        return CondensePlusContextChatEngine.from_defaults(
            Fixed(), llm=llm, memory=memory
        )
    if kind == "condense_question":
        inner = RetrieverQueryEngine.from_args(Fixed(), llm=llm, streaming=streaming)
        return CondenseQuestionChatEngine.from_defaults(inner, llm=llm, memory=memory)
    return SimpleChatEngine.from_defaults(llm=llm, memory=memory)


def say(engine: Any, way: str, text: str) -> str:
    if way == "chat":
        return str(engine.chat(text))
    if way == "stream_chat":
        return "".join(engine.stream_chat(text).response_gen)

    async def main() -> str:
        if way == "achat":
            return str(await engine.achat(text))
        answer = await engine.astream_chat(text)
        return "".join([piece async for piece in answer.async_response_gen()])

    return asyncio.run(main())


@pytest.mark.parametrize(
    "kind", ["context", "condense_plus_context", "condense_question", "simple"]
)
@pytest.mark.parametrize("way", ["chat", "achat", "stream_chat", "astream_chat"])
def test_chat_engines(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, kind: str, way: str
) -> None:
    engine = make_engine(reply="It is Paris.")
    with Watch(monkeypatch) as watch:
        llm = PCRLLM(engine=engine, callback_manager=watch.manager)
        talk = chat_engine(kind, llm, streaming="stream" in way)
        assert say(talk, way, "Which city?") == "It is Paris."
        assert say(talk, way, "And the river?") == "It is Paris."
    prompts = [engine.render(prompt) for prompt, *_ in engine.submitted]
    condenses = 1 if "condense" in kind else 0
    assert len(prompts) == 2 + condenses
    assert "Which city?" in prompts[1]  # what was said before
    if kind != "simple":
        assert DOCS[0] in prompts[0]
        assert DOCS[0] in prompts[-1]
    assert len(watch.counter.llm_token_counts) == len(prompts)
    seen = Counter(watch.events.seen)
    for end in ("Start", "End"):
        both = seen[f"LLMChat{end}Event"] + seen[f"LLMCompletion{end}Event"]
        assert both == len(prompts)


# --- agents ---


def run_agent(agent: Any) -> str:
    async def main() -> str:
        memory = ChatMemoryBuffer.from_defaults(llm=agent.llm)
        return str(await agent.run(ASK, memory=memory))

    return asyncio.run(main())


@pytest.mark.parametrize("streaming", [True, False])
def test_a_function_agent_finishes_its_loop(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, streaming: bool
) -> None:
    from llama_index.core.agent import FunctionAgent

    engine = make_engine(reply=[CALL, "It is 3."])
    with Watch(monkeypatch) as watch:
        llm = PCRLLM(engine=engine, callback_manager=watch.manager)
        agent = FunctionAgent(tools=[ADD], llm=llm, streaming=streaming)
        assert run_agent(agent) == "It is 3."
    call, result = engine.submitted[1][0][-2:]
    assert (call["role"], result["role"]) == ("assistant", "tool")
    assert call["tool_calls"][0]["function"]["arguments"] == {"a": 1, "b": 2}
    assert result["content"] == "3"
    assert result["tool_call_id"] == call["tool_calls"][0]["id"]
    watch.check(engine)


@pytest.mark.parametrize("streaming", [True, False])
def test_a_react_agent_finishes_its_loop(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, streaming: bool
) -> None:
    from llama_index.core.agent import ReActAgent

    act = 'Thought: I need a tool.\nAction: add\nAction Input: {"a": 1, "b": 2}'
    end = "Thought: I can answer without using any more tools.\nAnswer: It is 3."
    engine = make_engine(reply=[act, end], tools=False)
    with Watch(monkeypatch) as watch:
        llm = PCRLLM(engine=engine, callback_manager=watch.manager)
        agent = ReActAgent(tools=[ADD], llm=llm, streaming=streaming)
        assert run_agent(agent) == "It is 3."
    assert "Observation: 3" in engine.render(engine.submitted[1][0])
    watch.check(engine)


def test_settings_llm(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(reply="It is Paris.")
    monkeypatch.setattr(Settings, "_llm", None)
    with Watch(monkeypatch) as watch:
        Settings.llm = PCRLLM(engine=engine)
        query_engine = RetrieverQueryEngine.from_args(Fixed())
        assert str(query_engine.query("Which city?")) == "It is Paris."
    watch.check(engine)


def test_the_system_prompt(make_engine: MakeEngine) -> None:
    engine = make_engine()
    llm = PCRLLM(engine=engine, system_prompt="Be kind.")
    RetrieverQueryEngine.from_args(Fixed(), llm=llm).query("Which city?")
    llm.chat(HELLO)
    chain, direct = (prompt for prompt, *_ in engine.submitted)
    assert chain[0] == {"role": "system", "content": "Be kind."}
    assert direct == [{"role": "user", "content": "Hello"}]
