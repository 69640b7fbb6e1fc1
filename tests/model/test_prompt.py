"""Prompts in any form: exactly one BOS, adapted roles, refusals that help."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from pcr_core.errors import RequestError
from pcr_core.model.prompt import (
    encode_prompt,
    fold_system,
    merge_neighbours,
    plain_chat,
    render_chat,
)

BOS = 256
USER = {"role": "user", "content": "hi"}
SYSTEM = {"role": "system", "content": "be brief"}
ASSISTANT = {"role": "assistant", "content": "ok"}

# As Gemma's: no system role; user and assistant take turns.
STRICT = """{{ bos_token }}{% for m in messages %}\
{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}\
{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate') }}{% endif %}\
<{{ m.role }}>{{ m.content }}{% endfor %}<model>"""


@pytest.fixture
def tokenizer(tiny_tokenizer: Any) -> Any:
    return copy.deepcopy(tiny_tokenizer)


@pytest.fixture
def strict(tokenizer: Any) -> Any:
    tokenizer.chat_template = STRICT
    return tokenizer


def text_of(tokenizer: Any, prompt: Any, **options: Any) -> str:
    """The rendered prompt without its one BOS."""
    ids = encode_prompt(tokenizer, prompt, **options)
    assert ids.count(BOS) == 1
    assert ids[0] == BOS
    return str(tokenizer.decode(ids[1:]))


# --- one BOS ---


def test_text(tokenizer: Any) -> None:
    assert text_of(tokenizer, "hello") == "hello"
    assert text_of(tokenizer, "<|bos|>hello") == "hello"


def test_messages(tokenizer: Any) -> None:
    expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert text_of(tokenizer, [USER]) == expected
    assert text_of(tokenizer, (USER,)) == expected


def test_messages_give_what_transformers_gives(tokenizer: Any) -> None:
    messages = [SYSTEM, USER, ASSISTANT, USER]
    theirs = tokenizer.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert encode_prompt(tokenizer, messages) == theirs


def test_messages_without_a_template(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    assert text_of(tokenizer, [SYSTEM, USER]) == (
        "system: be brief\nuser: hi\nassistant:"
    )
    assert plain_chat([{"role": "user", "content": None}]) == "user: \nassistant:"


def test_a_tokenizer_without_bos(tokenizer: Any) -> None:
    import tokenizers

    tokenizer.bos_token = None
    tokenizer.backend_tokenizer.post_processor = tokenizers.processors.ByteLevel()
    assert BOS not in encode_prompt(tokenizer, "hello")
    with pytest.raises(RequestError, match="empty"):
        encode_prompt(tokenizer, "")


def test_ids_are_taken_as_they_are(tokenizer: Any) -> None:
    import numpy as np

    assert encode_prompt(tokenizer, [1, 2, BOS]) == [1, 2, BOS]
    assert encode_prompt(tokenizer, range(3)) == [0, 1, 2]
    ids = encode_prompt(tokenizer, list(np.array([3, 4])))
    assert ids == [3, 4]
    assert all(type(token) is int for token in ids)


# --- templates that refuse ---


def test_a_system_role_is_folded_where_it_is_refused(strict: Any) -> None:
    assert text_of(strict, [SYSTEM, USER]) == "<user>be brief\n\nhi<model>"
    two = [SYSTEM, {"role": "system", "content": "be kind"}, USER]
    assert text_of(strict, two) == "<user>be brief\n\nbe kind\n\nhi<model>"
    assert text_of(strict, [SYSTEM]) == "<user>be brief<model>"


def test_a_system_role_is_kept_where_it_is_taken(tokenizer: Any) -> None:
    assert "<|im_start|>system\nbe brief" in text_of(tokenizer, [SYSTEM, USER])


def test_neighbours_are_merged_where_turns_must_alternate(strict: Any) -> None:
    assert text_of(strict, [USER, USER]) == "<user>hi\n\nhi<model>"
    assert text_of(strict, [SYSTEM, USER, USER, ASSISTANT, USER]) == (
        "<user>be brief\n\nhi\n\nhi<assistant>ok<user>hi<model>"
    )


def test_what_is_refused_in_any_form_says_why(strict: Any) -> None:
    with pytest.raises(RequestError, match=r"template refuses.*must alternate"):
        encode_prompt(strict, [ASSISTANT, USER])


def test_adapting_changes_no_input() -> None:
    messages = [dict(SYSTEM), dict(USER), dict(USER)]
    before = copy.deepcopy(messages)
    merge_neighbours(fold_system(messages))
    assert messages == before


def test_turns_with_more_than_text_are_not_merged() -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}
    assert merge_neighbours([ASSISTANT, call, ASSISTANT]) == [
        ASSISTANT,
        call,
        ASSISTANT,
    ]


def test_tools_reach_the_template(tokenizer: Any) -> None:
    tokenizer.chat_template = (
        "{{ bos_token }}{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
        "{{ messages[0].content }}"
    )
    tool = {"type": "function", "function": {"name": "search"}}
    assert text_of(tokenizer, [USER], tools=[tool]) == "[search]hi"
    assert text_of(tokenizer, [USER], tools=[]) == "hi"
    assert render_chat(tokenizer, [USER]) == "<|bos|>hi"


# --- contents ---


def test_content_blocks(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ bos_token }}{{ messages[0].content }}"
    blocks = [{"type": "text", "text": "a"}, "b", {"type": "text", "text": "c"}]
    assert text_of(tokenizer, [{"role": "user", "content": blocks}]) == "abc"
    assert text_of(tokenizer, [{"role": "user", "content": None}]) == ""
    assert text_of(tokenizer, [{"role": "user"}]) == ""


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "image_url", "image_url": {"url": "x"}}],
        [{"type": "text", "text": "a"}, {"type": "input_audio"}],
        [{"text": 5}],
        5,
    ],
)
def test_other_content_is_refused(tokenizer: Any, content: Any) -> None:
    with pytest.raises(RequestError, match="images and audio are not supported"):
        encode_prompt(tokenizer, [{"role": "user", "content": content}])


@pytest.mark.parametrize("message", [{"content": "x"}, {"role": 5, "content": "x"}])
def test_a_message_needs_a_role(tokenizer: Any, message: Any) -> None:
    with pytest.raises(RequestError, match="role"):
        encode_prompt(tokenizer, [message])


@pytest.mark.parametrize(
    "prompt", [5, None, b"x", {"role": "user"}, {1, 2}, bytearray()]
)
def test_other_types(tokenizer: Any, prompt: Any) -> None:
    with pytest.raises(RequestError, match="a prompt is a string"):
        encode_prompt(tokenizer, prompt)


@pytest.mark.parametrize(
    "prompt", [[True], [1, 2.0], ["a"], [USER, 5], [None], [[1]], [259], [-1]]
)
def test_wrong_ids(tokenizer: Any, prompt: Any) -> None:
    with pytest.raises(RequestError, match="token id"):
        encode_prompt(tokenizer, prompt)


@pytest.mark.parametrize("prompt", [[], ()])
def test_empty(tokenizer: Any, prompt: Any) -> None:
    with pytest.raises(RequestError, match="empty"):
        encode_prompt(tokenizer, prompt)
