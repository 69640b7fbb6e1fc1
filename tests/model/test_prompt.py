"""Prompts in any form: exactly one BOS, adapted roles, refusals that help."""

from __future__ import annotations

import copy
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from pcr_core.documents import Document, locate
from pcr_core.errors import RequestError
from pcr_core.model.offsets import aligned_offsets, decoded_offsets
from pcr_core.model.prompt import (
    encode_prompt,
    encode_with_offsets,
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


# --- where tokens are in the text ---

fixtures = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
PROSE = st.text(alphabet="ab \n.é✓😀<|>", max_size=20)


class Slow:
    """A tokenizer that knows no offsets, and loses some text when it decodes."""

    is_fast = False
    chat_template = None
    bos_token = "<|bos|>"

    def __init__(self, fast: Any, lost: str = "") -> None:
        self._fast = fast
        self._lost = lost

    def __len__(self) -> int:
        return len(self._fast)

    def __call__(self, text: str, **options: Any) -> Any:
        assert "return_offsets_mapping" not in options
        return self._fast(text, **options)

    def decode(self, ids: list[int], **options: Any) -> str:
        text: str = self._fast.decode(ids, **options)
        return text.replace(self._lost, "") if self._lost else text


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_dir: Any) -> Any:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(smollm2_dir)


@pytest.fixture(params=["bytes", "smollm2", "slow"])
def any_tokenizer(request: pytest.FixtureRequest) -> Any:
    if request.param == "smollm2":
        return request.getfixturevalue("smollm2_tokenizer")
    tokenizer = request.getfixturevalue("tiny_tokenizer")
    return Slow(tokenizer) if request.param == "slow" else tokenizer


@settings(max_examples=50, parent=fixtures)
@given(text=PROSE.filter(bool), as_messages=st.booleans())
def test_offsets_change_no_token(any_tokenizer, text, as_messages) -> None:
    prompt: Any = [{"role": "user", "content": text}] if as_messages else text
    found = encode_with_offsets(any_tokenizer, prompt)
    assert found.tokens == encode_prompt(any_tokenizer, prompt)
    assert len(found.offsets) == len(found.tokens)
    assert all(0 <= first <= stop <= len(found.text) for first, stop in found.offsets)
    assert text in found.text


@settings(max_examples=50, parent=fixtures)
@given(text=st.text(alphabet="xy \n.é✓😀", max_size=20).filter(str.strip))
def test_token_ids_are_located_in_what_they_decode_to(tiny_tokenizer, text) -> None:
    ids = encode_prompt(tiny_tokenizer, text)
    found = encode_with_offsets(tiny_tokenizer, ids)
    assert found.tokens == ids
    assert found.text == tiny_tokenizer.decode(ids)
    sharp = encode_with_offsets(tiny_tokenizer, text)
    spans = [
        locate(one.text, [Document("d", text)], one.offsets)[0]
        for one in (found, sharp)
    ]
    assert spans[0] == spans[1]


def test_offsets_of_messages(tiny_tokenizer: Any) -> None:
    found = encode_with_offsets(tiny_tokenizer, [{"role": "user", "content": "h😀"}])
    assert found.text.startswith("<|bos|><|im_start|>user\nh😀<|im_end|>")
    assert found.offsets[:2] == [(0, 7), (7, 19)]
    start = found.text.index("😀")
    assert found.offsets.count((start, start + 1)) == 4  # bytes of one character


def test_a_slow_tokenizer_is_as_sharp_where_nothing_is_lost(tiny_tokenizer) -> None:
    text = "one two 😀 three"
    fast = encode_with_offsets(tiny_tokenizer, text)
    slow = encode_with_offsets(Slow(tiny_tokenizer), text)
    assert slow.text == fast.text == text
    assert slow.offsets[1:] == fast.offsets[1:]
    assert slow.offsets[0] == (0, 0)  # a BOS that stands in no text


def test_where_text_is_lost_a_document_begins_too_early_not_too_late(
    tiny_tokenizer: Any,
) -> None:
    text = "system. the bee and the bear eat. question"
    slow = Slow(tiny_tokenizer, lost="b")
    found = encode_with_offsets(slow, text)
    for wanted in ("system.", "the bee", "bear eat.", "question"):
        (span,) = locate(found.text, [Document("d", wanted)], found.offsets)
        (true,) = locate(
            text,
            [Document("d", wanted)],
            encode_with_offsets(tiny_tokenizer, text).offsets,
        )
        assert span.first_token <= true.first_token
        assert span.stop_token >= true.stop_token
    (span,) = locate(found.text, [Document("d", "question")], found.offsets)
    assert span.stop_token - span.first_token == len("question")


SHORT = st.text(alphabet="ab", max_size=4)


@given(
    head=SHORT,
    prompt=st.text(alphabet="xy", max_size=4),
    decoded=st.text(alphabet="pq", max_size=4),
    tail=SHORT,
)
def test_aligned_offsets_never_begin_too_late(head, prompt, decoded, tail) -> None:
    """One token a character; the middle decodes to something else."""
    text, back = head + prompt + tail, head + decoded + tail
    aligned = aligned_offsets(text, back, [(i, i + 1) for i in range(len(back))])
    if not aligned:
        return
    for at, wanted in enumerate(text):
        true = (
            at
            if at < len(head)
            else len(head)
            if at < len(head) + len(prompt)
            else at - len(prompt) + len(decoded)
        )
        spans = locate(text, [Document("d", wanted + text[at + 1 :])], aligned)
        assert min(span.first_token for span in spans) <= true


def test_what_is_no_character_ends_the_waiting(tiny_tokenizer: Any) -> None:
    ids = [200] * 50  # bytes that are no text
    text, offsets = decoded_offsets(tiny_tokenizer, ids)
    assert len(offsets) == 50
    assert len(set(offsets)) > 3
    assert offsets[-1][1] == len(text)


@pytest.mark.parametrize("prompt", ["\ud800", ["a"], [], 5])
def test_offsets_of_wrong_prompts(tiny_tokenizer: Any, prompt: Any) -> None:
    with pytest.raises(RequestError):
        encode_with_offsets(tiny_tokenizer, prompt)


@pytest.mark.parametrize(
    "message",
    [{"role": "user"}, {"role": "user", "text": "hello"}, {"role": "assistant"}],
)
def test_a_message_without_content_is_refused(tiny_tokenizer, message):
    with pytest.raises(RequestError, match="'content'"):
        encode_prompt(tiny_tokenizer, [message])


def test_tool_calls_need_no_content(tiny_tokenizer):
    call = {"function": {"name": "look", "arguments": {}}}
    asked = {"role": "user", "content": "look"}
    assert encode_prompt(
        tiny_tokenizer, [asked, {"role": "assistant", "tool_calls": [call]}, asked]
    )
