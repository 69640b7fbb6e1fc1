"""LlamaIndex messages as the turns that ``engine.submit`` takes."""

from __future__ import annotations

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


def _calls(message: ChatMessage) -> list[dict[str, Any]]:
    return [
        {
            "type": "function",
            "id": block.tool_call_id,
            "function": {"name": block.tool_name, "arguments": block.tool_kwargs},
        }
        for block in message.blocks
        if isinstance(block, ToolCallBlock)
    ]
