"""LlamaIndex messages as the turns that ``engine.submit`` takes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from pydantic import BaseModel

from pcr_core import RequestError
from pcr_integrations._tools import ChatTurn

_ROLES = {
    MessageRole.SYSTEM: "system",
    MessageRole.DEVELOPER: "system",
    MessageRole.USER: "user",
    MessageRole.ASSISTANT: "assistant",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.TOOL: "tool",
    MessageRole.FUNCTION: "tool",
}
# What a model thought in an earlier turn is not shown to it again; a cache point is a
# hint for services that cache on request, and here every prompt is cached.
_NOT_TEXT = (ThinkingBlock, CachePoint, ToolCallBlock)


def to_turns(messages: Sequence[ChatMessage]) -> list[ChatTurn]:
    """Convert messages; text blocks are joined by a newline, as LlamaIndex does.

    Raises:
        RequestError: For an image, audio or another block that is not text.
    """
    return [_turn(message) for message in messages]


def _turn(message: ChatMessage) -> ChatTurn:
    turn: ChatTurn = {"role": _ROLES[message.role], "content": _text(message)}
    for key in ("name", "tool_call_id"):
        if message.additional_kwargs.get(key):
            turn[key] = message.additional_kwargs[key]
    if calls := _calls(message):
        turn["tool_calls"] = calls
    return turn


def _text(message: ChatMessage) -> str:
    parts = []
    for block in message.blocks:
        if isinstance(block, TextBlock):
            parts.append(block.text)
        elif not isinstance(block, _NOT_TEXT):
            raise RequestError(
                f"a message has a {type(block).__name__}; PCR serves text models, so "
                "send its content as text"
            )
    return "\n".join(parts)


def call_record(id_: str | None, name: str, arguments: object) -> dict[str, Any]:
    """Return a tool call in the form of OpenAI, with its arguments as an object."""
    function = {"name": name, "arguments": _as_object(arguments)}
    return {"type": "function", "id": id_, "function": function}


def _calls(message: ChatMessage) -> list[dict[str, Any]]:
    """Calls from the blocks, or from where older LLM classes leave them."""
    blocks = [block for block in message.blocks if isinstance(block, ToolCallBlock)]
    if blocks:
        return [
            call_record(block.tool_call_id, block.tool_name, block.tool_kwargs)
            for block in blocks
        ]
    return [_read(call) for call in message.additional_kwargs.get("tool_calls") or ()]


def _read(call: Any) -> dict[str, Any]:
    fields = call.model_dump() if isinstance(call, BaseModel) else call
    try:
        function = fields["function"]
        return call_record(fields.get("id"), function["name"], function["arguments"])
    except (KeyError, TypeError, AttributeError):
        raise RequestError(
            f"a tool call in a message is not of the form {{'id': ..., 'function': "
            f"{{'name': ..., 'arguments': ...}}}}: {call!r:.200}"
        ) from None


def _as_object(arguments: object) -> object:
    """Parse arguments that came as JSON text: a template would quote them again."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return arguments  # what a model wrote wrongly is shown to it as it was
