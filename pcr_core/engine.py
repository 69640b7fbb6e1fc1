"""The engine: text or tokens in, ``Completion`` out. The public face of the package.

One thread, ``pcr-engine``, owns the model and all cache state, so nothing there needs a
lock. Other threads reach it only through a ``Door`` (see ``service``).
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any, TypeVar, overload

import torch
from tqdm.auto import tqdm

from pcr_core.answers import one_each
from pcr_core.config import EngineConfig
from pcr_core.documents import (
    Document,
    DocumentSpan,
    ForgetReceipt,
    document_digest,
    locate,
)
from pcr_core.errors import (
    ConfigError,
    EngineClosedError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
)
from pcr_core.explain.explanation import Explanation
from pcr_core.explain.reasons import explain
from pcr_core.index.chunk import chunk_keys
from pcr_core.model.prompt import Tools, encode_prompt, encode_with_offsets
from pcr_core.model.sampling_rules import SamplingRules
from pcr_core.request import Completion, Prompt, Request, Result
from pcr_core.sampling_params import SamplingParams
from pcr_core.scheduler import sharers_together
from pcr_core.service import Door, start
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
        self._encode_lock = threading.Lock()
        self._close_lock = threading.Lock()
        self._door = Door(self._config.max_queue)
        service = start(self._config, model, tokenizer, self._door)
        self._thread = service.thread
        self._loaded = service.parts.loaded
        self._runner = service.parts.runner
        self._namespace = service.parts.namespace
        self._overlap = service.parts.overlap
        self._chunk_tokens = service.parts.chunk_tokens
        self._loop = service.parts.loop
        self._sampling = SamplingRules(self._loaded, self._encode_lock)
        self._end = partial(_end, self._door, self._thread, self._pid)
        atexit.register(self._end)
        forgotten = weakref.finalize(self, _leave, self._door, self._pid)
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
                them and ``forget`` can remove them. They change nothing else.
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
        if not _is_batch(prompt):
            return self.submit(prompt, params, documents=documents).result()
        requests = [self._prepare(one, params, None, documents) for one in prompt]
        submitted: list[Completion] = []
        try:
            for index in sharers_together([request.keys for request in requests]):
                self._put_when_possible(requests[index], submitted)
                submitted.append(requests[index].completion)
            return [request.completion.result() for request in requests]
        except BaseException:
            for completion in submitted:
                completion.cancel()
            raise

    def _put_when_possible(
        self, request: Request, submitted: Sequence[Completion]
    ) -> None:
        """Enqueue a request, if need be after others of the same call have finished.

        Raises:
            QueueFullError: If the queue is full of other callers' requests.
        """
        while True:
            try:
                self._door.put(one_each(request, copy))
                return
            except QueueFullError:
                waiting = next((c for c in submitted if not c.done), None)
                if waiting is None:
                    raise
                waiting.result()

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
        self._check_process()
        hint = self._request(prompt, tools)
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
        self._check_process()
        request = self._request(prompt, tools, documents)
        lookup = self._on_engine_thread(lambda: self._loop.lookup(request))
        return explain(lookup, self._decode)

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
        self._check_process()
        requests = [self._request(prompt, tools) for prompt in prompts]
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
        with self._encode_lock:  # fast tokenizers forbid concurrent use
            return encode_prompt(self._loaded.tokenizer, prompt, tools)

    def resolve(self, params: SamplingParams | None = None) -> SamplingParams:
        """Return the sampling parameters that ``submit`` would use for these.

        A field that is ``None`` gets the value of the model's generation config: greedy
        unless that says ``do_sample``, and otherwise off where it says nothing.

        Raises:
            RequestError: As for ``submit``.
        """
        return self._sampling.resolve(params)

    # --- the cache ---

    def stats(self) -> EngineStats:
        """Counters and how the engine runs. Waits for the current step to end."""
        return self._on_engine_thread(self._collect)

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
    def supports_constraints(self) -> bool:
        """Whether texts can be held to a schema, a regex or a grammar here.

        That needs the extra ``structured`` and a fast tokenizer.
        """
        return self._sampling.constrains

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

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise EngineClosedError(
                "this engine was created before fork() and its threads are not in this "
                "process; start workers with the 'spawn' method and build one there"
            )

    def _request(
        self, prompt: Prompt, tools: Tools | None, documents: Sequence[Document] = ()
    ) -> Request:
        """Tokens, keys and documents of a prompt."""
        spans: Sequence[DocumentSpan] = ()
        if documents:
            with self._encode_lock:
                encoded = encode_with_offsets(self._loaded.tokenizer, prompt, tools)
            tokens = encoded.tokens
            salt = self._config.namespace
            spans = locate(encoded.text, documents, encoded.offsets, salt)
        else:
            tokens = self.encode(prompt, tools=tools)
        if len(tokens) >= self.context_window:
            raise PromptTooLongError(len(tokens), self.context_window)
        keys = chunk_keys(self._namespace, tokens, self._chunk_tokens)
        return Request(tokens, keys, SamplingParams(), spans=spans)

    def _prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        tools: Tools | None,
        documents: Sequence[Document],
        priority: int = 0,
        deadline: float | None = None,
    ) -> Request:
        """A request that is complete but for its place in the queue."""
        self._check_process()
        submitted = time.perf_counter()
        params = self._sampling.resolve(params)
        constraint = self._sampling.compile(params)
        until = _until(priority, deadline, submitted)
        request = self._request(prompt, tools, documents)
        request.constraint = constraint
        room = self.context_window - len(request.tokens)
        if params.max_tokens > room:
            params = params.model_copy(update={"max_tokens": room})
        request.params, request.submitted, request.owner = params, submitted, self
        request.priority, request.deadline = priority, until
        request.epoch = self._loop.tiers.epoch
        return request

    def _decode(self, tokens: Sequence[int]) -> str:
        with self._encode_lock:
            text: str = self._loaded.tokenizer.decode(
                tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        return text

    def _on_engine_thread(self, function: Callable[[], T]) -> T:
        self._check_process()
        if threading.current_thread() is self._thread:
            return function()  # a listener asks
        return self._door.call(function).result()

    def _collect(self) -> EngineStats:
        loop, loaded = self._loop, self._loaded
        return EngineStats(
            model=loaded.name,
            device=str(loaded.device),
            dtype=str(loaded.dtype).removeprefix("torch."),
            threads=torch.get_num_threads(),
            chunk_tokens=self._chunk_tokens,
            prefill_cuts=self._runner.cuts.name,
            exact=self._runner.cuts.exact,
            namespace=self._namespace.name,
            overlap=self._overlap.mode,
            overlap_ratios=dict(self._overlap.ratios),
            copying=self._overlap.copying,
            decoding=self._runner.decoding,
            running=loop.running,
            waiting=loop.waiting,
            preempted=loop.preempted,
            finished=loop.finished,
            cancelled=loop.cancelled,
            failed=loop.failed,
            working_bytes=self._runner.buffer_bytes,
            decisions=loop.tiers.decisions(loaded.context_window),
            cache=loop.tiers.snapshot(),
        )


def _until(priority: object, deadline: object, now: float) -> float | None:
    """When a deadline of so many seconds ends; checks both arguments."""
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise RequestError(f"priority must be a whole number, not {priority!r}")
    if deadline is None:
        return None
    number = isinstance(deadline, (int, float)) and not isinstance(deadline, bool)
    if not number or not 0 < deadline <= sys.float_info.max:  # type: ignore[operator]
        raise RequestError(
            f"deadline must be a positive number of seconds, or None; not {deadline!r}"
        )
    return now + float(deadline)  # type: ignore[arg-type]


def _is_batch(prompt: Any) -> bool:
    """Whether these are several prompts: items are neither ids nor messages."""
    if isinstance(prompt, (str, bytes, Mapping)) or not isinstance(prompt, Sequence):
        return False
    return bool(prompt) and not any(
        isinstance(part, Mapping) or hasattr(part, "__index__") for part in prompt
    )


def _leave(door: Door, pid: int) -> None:
    """Let the thread of a forgotten engine end, without waiting for it."""
    if os.getpid() == pid:
        door.close(EngineClosedError("the engine is closed; build a new one"))


def _end(door: Door, thread: threading.Thread, pid: int) -> None:
    """Close the engine and wait until everything is stored and freed."""
    _leave(door, pid)
    if os.getpid() == pid and threading.current_thread() is not thread:
        thread.join()
