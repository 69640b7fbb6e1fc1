"""Results of the engine as LangChain messages, chunks and metadata."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.messages.tool import (
    ToolCallChunk,
    invalid_tool_call,
    tool_call,
    tool_call_chunk,
)
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

from pcr_integrations._reports import (
    document_records,
    logprob_records,
    timing_record,
    usage_record,
)
from pcr_integrations._tool_calls import ParsedReply

if TYPE_CHECKING:
    from pcr_core import Engine, Result, Usage

PROVIDER = "pcr"


def usage_metadata(usage: Usage) -> UsageMetadata:
    """Return token counts the way LangChain's tools read them.

    ``cache_read`` are prompt tokens whose KV was reused. ``cache_creation`` are those
    that went through the model; their full chunks were offered to the cache.
    """
    return UsageMetadata(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        input_token_details=InputTokenDetails(
            cache_read=usage.cached_tokens, cache_creation=usage.computed_tokens
        ),
    )


def response_metadata(
    engine: Engine, result: Result, *, calls_tools: bool = False
) -> dict[str, Any]:
    """Return model, finish reason and, under ``"pcr"``, counts, times, documents."""
    metadata: dict[str, Any] = {
        "model_name": engine.model_name,
        "model_provider": PROVIDER,
        "finish_reason": "tool_calls" if calls_tools else result.finish_reason,
        "pcr": {
            "usage": usage_record(result.usage),
            "timing": timing_record(result.timing),
            "documents": document_records(result.documents),
        },
    }
    logprobs = logprob_records(engine, result)
    if logprobs is not None:
        metadata["logprobs"] = {"content": logprobs}
    return metadata


def chat_result(engine: Engine, result: Result, reply: ParsedReply) -> ChatResult:
    """Return a whole answer."""
    message = AIMessage(
        content=reply.text,
        tool_calls=[
            tool_call(name=call.name, args=call.arguments, id=call.id)
            for call in reply.calls
        ],
        invalid_tool_calls=[
            invalid_tool_call(
                name=call.name, args=call.raw, id=call.id, error=call.error
            )
            for call in reply.invalid
        ],
        usage_metadata=usage_metadata(result.usage),
        response_metadata=response_metadata(
            engine, result, calls_tools=bool(reply.calls)
        ),
    )
    return ChatResult(generations=[ChatGeneration(message=message)])


def text_chunk(text: str) -> ChatGenerationChunk:
    """Return a piece of a stream."""
    return ChatGenerationChunk(message=AIMessageChunk(content=text))


def last_chunk(
    engine: Engine, result: Result, reply: ParsedReply
) -> ChatGenerationChunk:
    """Return the end of a stream: the text held back, calls, usage and metadata.

    They come once, because LangChain adds up chunks: a name said twice is doubled.
    """
    message = AIMessageChunk(
        content=reply.text,
        tool_call_chunks=_call_chunks(reply),
        usage_metadata=usage_metadata(result.usage),
        response_metadata=response_metadata(
            engine, result, calls_tools=bool(reply.calls)
        ),
        chunk_position="last",
    )
    return ChatGenerationChunk(message=message)


def _call_chunks(reply: ParsedReply) -> list[ToolCallChunk]:
    good = [(c.name, json.dumps(c.arguments), c.id) for c in reply.calls]
    # LangChain completes broken JSON and would make a valid call of it. As a JSON
    # string it stays broken: stream and invoke agree on which calls are invalid.
    bad = [(c.name, json.dumps(c.raw), c.id) for c in reply.invalid]
    return [
        tool_call_chunk(name=name, args=arguments, id=call_id, index=index)
        for index, (name, arguments, call_id) in enumerate([*good, *bad])
    ]
