"""Tool calls read by the parser that a model's own tokenizer brings along."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pcr_integrations._tool_calls import ParsedReply, ToolCall, as_call

if TYPE_CHECKING:
    from pcr_core import Engine

_log = logging.getLogger("pcr_integrations")


def template_reply(
    engine: Engine,
    token_ids: Sequence[int],
    turns: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
) -> ParsedReply | None:
    """Read an answer with ``tokenizer.parse_response``.

    That needs a ``response_template`` (``response_schema`` in transformers before
    5.10), which few tokenizers have. It sees the special tokens, which text leaves out.

    Returns:
        ``None`` without such a parser, if it fails, or if it finds no call: then the
        tolerant parser reads the text.
    """
    tokenizer = engine.tokenizer
    template = getattr(tokenizer, "response_template", None)
    if template is None and getattr(tokenizer, "response_schema", None) is None:
        return None
    try:
        answer = tokenizer.decode(list(token_ids), skip_special_tokens=False)
        more: dict[str, Any] = {}
        if template is not None:
            more["prefix"] = tokenizer.decode(engine.encode(turns, tools=tools))
            more["tools"] = list(tools or ())
        message = tokenizer.parse_response(answer, **more)
        calls = [as_call(call) for call in message.get("tool_calls") or ()]
    except Exception as error:  # a template may raise anything on what a model writes
        _log.info("the tokenizer's own response parser failed: %r", error)
        return None
    return _reply(message, calls) if calls else None


def _reply(message: Mapping[str, Any], calls: list[ToolCall]) -> ParsedReply:
    content = message.get("content")
    return ParsedReply(content if isinstance(content, str) else "", tuple(calls))
