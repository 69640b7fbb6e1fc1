"""What several test modules ask of a chat model."""

from __future__ import annotations

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage

QUESTION = "What is it that a question must be, if it is to fill a chunk or two of KV?"


def ask_twice(model: BaseChatModel, *, stream: bool) -> AIMessage:
    """Return the second answer to one question: the prompt is cached by then."""
    model.invoke(QUESTION)
    if stream:
        *_, last = model.stream(QUESTION)
        return last
    return model.invoke(QUESTION)
