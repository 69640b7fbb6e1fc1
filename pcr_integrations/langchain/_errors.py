"""The engine's errors, also by the names that LangChain's own tools catch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from langchain_core.exceptions import ContextOverflowError

from pcr_core import PromptTooLongError


class PromptOverflowError(PromptTooLongError, ContextOverflowError):
    """A prompt longer than the window, by both names.

    LangChain's summarisation catches ``ContextOverflowError`` and tries again with
    less; its retries leave it alone.
    """


@contextmanager
def as_langchain_has_them() -> Iterator[None]:
    """Raise what LangChain has a name for under that name, too.

    Raises:
        PromptOverflowError: For a ``PromptTooLongError``.
    """
    try:
        yield
    except PromptTooLongError as error:
        raise PromptOverflowError(error.prompt_tokens, error.context_window) from error
