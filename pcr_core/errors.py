"""Every error this library raises on purpose.

    PcrError
    ├── ConfigError (ValueError)      a setting is wrong; raised before any work is done
    ├── ModelError                    the model cannot be loaded or run
    │   ├── UnsupportedModelError     it keeps state that a chunk of KV cannot hold
    │   └── DeviceMemoryError         a request needs more memory than there is
    ├── StoreError                    the cache folder cannot be opened or audited
    ├── TraceError (ValueError)       a recorded trace cannot be read
    ├── RequestError                  this one request cannot be served
    │   ├── PromptTooLongError        longer than the context window
    │   ├── DocumentNotFoundError     a document named is not in the prompt
    │   ├── QueueFullError            too many requests are waiting
    │   └── CancelledError            somebody called ``cancel()``
    └── EngineClosedError             the engine was closed, or its thread died

Storage trouble while running (a full disk, a truncated file, a flipped bit) is not
in this list: it costs time, never an answer, and is counted in ``engine.stats()``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class PcrError(Exception):
    """Base of all errors of this library."""


class ConfigError(PcrError, ValueError):
    """A setting is wrong. The message names the setting and a value that works."""


class ModelError(PcrError):
    """The model could not be loaded, or its forward pass failed."""


class UnsupportedModelError(ModelError):
    """The model keeps state other than per-token keys and values."""


class DeviceMemoryError(ModelError):
    """A request needs more memory than there is where the model computes."""


class StoreError(PcrError):
    """The cache folder cannot be opened, or an audit of it could not finish."""


class TraceError(PcrError, ValueError):
    """A recorded trace cannot be read; the message names the file and the line."""


class RequestError(PcrError):
    """One request is wrong; the engine goes on serving others.

    Not a ``ValueError``: frameworks take one from a model for an answer that could not
    be parsed, and go on without the answer.
    """


class PromptTooLongError(RequestError):
    """Prompt and requested output do not fit into the model's context window.

    Attributes:
        prompt_tokens: Length of the prompt, in tokens.
        context_window: The longest sequence the model takes, in tokens.
    """

    def __init__(self, prompt_tokens: int, context_window: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.context_window = context_window
        super().__init__(
            f"the prompt has {prompt_tokens} tokens but the model's context window "
            f"holds {context_window} and at least one token must be generated; pass "
            "fewer or shorter documents, or use a model with a longer window"
        )

    def __reduce__(self) -> tuple[type[PromptTooLongError], tuple[int, int]]:
        return type(self), (self.prompt_tokens, self.context_window)


class DocumentNotFoundError(RequestError):
    """Documents named for a prompt do not stand in it, once it is rendered.

    Attributes:
        documents: All of them, the ``Document`` objects that were given.
    """

    def __init__(self, documents: Sequence[Any]) -> None:
        self.documents = tuple(documents)
        first, *others = (_short(document.id) for document in self.documents)
        more = f" (and {len(others)} more)" if others else ""
        super().__init__(
            f"document {first}{more} is not in the prompt; pass its text exactly as it "
            "stands there (was it cut or reformatted on the way?), or leave it out of "
            "documents="
        )

    def __reduce__(self) -> tuple[type[DocumentNotFoundError], tuple[Any, ...]]:
        return type(self), (self.documents,)


class QueueFullError(RequestError):
    """Too many requests are waiting; try again after some have finished."""


class CancelledError(RequestError):
    """The request was cancelled before it finished."""


class DeadlineExceededError(RequestError):
    """The request's deadline came before its answer; give it more time, or submit less.

    What was generated until then was streamed; no result is kept.
    """


class EngineClosedError(PcrError):
    """The engine is closed, or its thread died; the cause is chained."""


class ChunkLostError(PcrError):
    """A chunk that a forward was waiting for will not come: the forward is repeated.

    A signal between the parts of this library; it never reaches a caller.

    Attributes:
        index: Which chunk of the prompt.
    """

    def __init__(self, index: int, reason: str) -> None:
        self.index = index
        super().__init__(f"chunk {index} is lost: {reason}")


def _short(id: str) -> str:
    return repr(id if len(id) <= 80 else id[:77] + "...")
