"""Tool calls in generated text, whole and streamed."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcr_integrations._tool_calls import ParsedReply, ToolCallFilter, parse_reply
from pcr_integrations._tools import ToolUse

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a"],
        },
    },
}
GET = {"type": "function", "function": {"name": "get.it"}}
USE = ToolUse((ADD, GET))

CALL = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
GOOD = {
    "hermes": f"<tool_call>\n{CALL}\n</tool_call>",
    "hermes, unclosed": f"<tool_call>{CALL}",
    "hermes, a list": f"<tool_call>[{CALL}]</tool_call>",
    "hermes, Python quotes": (
        "<tool_call>{'name': 'add', 'arguments': {'a': 1, 'b': 2}}</tool_call>"
    ),
    "arguments as text": json.dumps(
        {"name": "add", "arguments": json.dumps({"a": 1, "b": 2})}
    ),
    "mistral": f"[TOOL_CALLS][{CALL}]",
    "mistral, newer": '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}',
    "llama": '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}',
    "llama, function": '<function=add>{"a": 1, "b": 2}</function>',
    "openai": '{"type": "function", "function": ' + CALL + "}",
    "bare": f"  {CALL}\n",
    "fenced": f"```json\n{CALL}\n```",
}


@pytest.mark.parametrize("text", GOOD.values(), ids=GOOD.keys())
def test_dialects(text: str) -> None:
    reply = parse_reply(text, USE)
    assert reply.text == ""
    assert not reply.invalid
    (call,) = reply.calls
    assert (call.name, call.arguments) == ("add", {"a": 1, "b": 2})


def test_ids_are_what_mistral_takes_and_differ() -> None:
    reply = parse_reply(f"<tool_call>{CALL}\n{CALL}</tool_call>", USE)
    ids = [call.id for call in reply.calls]
    assert all(len(call_id) == 9 and call_id.isalnum() for call_id in ids)
    assert len(set(ids)) == 2


def test_text_around_calls_is_kept() -> None:
    reply = parse_reply(
        f"Let me add.\n<tool_call>{CALL}</tool_call>\n<tool_call>"
        '{"name": "get.it"}</tool_call> Done.',
        USE,
    )
    assert reply.text == "Let me add.\n Done."
    assert [call.name for call in reply.calls] == ["add", "get.it"]
    assert reply.calls[1].arguments == {}


def test_only_the_first_call_where_parallel_ones_are_unwelcome() -> None:
    alone = ToolUse((ADD,), parallel=False)
    assert len(parse_reply(f"<tool_call>{CALL}{CALL}", alone).calls) == 1


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('<tool_call>{"name": "add", "arguments": {"a": 1', None),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "add"),
        ('<tool_call>{"arguments": {}}</tool_call>', None),
        ("<tool_call></tool_call>", None),
        ("<function=add>{oops</function>", "add"),
        ("[TOOL_CALLS]7", None),
    ],
)
def test_broken_calls_are_reported_not_raised(text: str, name: str | None) -> None:
    reply = parse_reply(text, USE)
    assert not reply.calls
    (invalid,) = reply.invalid
    assert invalid.name == name
    assert invalid.error


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  ",
        "plain words",
        '{"answer": 42}',
        '{"name": "unknown", "arguments": {}}',
        '[1, 2] and {"name": "add"}',
        "```python\nprint()\n```",
        "a < b and <tool_cal",
    ],
)
def test_what_is_no_call_stays_text(text: str) -> None:
    assert parse_reply(text, USE) == ParsedReply(text)


def test_arguments_alone_count_when_one_function_must_be_called() -> None:
    must = ToolUse((ADD,), required=True)
    (call,) = parse_reply('{"a": 3}', must).calls
    assert (call.name, call.arguments) == ("add", {"a": 3})
    assert not parse_reply('{"b": 3}', must).calls
    assert not parse_reply('{"a": 3, "c": 4}', must).calls
    assert not parse_reply('{"a": 3}', ToolUse((ADD, GET), required=True)).calls


fragments = st.sampled_from(
    [
        *GOOD.values(),
        "<tool_",
        "[TOOL",
        "</tool_call>",
        "{",
        "```",
        " ",
        "\n",
        "Hi.",
        "<",
    ]
)
texts = st.lists(fragments, max_size=4).map("".join)


def check_stream(text: str, pieces: list[str]) -> None:
    stream = ToolCallFilter(USE)
    shown = "".join(stream.feed(piece) for piece in pieces)
    end = stream.finish()
    whole = parse_reply(text, USE)
    assert shown + end.text == whole.text
    assert [(c.name, c.arguments) for c in end.calls] == [
        (c.name, c.arguments) for c in whole.calls
    ]
    assert [c.raw for c in end.invalid] == [c.raw for c in whole.invalid]


@given(text=texts, cuts=st.lists(st.integers(0, 200), max_size=12))
def test_streamed_and_whole_agree(text: str, cuts: list[int]) -> None:
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    check_stream(text, [text[a:b] for a, b in itertools.pairwise(edges)])


@given(text=texts)
def test_one_character_at_a_time(text: str) -> None:
    check_stream(text, list(text))


def test_text_is_not_held_back_longer_than_needed() -> None:
    stream = ToolCallFilter(USE)
    assert stream.feed("The answer ") == "The answer "
    assert stream.feed("is <") == "is "
    assert stream.feed("5.") == "<5."
    assert stream.feed(" <tool_call>{") == " "
    assert stream.feed(" more") == ""
