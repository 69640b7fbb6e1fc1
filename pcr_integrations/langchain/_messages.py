"""LangChain messages as the turns that ``engine.submit`` takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.prompt_values import PromptValue

from pcr_core import RequestError
from pcr_integrations._tools import ChatTurn

_ROLES = {"human": "user", "ai": "assistant", "developer": "system"}
# In an assistant turn: calls travel in ``tool_calls``, and what a model thought in an
# earlier turn is not shown to it again.
_NOT_TEXT = {
    "tool_use",
    "tool_call",
    "tool_call_chunk",
    "invalid_tool_call",
    "thinking",
    "redacted_thinking",
    "reasoning",
}


def to_turns(messages: Sequence[BaseMessage]) -> list[ChatTurn]:
    """Convert messages; text is passed on byte for byte.

    Raises:
        RequestError: For an image, audio or another part that is not text, and for a
            message that is no turn of a chat.
    """
    return [_turn(message) for message in messages]


def text_only(prompt: PromptValue) -> PromptValue:
    """Return a prompt for a text model; written as text, it must lose nothing.

    Raises:
        RequestError: As ``to_turns``, for a part that is not text.
    """
    for message in prompt.to_messages():
        _text(message)
    return prompt


def _turn(message: BaseMessage) -> ChatTurn:
    turn: ChatTurn = {"role": _role(message), "content": _text(message)}
    if message.name:
        turn["name"] = message.name
    if isinstance(message, ToolMessage):
        turn["tool_call_id"] = message.tool_call_id
    if isinstance(message, AIMessage) and (calls := _calls(message)):
        turn["tool_calls"] = calls
    return turn


def _role(message: BaseMessage) -> str:
    if isinstance(message, SystemMessage):
        return "system"
    if isinstance(message, HumanMessage):
        return "user"
    if isinstance(message, AIMessage):
        return "assistant"
    if isinstance(message, (ToolMessage, FunctionMessage)):
        return "tool"
    if isinstance(message, ChatMessage):
        return _ROLES.get(message.role, message.role)
    raise RequestError(
        f"a {type(message).__name__} cannot be sent to a model; use system, human, AI "
        "and tool messages"
    )


def _text(message: BaseMessage) -> str:
    if isinstance(message.content, str):
        return message.content
    return "".join(_block_text(block, message) for block in message.content)


def _block_text(block: str | dict[str, Any], message: BaseMessage) -> str:
    if isinstance(block, str):
        return block
    kind, text = block.get("type"), block.get("text")
    if kind in ("text", "text-plain") and isinstance(text, str):
        return text
    if isinstance(message, AIMessage) and kind in _NOT_TEXT:
        return ""
    raise RequestError(
        f"a message has a part of type {kind!r}; PCR serves text models, so send its "
        "content as text"
    )


def _calls(message: AIMessage) -> list[dict[str, Any]]:
    good = [(call["id"], call["name"], call["args"]) for call in message.tool_calls]
    bad = [
        (call["id"], call["name"], call["args"]) for call in message.invalid_tool_calls
    ]
    return [
        {
            "type": "function",
            "id": call_id,
            "function": {"name": name, "arguments": arguments},
        }
        for call_id, name, arguments in [*good, *bad]
    ]
