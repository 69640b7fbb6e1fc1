"""Tool calls on their way back: found in generated text, whole or streamed.

Small models write calls in several dialects and often not quite right, so parsing is
tolerant, and what cannot be read is reported as an invalid call, never raised:

    <tool_call>{"name": "f", "arguments": {...}}</tool_call>     Hermes, Qwen, SmolLM
    [TOOL_CALLS][{"name": "f", "arguments": {...}}]              Mistral
    <|python_tag|>{"name": "f", "parameters": {...}}             Llama 3
    <function=f>{...}</function>                                 Llama 3.1
    {"name": "f", "arguments": {...}}                            bare, at the start
"""

from __future__ import annotations

import ast
import json
import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pcr_integrations._tools import ToolUse

_MARKERS = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<function=")
_MARKER = re.compile("|".join(map(re.escape, _MARKERS)))
_CLOSER = {"<tool_call>": "</tool_call>", "<function=": "</function>"}
_FENCE = re.compile(r"\A```(?:json)?\s*\n?(.*?)(?:```\s*)?\Z", re.DOTALL)
_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:>|\[ARGS\])\s*(.*)\Z", re.DOTALL)
_DECODER = json.JSONDecoder(strict=False)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call. Its id has nine letters and digits: Mistral's template wants that."""

    name: str
    arguments: dict[str, Any]
    id: str


@dataclass(frozen=True, slots=True)
class InvalidCall:
    """Text that meant to be a call and could not be read, and why."""

    name: str | None
    raw: str
    error: str
    id: str


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """Generated text taken apart: what is said, and what is called."""

    text: str
    calls: tuple[ToolCall, ...] = ()
    invalid: tuple[InvalidCall, ...] = ()


def new_call_id() -> str:
    """Return an id that no other call has."""
    return uuid.uuid4().hex[:9]


def parse_reply(text: str, use: ToolUse) -> ParsedReply:
    """Take a whole answer apart. Never raises; text without calls comes back as is."""
    first = _MARKER.search(text)
    if first is None:
        calls = _bare_calls(text, use)
        return ParsedReply("", _limit(calls, use)) if calls else ParsedReply(text)
    said = [text[: first.start()]]
    found: list[ToolCall | InvalidCall] = []
    for marker, body, rest in _segments(text, first.start()):
        found += _read_marked(marker, body)
        said.append(rest)
    return ParsedReply(
        "".join(piece for piece in said if piece.strip()),
        _limit([call for call in found if isinstance(call, ToolCall)], use),
        tuple(call for call in found if isinstance(call, InvalidCall)),
    )


def limited(reply: ParsedReply, use: ToolUse) -> ParsedReply:
    """Keep one call only if more are not welcome."""
    return replace(reply, calls=_limit(list(reply.calls), use))


def _limit(calls: list[ToolCall], use: ToolUse) -> tuple[ToolCall, ...]:
    return tuple(calls if use.parallel else calls[:1])


def _segments(text: str, start: int) -> Iterator[tuple[str, str, str]]:
    """Yield (marker, what it marks, text behind the closing tag) from ``start`` on."""
    marks = list(_MARKER.finditer(text, start))
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    for mark, end in zip(marks, ends, strict=True):
        body, rest = text[mark.end() : end], ""
        closer = _CLOSER.get(mark.group())
        if closer is not None:
            body, _, rest = body.partition(closer)
        yield mark.group(), body, rest


def _read_marked(marker: str, body: str) -> list[ToolCall | InvalidCall]:
    """Read what stands behind a marker: JSON calls, or a name and its arguments."""
    named = _NAMED.match(body) if marker in ("<function=", "[TOOL_CALLS]") else None
    try:
        if named is not None:
            (arguments,) = _values(named.group(2) or "{}")
            return [as_call({"name": named.group(1), "arguments": arguments})]
        values = _values(body)
        if not values:
            raise ValueError("there is no call behind the marker")
    except ValueError as error:
        return [_invalid(named.group(1) if named else None, body, error)]
    calls: list[ToolCall | InvalidCall] = []
    for value in values:
        try:
            calls.append(as_call(value))
        except ValueError as error:
            calls.append(_invalid(_name_of(value), json.dumps(value), error))
    return calls


def _invalid(name: str | None, raw: str, error: ValueError) -> InvalidCall:
    return InvalidCall(name, raw.strip(), str(error), new_call_id())


def _values(text: str) -> list[Any]:
    """Return the JSON values in ``text``, lists opened up.

    Raises:
        ValueError: If it is neither JSON nor a Python literal, as some models write.
    """
    values: list[Any] = []
    at = 0
    while rest := text[at:].lstrip(" \t\r\n,;"):
        try:
            value, used = _DECODER.raw_decode(rest)
        except ValueError as error:
            value, used = _literal(rest, error), len(rest)
        values += value if isinstance(value, list) else [value]
        at = len(text) - len(rest) + used
    return values


def _literal(text: str, error: ValueError) -> Any:
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        raise error from None


def _name_of(value: object) -> str | None:
    """Return the function's name; ``None`` if ``value`` is not shaped like a call."""
    if not isinstance(value, Mapping):
        return None
    function = value.get("function")
    if isinstance(function, Mapping):
        return _name_of(function)
    name = value.get("name", function)
    return name if isinstance(name, str) and name else None


def as_call(value: Any) -> ToolCall:
    """Return a call from any of the shapes that models write.

    Raises:
        ValueError: If ``value`` has no name, or arguments that are no JSON object.
    """
    name = _name_of(value)
    if name is None:
        raise ValueError("a call needs a name")
    inner = value.get("function")
    fields = inner if isinstance(inner, Mapping) else value
    arguments: Any = {}
    for key in ("arguments", "parameters", "args"):
        if fields.get(key) is not None:
            arguments = fields[key]
            break
    if isinstance(arguments, str):
        arguments = _DECODER.decode(arguments) if arguments.strip() else {}
    if not isinstance(arguments, dict):
        raise ValueError("the arguments of a call are a JSON object")
    return ToolCall(name, arguments, new_call_id())


def _bare_calls(text: str, use: ToolUse) -> list[ToolCall]:
    """Calls in an answer that is JSON from end to end; none if it is anything else.

    Without a marker only calls of known functions count: an answer may be JSON. When
    a call is required and there is one function, its arguments alone will do.
    """
    fenced = _FENCE.match(text.strip())
    body = fenced.group(1) if fenced else text.strip()
    if not body.startswith(("{", "[")):
        return []
    try:
        values = _values(body)
        if values and all(_name_of(value) in use.names for value in values):
            return [as_call(value) for value in values]
    except ValueError:
        return []
    if use.required and len(use.tools) == 1 and len(values) == 1:
        return _arguments_alone(values[0], use.tools[0]["function"])
    return []


def _arguments_alone(value: Any, function: Mapping[str, Any]) -> list[ToolCall]:
    schema = function.get("parameters") or {}
    known, needed = schema.get("properties", {}), schema.get("required", ())
    if isinstance(value, dict) and set(needed) <= set(value) <= set(known):
        return [ToolCall(function["name"], value, new_call_id())]
    return []


class ToolCallFilter:
    """Lets text through as it is generated and holds back what may be a call.

    However the answer is cut into pieces, the text let through plus
    ``finish().text`` is ``parse_reply(answer).text``, and the calls are the same.
    """

    def __init__(self, use: ToolUse) -> None:
        self._use = use
        self._held = ""
        self._let_through = False
        self._calling = False

    def feed(self, piece: str) -> str:
        """Take the next piece; return the text that is certainly no call."""
        self._held += piece
        if self._calling or self._may_be_bare():
            return ""
        mark = _MARKER.search(self._held)
        self._calling = mark is not None
        safe = mark.start() if mark else len(self._held) - self._undecided()
        text = self._held[:safe]
        if not self._let_through and not text.strip():
            return ""  # blank before a call is dropped, before text it is kept
        self._let_through = True
        self._held = self._held[safe:]
        return text

    def finish(self) -> ParsedReply:
        """Take apart what is still held."""
        return parse_reply(self._held, self._use)

    def _may_be_bare(self) -> bool:
        """True while the whole answer may still be one bare call."""
        start = self._held.lstrip()
        return not self._let_through and (
            start.startswith(("{", "[", "```")) or start in ("", "`", "``")
        )

    def _undecided(self) -> int:
        """Length of the longest end of the held text that begins a marker."""
        longest = max(map(len, _MARKERS)) - 1
        for size in range(min(longest, len(self._held)), 0, -1):
            if any(marker.startswith(self._held[-size:]) for marker in _MARKERS):
                return size
        return 0
