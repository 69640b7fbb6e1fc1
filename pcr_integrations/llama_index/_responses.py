"""Results of the engine as LlamaIndex responses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    ContentBlock,
    LogProb,
    MessageRole,
    TextBlock,
    ToolCallBlock,
)

from pcr_integrations._reports import logprob_records, timing_record, usage_record
from pcr_integrations._tool_calls import ParsedReply
from pcr_integrations.llama_index._messages import call_record

if TYPE_CHECKING:
    from pcr_core import Engine, Result


def raw_record(
    engine: Engine, result: Result, *, calls_tools: bool = False
) -> dict[str, Any]:
    """Return counts, times, finish reason and model as a record that json can write.

    LlamaIndex' ``TokenCountingHandler`` reads ``usage``.
    """
    raw: dict[str, Any] = {
        "model": engine.model_name,
        "finish_reason": "tool_calls" if calls_tools else result.finish_reason,
        "usage": usage_record(result.usage),
        "timing": timing_record(result.timing),
    }
    logprobs = logprob_records(engine, result)
    if logprobs is not None:
        raw["logprobs"] = logprobs
    return raw


def chat_response(
    engine: Engine,
    result: Result,
    reply: ParsedReply,
    *,
    said: str = "",
    delta: str | None = None,
) -> ChatResponse:
    """Return a whole answer, or the last response of a stream.

    Args:
        engine: The engine it came from.
        result: The engine's result.
        reply: The answer taken apart; for a stream, the part that was held back.
        said: Text that the stream has shown before.
        delta: Text that this response adds to a stream.
    """
    blocks: list[ContentBlock] = []
    # A call that cannot be read stays visible as the text it is.
    unread = "".join(call.raw for call in reply.invalid)
    if text := said + reply.text + unread:
        blocks.append(TextBlock(text=text))
    blocks += [
        ToolCallBlock(
            tool_call_id=call.id, tool_name=call.name, tool_kwargs=call.arguments
        )
        for call in reply.calls
    ]
    message = ChatMessage(
        role=MessageRole.ASSISTANT, blocks=blocks or [TextBlock(text="")]
    )
    if reply.calls:  # structured streams look for calls here, and in no block
        message.additional_kwargs["tool_calls"] = [
            call_record(call.id, call.name, call.arguments) for call in reply.calls
        ]
    return ChatResponse(
        message=message,
        delta=delta if delta is None else delta + unread,
        raw=raw_record(engine, result, calls_tools=bool(reply.calls)),
        logprobs=log_probs(engine, result),
    )


def chat_piece(said: str, delta: str) -> ChatResponse:
    """Return one response of a stream: all text so far, and what is new."""
    message = ChatMessage(role=MessageRole.ASSISTANT, blocks=[TextBlock(text=said)])
    return ChatResponse(message=message, delta=delta)


def completion_response(
    engine: Engine, result: Result, *, delta: str | None = None
) -> CompletionResponse:
    """Return a whole completion, or the last response of a stream."""
    return CompletionResponse(
        text=result.text,
        delta=delta,
        raw=raw_record(engine, result),
        logprobs=log_probs(engine, result),
    )


def log_probs(engine: Engine, result: Result) -> list[list[LogProb]] | None:
    """Return one list of one per token, or ``None`` when not asked for."""
    records = logprob_records(engine, result)
    if records is None:
        return None
    return [[LogProb(token=r["token"], logprob=r["logprob"])] for r in records]
