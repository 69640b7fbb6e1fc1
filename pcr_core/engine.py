"""The engine: text or tokens in, ``Completion`` out. The public face of the package.

One thread, ``pcr-engine``, owns the model and all cache state, so nothing there needs a
lock. Other threads reach it only through a ``Door`` (see ``door``).
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from functools import partial
from typing import Any, TypeVar, overload

from tqdm.auto import tqdm

from pcr_core.answers import one_each
from pcr_core.config import EngineConfig
from pcr_core.documents import Document, ForgetReceipt, document_digest
from pcr_core.door import Door, end, leave
from pcr_core.errors import (
    ConfigError,
    EngineClosedError,
    RequestError,
)
from pcr_core.explain.explanation import Explanation
from pcr_core.explain.reasons import explain
from pcr_core.intake import Intake, is_batch
from pcr_core.model.prompt import Tools
from pcr_core.openmp import release_team
from pcr_core.request import Completion, Prompt, Request
from pcr_core.result import Result
from pcr_core.sampling_params import SamplingParams
from pcr_core.scheduler import sharers_together
from pcr_core.service import start
from pcr_core.stats import EngineStats
from pcr_core.tiers import CheckReport

T = TypeVar("T")


class Engine:
    """A local Hugging Face model whose prompt prefixes are cached in DRAM and on SSD.

    All methods may be called from any thread. Use it as a context manager, or call
    ``close()``; an engine that is forgotten, or still open when the interpreter exits,
    is closed then.

    While an engine is open its model runs with the engine's attention function and,
    on a CPU, with repacked linear weights; closing puts everything back.

    Args:
        config: Settings; defaults to ``EngineConfig()``.
        model: A loaded transformers causal language model, instead of ``config.model``.
        tokenizer: Its tokenizer; required with ``model``.

    Raises:
        ConfigError: For a setting that cannot work here.
        ModelError: If the model cannot be loaded or used.
        StoreError: If the cache folder is of another format version.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        model: Any = None,
        tokenizer: Any = None,
    ) -> None:
        if config is not None and not isinstance(config, EngineConfig):
            raise ConfigError(
                f"Engine takes an EngineConfig, not {type(config).__name__}; write "
                "Engine(EngineConfig(model=...))"
            )
        self._config = config or EngineConfig()
        self._pid = os.getpid()
        self._close_lock = threading.Lock()
        self._door = Door(self._config.max_queue)
        release_team()
        service = start(self._config, model, tokenizer, self._door)
        self._thread = service.thread
        self._parts = parts = service.parts
        self._loaded, self._loop = parts.loaded, parts.loop
        self._intake = Intake(
            parts.loaded,
            parts.prepared.namespace,
            parts.prepared.chunk_tokens,
            self._config.namespace,
        )
        self._end = partial(end, self._door, self._thread, self._pid)
        atexit.register(self._end)
        forgotten = weakref.finalize(self, leave, self._door, self._pid)
        forgotten.atexit = False

    # --- requests ---

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        tools: Tools | None = None,
        documents: Sequence[Document] = (),
        priority: int = 0,
        deadline: float | None = None,
    ) -> Completion:
        """Enqueue a request and return at once.

        Args:
            prompt: Text, token ids, or chat messages (see ``encode``).
            params: How to sample; defaults to 256 tokens and, like every field that
                is ``None``, to the model's generation config (see ``resolve``).
            tools: Tool schemas for the chat template.
            documents: Documents that the prompt contains, so that ``explain`` can name
                them, ``forget`` can remove them, and ``Result.documents`` tells how
                much of each was cached. They change nothing else.
            priority: Requests of a higher one run first, but overtake none more than
                ``max_overtakes`` times.
            deadline: Seconds from now after which the answer is worth nothing any
                more: the request then fails with ``DeadlineExceededError``, waiting or
                running. Of equal priority, the nearest deadline comes first.

        Raises:
            RequestError: If the prompt is empty or of a wrong type, ``params`` name a
                token that the model does not have, their constraint cannot be compiled,
                or priority or deadline is not a number.
            DocumentNotFoundError: If documents are not in it; nothing was enqueued.
            PromptTooLongError: Before any compute.
            QueueFullError: If ``max_queue`` requests are waiting.
            EngineClosedError: If the engine is closed, or after ``fork``.
        """
        request = self._prepare(prompt, params, tools, documents, priority, deadline)
        self._door.put(one_each(request, copy))
        return request.completion

    @overload
    def generate(
        self,
        prompt: str,
        params: SamplingParams | None = None,
        *,
        documents: Sequence[Document] = (),
    ) -> Result: ...

    @overload
    def generate(
        self,
        prompt: Sequence[Any],
        params: SamplingParams | None = None,
        *,
        documents: Sequence[Document] = (),
    ) -> Any: ...

    def generate(
        self,
        prompt: Any,
        params: SamplingParams | None = None,
        *,
        documents: Sequence[Document] = (),
    ) -> Any:
        """Run one prompt, or a list of prompts, and wait.

        A list of integers or of messages is one prompt; a list of strings, or of
        lists, is several, and gives a list of results in the same order. Several run
        in an order of their own: those that begin alike one after another. More than
        ``max_queue`` are submitted as others finish.

        Args:
            prompt: One prompt or several.
            params: See ``submit``.
            documents: See ``submit``; each prompt must contain all of them.

        Raises:
            PcrError: Whatever the first failing request raised; the others are
                cancelled.
        """
        if not is_batch(prompt):
            return self.submit(prompt, params, documents=documents).result()
        requests = [self._prepare(one, params, None, documents) for one in prompt]
        submitted: list[Completion] = []
        try:
            for index in sharers_together([request.keys for request in requests]):
                parts = one_each(requests[index], copy)
                self._door.put_when_possible(parts, submitted)
                submitted.append(requests[index].completion)
            return [request.completion.result() for request in requests]
        except BaseException:
            for completion in submitted:
                completion.cancel()
            raise

    def warm(
        self, prompts: Iterable[Prompt], *, documents: Sequence[Document] = ()
    ) -> None:
        """Prefill and store prompts, so that the first real request hits already.

        Shows a progress bar. Returns when the chunks are durable.

        Args:
            prompts: See ``submit``.
            documents: Documents that every one of them contains; see ``submit``.
        """
        if isinstance(prompts, str):
            prompts = [prompts]
        once = SamplingParams(max_tokens=1)
        for prompt in tqdm(list(prompts), desc="warming the cache", unit="prompt"):
            self.submit(prompt, once, documents=documents).result()
        self.flush()

    def prefetch(self, prompt: Prompt, *, tools: Tools | None = None) -> None:
        """Hint that a prompt, or one that begins like it, will be asked soon.

        What is stored of it is brought from SSD to DRAM in the background and protected
        there until a request uses it or 16 newer hints have come. Waiting requests come
        first. Returns at once.

        Raises:
            RequestError: As for ``submit``; ``PromptTooLongError`` is one.
            EngineClosedError: If the engine is closed, or after ``fork``.
        """
        self._enter()
        hint = self._intake.read(prompt, tools)
        self._door.call(lambda: self._loop.hint(hint))

    def explain(
        self,
        prompt: Prompt,
        *,
        tools: Tools | None = None,
        documents: Sequence[Document] = (),
    ) -> Explanation:
        """Say what of a prompt would be reused from which tier, and why no more.

        Runs nothing and changes nothing: asking twice gives the same answer.

        Args:
            prompt: See ``submit``.
            tools: See ``submit``.
            documents: Documents in it to report on one by one.

        Raises:
            RequestError: As for ``submit``; ``PromptTooLongError`` is one.
        """
        self._enter()
        request = self._intake.read(prompt, tools, documents)
        lookup = self._on_engine_thread(lambda: self._loop.lookup(request))
        return explain(lookup, self._intake.decode)

    def cached_tokens(
        self, prompts: Sequence[Prompt], *, tools: Tools | None = None
    ) -> list[int]:
        """Say how many leading tokens of each prompt are on the device or stored.

        Runs nothing and changes nothing. Much cheaper than ``explain``: to compare
        several ways to write a prompt. Waits for the current step to end.

        Args:
            prompts: Each as for ``submit``.
            tools: Tool schemas for the chat template.

        Raises:
            RequestError: As for ``submit``; ``PromptTooLongError`` is one.
        """
        self._enter()
        requests = [self._intake.read(prompt, tools) for prompt in prompts]
        return self._on_engine_thread(lambda: list(map(self._loop.cached, requests)))

    def forget(self, document: str) -> ForgetReceipt:
        """Remove every chunk that contains or follows a document, from every tier.

        Chunks that follow it depend on it, so they go, too. Other processes on the
        folder drop their copies before their next request, or within seconds. Requests
        that wait are answered, but do not store it again; later ones do.

        Args:
            document: The ``Document.id`` given to ``submit``, by any process that uses
                the folder with the same ``namespace``.

        Raises:
            RequestError: If it is not a string.
            StoreError: If the cache folder refused; memory is free of it all the same.
        """
        if not isinstance(document, str):
            raise RequestError(
                f"forget takes a document's id, not {type(document).__name__}"
            )
        digest = document_digest(self._config.namespace, document)
        removal = self._on_engine_thread(lambda: self._loop.begin_forget(digest))
        self._loop.tiers.wait_for(removal.job)
        return self._on_engine_thread(lambda: self._loop.end_forget(document, removal))

    def encode(self, prompt: Prompt, *, tools: Tools | None = None) -> list[int]:
        """Token ids of a prompt, with exactly one BOS where the model uses one.

        Text is tokenised with the tokenizer's special tokens; token ids are checked
        and returned; messages go through the chat template with a generation prompt.

        Raises:
            RequestError: If it is empty, of a wrong type, or refused by the template.
        """
        return self._intake.encode(prompt, tools)

    def resolve(self, params: SamplingParams | None = None) -> SamplingParams:
        """Return the sampling parameters that ``submit`` would use for these.

        A field that is ``None`` gets the value of the model's generation config: greedy
        unless that says ``do_sample``, and otherwise off where it says nothing.

        Raises:
            RequestError: As for ``submit``.
        """
        return self._intake.sampling.resolve(params)

    # --- the cache ---

    def stats(self) -> EngineStats:
        """Counters and how the engine runs. Waits for the current step to end."""
        return self._on_engine_thread(self._parts.stats)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until every chunk computed so far is on SSD, or was dropped.

        Returns:
            False if ``timeout`` seconds passed first.
        """
        return self._loop.tiers.flush(timeout, run=self._on_engine_thread)

    def check(self, *, fix: bool = False) -> CheckReport:
        """Audit memory, index and files. Reads the whole cache folder.

        Args:
            fix: Also remove what is damaged, and chunk files that belong to nothing.
                Files of other names are left alone.

        Raises:
            StoreError: If the audit could not finish.
        """
        return self._loop.tiers.check(fix=fix, run=self._on_engine_thread)

    # --- what it is ---

    @property
    def config(self) -> EngineConfig:
        """The settings it was built from."""
        return self._config

    @property
    def model(self) -> Any:
        """The transformers model. Leave it alone while requests run."""
        return self._loaded.model

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer."""
        return self._loaded.tokenizer

    @property
    def model_name(self) -> str:
        """Short name of the model."""
        return self._loaded.name

    @property
    def context_window(self) -> int:
        """Longest sequence, prompt and output together, in tokens."""
        return self._loaded.context_window

    @property
    def has_chat_template(self) -> bool:
        """Whether messages are rendered by the tokenizer's own template."""
        return bool(self._loaded.tokenizer.chat_template)

    @property
    def supports_tools(self) -> bool:
        """Whether the chat template renders tool schemas."""
        return "tools" in str(self._loaded.tokenizer.chat_template or "")

    @property
    def idle(self) -> bool:
        """Whether every request so far has ended. Waits for nothing.

        A request has ended before its listeners are told.
        """
        return self._door.idle

    @property
    def supports_constraints(self) -> bool:
        """Whether texts can be held to a schema, a regex or a grammar here.

        That needs the extra ``structured`` and a fast tokenizer.
        """
        return self._intake.sampling.constrains

    @property
    def closed(self) -> bool:
        """Whether it was closed, or its thread died."""
        return self._door.closed

    def __repr__(self) -> str:
        state = "closed" if self.closed else "open"
        folder = self._config.cache_path
        return f"<Engine {self.model_name} with {folder}, {state}>"

    # --- the end ---

    def close(self) -> None:
        """Fail what is waiting, finish pending writes (10 s at most), free everything.

        Closing twice is harmless. In a forked child it does nothing.
        """
        if threading.current_thread() is self._thread:
            self._end()  # a listener asks; whoever closes elsewhere holds the lock
            return
        with self._close_lock:
            self._end()
        atexit.unregister(self._end)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- inside ---

    def _enter(self) -> None:
        """What every caller passes; its torch must not slow ours, see ``openmp``."""
        if os.getpid() != self._pid:
            raise EngineClosedError(
                "this engine was created before fork() and its threads are not in this "
                "process; start workers with the 'spawn' method and build one there"
            )
        if threading.current_thread() is not self._thread:  # else a listener asks
            release_team()

    def _prepare(self, prompt: Prompt, *about: Any) -> Request:
        """A request that is complete but for its place in the queue."""
        self._enter()
        request = self._intake.prepare(prompt, *about)
        request.owner, request.epoch = self, self._loop.tiers.epoch
        return request

    def _on_engine_thread(self, function: Callable[[], T]) -> T:
        self._enter()
        if threading.current_thread() is self._thread:
            return function()  # a listener asks
        return self._door.call(function).result()
