"""A scripted engine: the engine's contract without a model, for adapter tests."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pcr_core import (
    CancelledError,
    Completion,
    Document,
    DocumentNotFoundError,
    EngineConfig,
    PromptTooLongError,
    QueueFullError,
    Result,
    SamplingParams,
    Timing,
    Usage,
)
from pcr_integrations.documents import DocumentRegistry

if TYPE_CHECKING:
    from pcr_core import Engine

Reply = str | BaseException | Callable[[str], str]


class WordTokenizer:
    """One token per word, the blank before it included; ids in order of appearance."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._words: list[str] = []

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        words = [*(["<s>"] if add_special_tokens else []), *split_words(text)]
        return [self._id(word) for word in words]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self._words[token] for token in ids)

    def _id(self, word: str) -> int:
        if word not in self._ids:
            self._ids[word] = len(self._words)
            self._words.append(word)
        return self._ids[word]


def split_words(text: str) -> list[str]:
    """Cut before every blank; joined again, the text is the same."""
    words: list[str] = []
    for char in text:
        if words and not char.isspace():
            words[-1] += char
        else:
            words.append(char)
    return words


class ScriptedEngine:
    """Answers by script, on a thread of its own as the engine does.

    ``reply`` is a text, an error, a function of the rendered prompt, or a list of
    these, one per request; ``answer`` is a function of the request's turns and tools.
    ``gate`` holds every answer back until it is set, or, with ``stepwise``, every
    piece of it is released by one ``step()``.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        reply: Reply | Sequence[Reply] = "one two three",
        answer: Callable[[Any, Any], str] | None = None,
        chat: bool = True,
        tools: bool = True,
        constraints: bool = False,
        window: int = 10_000,
        stepwise: bool = False,
        max_waiting: int = 1000,
    ) -> None:
        self.config = config or EngineConfig(model="scripted")
        self.tokenizer = WordTokenizer()
        self.context_window = window
        self.has_chat_template = chat
        self.supports_tools = tools
        self.supports_constraints = constraints
        self.model_name = self.config.model or "scripted"
        self.closed = False
        self.submitted: list[tuple[Any, SamplingParams, Any]] = []
        self.documents: list[list[str]] = []
        self.hints: list[Any] = []
        self.completions: list[Completion] = []
        self.gate = threading.Event()
        self.gate.set()
        self.ended = threading.Semaphore(0)
        self._steps = threading.Semaphore(0) if stepwise else None
        self._replies = (
            [reply]
            if callable(reply) or isinstance(reply, (str, BaseException))
            else list(reply)
        )
        self._by_request = answer
        self._max_waiting = max_waiting
        self._seen: list[list[int]] = []
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def encode(self, prompt: Any, *, tools: Any = None) -> list[int]:
        ids = self.tokenizer.encode(self.render(prompt, tools))
        if len(ids) >= self.context_window:
            raise PromptTooLongError(len(ids), self.context_window)
        return ids

    def render(self, prompt: Any, tools: Any = None) -> str:
        if isinstance(prompt, str):
            return prompt
        head = f"{tools} " if tools else ""
        turns = (
            f"<{turn['role']}> {turn['content']} {turn.get('tool_calls', '')}"
            for turn in prompt
        )
        return head + " ".join(turns) + " <assistant>"

    def submit(
        self,
        prompt: Any,
        params: SamplingParams | None = None,
        *,
        tools: Any = None,
        documents: Sequence[Document] = (),
        priority: int = 0,
    ) -> Completion:
        params = params or SamplingParams()
        rendered = self.render(prompt, tools)
        if missing := [one for one in documents if one.text not in rendered]:
            raise DocumentNotFoundError(missing)
        with self._lock:
            waiting = sum(not completion.done for completion in self.completions)
            if waiting >= self._max_waiting:
                raise QueueFullError("the queue is full")
            ids = self.encode(prompt, tools=tools)
            cached = max((_common(ids, seen) for seen in self._seen), default=0)
            self._seen.append(ids)
            turn = min(len(self.submitted), len(self._replies) - 1)
            self.submitted.append((prompt, params, tools))
            self.documents.append([document.id for document in documents])
            completion = Completion()
            self.completions.append(completion)
            answer = self._by_request
            reply = answer(prompt, tools) if answer else self._replies[turn]
        args = (completion, reply, self.render(prompt), params)
        usage = (len(ids), min(cached, len(ids) - 1))
        thread = threading.Thread(target=self._answer, args=(*args, usage), daemon=True)
        self._threads.append(thread)
        thread.start()
        return completion

    def prefetch(self, prompt: Any, *, tools: Any = None) -> None:
        self.encode(prompt, tools=tools)
        self.hints.append(prompt)

    def cached_tokens(self, prompts: Sequence[Any], *, tools: Any = None) -> list[int]:
        asked = [self.encode(prompt, tools=tools) for prompt in prompts]
        with self._lock:
            return [
                max((_common(ids, seen) for seen in self._seen), default=0)
                for ids in asked
            ]

    def step(self, count: int = 1) -> None:
        assert self._steps is not None
        self._steps.release(count)

    def close(self) -> None:
        self.closed = True
        self.gate.set()
        for completion in self.completions:
            completion.cancel()
        if self._steps is not None:
            self._steps.release(10_000)
        for thread in self._threads:
            thread.join()

    def _answer(
        self,
        completion: Completion,
        reply: Reply,
        prompt: str,
        params: SamplingParams,
        counts: tuple[int, int],
    ) -> None:
        self.gate.wait()
        if isinstance(reply, BaseException):
            completion.fail(reply)
        else:
            text = reply if isinstance(reply, str) else reply(prompt)
            pieces, reason = cut(text, params)
            for piece in pieces:
                if self._steps is not None:
                    self._steps.acquire()
                if completion.cancelled:
                    break
                completion.emit(piece)
            if completion.cancelled:
                completion.fail(CancelledError("the request was cancelled"))
            else:
                completion.finish(self._result(pieces, reason, params, counts))
        self.ended.release()

    def _result(
        self,
        pieces: list[str],
        reason: Any,
        params: SamplingParams,
        counts: tuple[int, int],
    ) -> Result:
        ids = [self.tokenizer._id(piece) for piece in pieces]
        prompt, cached = counts
        by_tier = {"device": 0, "dram": cached, "ssd": 0}
        return Result(
            text="".join(pieces),
            token_ids=ids,
            logprobs=[-0.5] * len(ids) if params.logprobs else None,
            finish_reason=reason,
            usage=Usage(prompt, len(ids), by_tier),
            timing=Timing(ttft=0.25, total=0.5),
        )


def cut(text: str, params: SamplingParams) -> tuple[list[str], str]:
    """Apply stop strings and ``max_tokens`` as the engine does."""
    ends = [text.find(stop) for stop in params.stop]
    ends = [end for end in ends if end >= 0]
    text = text[: min(ends)] if ends else text
    pieces = split_words(text)
    if len(pieces) > params.max_tokens:
        return pieces[: params.max_tokens], "length"
    return pieces, "stop"


def _common(ids: list[int], others: list[int]) -> int:
    same = 0
    for one, other in zip(ids, others, strict=False):
        if one != other:
            break
        same += 1
    return same


MakeEngine = Callable[..., ScriptedEngine]


@pytest.fixture(autouse=True)
def known_documents(monkeypatch: pytest.MonkeyPatch) -> DocumentRegistry:
    """Make each test start without documents; returns the registry."""
    fresh = DocumentRegistry()
    monkeypatch.setattr("pcr_integrations.documents._registry._REGISTRY", fresh)
    return fresh


@pytest.fixture(scope="session")
def document_probes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What engines measure of a model at their first start, for several modules."""
    return tmp_path_factory.mktemp("document-probes")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run coroutine tests: LangChain's suite has some, and marks none of them."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture
def make_engine() -> Iterator[MakeEngine]:
    """Build scripted engines; all are closed and their threads joined at the end."""
    made: list[ScriptedEngine] = []

    def make(config: EngineConfig | None = None, **script: Any) -> ScriptedEngine:
        engine = ScriptedEngine(config, **script)
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def scripted_builds(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> list[ScriptedEngine]:
    """Make the shared registry build scripted engines; returns those it built."""
    import pcr_core
    from pcr_integrations import _engines

    built: list[ScriptedEngine] = []

    def build(config: EngineConfig) -> ScriptedEngine:
        built.append(make_engine(config))
        return built[-1]

    monkeypatch.setattr(pcr_core, "Engine", build, raising=False)
    monkeypatch.setattr(_engines, "_ENGINES", _engines.EngineRegistry())
    return built


@pytest.fixture(scope="module")
def real_engine(
    make_tiny_model: Any, tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """One engine for a module's tests, on a tiny random model, in chunks of 16."""
    from pcr_core import Engine

    folder = tmp_path_factory.mktemp("real-engine")
    config = EngineConfig(
        cache_dir=folder,
        dram_bytes="8MiB",
        ssd_bytes=0,
        chunk_tokens=16,
        overlap="none",  # what "auto" would measure takes seconds
    )
    model = make_tiny_model("llama")
    with Engine(config, model=model, tokenizer=tiny_tokenizer) as engine:
        yield engine
