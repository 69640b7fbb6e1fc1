"""From what a caller says to a request: tokens, keys, documents, checked parameters."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from pcr_core.documents import Document, DocumentSpan, locate
from pcr_core.errors import PromptTooLongError, RequestError
from pcr_core.index.chunk import Namespace, chunk_keys
from pcr_core.model.loading import LoadedModel
from pcr_core.model.prompt import Tools, encode_prompt, encode_with_offsets
from pcr_core.model.sampling_rules import SamplingRules
from pcr_core.request import Prompt, Request
from pcr_core.sampling_params import SamplingParams


class Intake:
    """Prepares requests on the caller's thread. Any thread.

    Args:
        loaded: The model and its tokenizer.
        namespace: Root of the chunk keys.
        chunk_tokens: Tokens per chunk.
        tenant: ``EngineConfig.namespace``, which salts the digests of documents.

    Attributes:
        sampling: What holds for every request's sampling parameters.
    """

    def __init__(
        self, loaded: LoadedModel, namespace: Namespace, chunk_tokens: int, tenant: str
    ) -> None:
        self._loaded = loaded
        self._namespace = namespace
        self._chunk_tokens = chunk_tokens
        self._tenant = tenant
        self._lock = threading.Lock()  # fast tokenizers forbid concurrent use
        self.sampling = SamplingRules(loaded, self._lock)

    def encode(self, prompt: Prompt, tools: Tools | None) -> list[int]:
        """Token ids of a prompt; see ``Engine.encode``."""
        with self._lock:
            return encode_prompt(self._loaded.tokenizer, prompt, tools)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some tokens, special ones included."""
        with self._lock:
            text: str = self._loaded.tokenizer.decode(
                tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        return text

    def read(
        self, prompt: Prompt, tools: Tools | None, documents: Sequence[Document] = ()
    ) -> Request:
        """A prompt's tokens, keys and documents; nothing about sampling.

        Raises:
            RequestError: See ``Engine.submit``.
        """
        spans: Sequence[DocumentSpan] = ()
        if documents:
            with self._lock:
                encoded = encode_with_offsets(self._loaded.tokenizer, prompt, tools)
            tokens = encoded.tokens
            spans = locate(encoded.text, documents, encoded.offsets, self._tenant)
        else:
            tokens = self.encode(prompt, tools)
        if len(tokens) >= self._loaded.context_window:
            raise PromptTooLongError(len(tokens), self._loaded.context_window)
        keys = chunk_keys(self._namespace, tokens, self._chunk_tokens)
        return Request(tokens, keys, SamplingParams(), spans=spans)

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        tools: Tools | None,
        documents: Sequence[Document],
        priority: int = 0,
        deadline: float | None = None,
    ) -> Request:
        """A request that is complete but for its engine and its place in the queue.

        Raises:
            RequestError: See ``Engine.submit``.
        """
        submitted = time.perf_counter()
        params = self.sampling.resolve(params)
        constraint = self.sampling.compile(params)
        until = _until(priority, deadline, submitted)
        request = self.read(prompt, tools, documents)
        room = self._loaded.context_window - len(request.tokens)
        if params.max_tokens > room:
            params = params.model_copy(update={"max_tokens": room})
        request.params, request.constraint = params, constraint
        request.submitted = submitted
        request.priority, request.deadline = priority, until
        return request


def is_batch(prompt: Any) -> bool:
    """Whether these are several prompts: items are neither ids nor messages."""
    if isinstance(prompt, (str, bytes, Mapping)) or not isinstance(prompt, Sequence):
        return False
    return bool(prompt) and not any(
        isinstance(part, Mapping) or hasattr(part, "__index__") for part in prompt
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
