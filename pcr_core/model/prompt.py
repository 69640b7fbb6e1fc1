"""A prompt in any of its three forms -> token ids, and where they are in its text.

Chat templates differ in what they accept. What a template refuses is adapted and what
is adapted is documented here: a system role is folded into the first user turn, and
neighbouring turns of one role are merged. A rendered template already holds its BOS,
so it is tokenised without special tokens: exactly one BOS in every case.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pcr_core.documents import CharSpan
from pcr_core.errors import RequestError
from pcr_core.model.offsets import aligned_offsets, decoded_offsets
from pcr_core.request import Message, Prompt

Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt's tokens and their places in its text.

    Attributes:
        tokens: Token ids, the same as ``encode_prompt`` gives.
        text: The rendered text; for a prompt of token ids, what they decode to.
        offsets: The characters of ``text`` that each token stands for.
    """

    tokens: list[int]
    text: str
    offsets: list[CharSpan]


@dataclass(frozen=True, slots=True)
class _Rendered:
    """Text to tokenise, and whether the tokenizer adds its special tokens."""

    text: str
    special: bool


def encode_prompt(
    tokenizer: Any, prompt: Prompt, tools: Tools | None = None
) -> list[int]:
    """Token ids of a text, of token ids (checked), or of chat messages.

    Args:
        tokenizer: A transformers tokenizer.
        prompt: Text, token ids, or messages with ``role`` and ``content``.
        tools: JSON schemas of callable tools, for the chat template.

    Raises:
        RequestError: For an empty prompt, another type, an id outside the vocabulary,
            or messages the template cannot render.
    """
    source = _render(tokenizer, prompt, tools)
    if isinstance(source, _Rendered):
        source = list(_tokenise(tokenizer, source)["input_ids"])
    return _not_empty(source)


def encode_with_offsets(
    tokenizer: Any, prompt: Prompt, tools: Tools | None = None
) -> EncodedPrompt:
    """Encode a prompt, and say where its tokens are in its text.

    A fast tokenizer knows. For others, and for token ids, the tokens are decoded: that
    is slower, and less sharp where the decoded text differs from the prompt, by a rule
    that is safe for finding documents (see ``model.offsets``).

    Arguments and errors are those of ``encode_prompt``.
    """
    source = _render(tokenizer, prompt, tools)
    if not isinstance(source, _Rendered):
        return EncodedPrompt(source, *decoded_offsets(tokenizer, _not_empty(source)))
    if getattr(tokenizer, "is_fast", False):
        found = _tokenise(tokenizer, source, return_offsets_mapping=True)
        offsets = [(int(start), int(stop)) for start, stop in found["offset_mapping"]]
        return EncodedPrompt(_not_empty(list(found["input_ids"])), source.text, offsets)
    ids = _not_empty(list(_tokenise(tokenizer, source)["input_ids"]))
    offsets = aligned_offsets(source.text, *decoded_offsets(tokenizer, ids))
    return EncodedPrompt(ids, source.text, offsets)


def _render(
    tokenizer: Any, prompt: Prompt, tools: Tools | None
) -> _Rendered | list[int]:
    """Text to tokenise, or the token ids that the prompt already is."""
    if isinstance(prompt, str):
        return _as_rendered(tokenizer, prompt)
    if isinstance(prompt, (bytes, bytearray)) or not isinstance(prompt, Sequence):
        raise RequestError(
            "a prompt is a string, a list of token ids or a list of chat messages, not "
            f"{type(prompt).__name__}"
        )
    if prompt and all(isinstance(part, Mapping) for part in prompt):
        return _render_messages(tokenizer, [dict(m) for m in prompt], tools)  # type: ignore[arg-type]
    return _checked_ids(tokenizer, prompt)


def _as_rendered(tokenizer: Any, text: str) -> _Rendered:
    bos = tokenizer.bos_token
    has_bos = bool(bos) and text.startswith(bos)
    return _Rendered(text, special=not has_bos)


def _tokenise(tokenizer: Any, source: _Rendered, **options: bool) -> Any:
    try:
        return tokenizer(source.text, add_special_tokens=source.special, **options)
    except (TypeError, UnicodeError) as error:
        raise RequestError(
            f"the tokenizer cannot read the text ({error}); it may contain half of a "
            "surrogate pair"
        ) from error


def _not_empty(ids: list[int]) -> list[int]:
    if not ids:
        raise RequestError("the prompt is empty; give at least one token of text")
    return ids


def _checked_ids(tokenizer: Any, prompt: Sequence[Any]) -> list[int]:
    size = len(tokenizer)
    # By far the most frequent case, in a tenth of the time: plain ids, all in order.
    if set(map(type, prompt)) == {int} and min(prompt) >= 0 and max(prompt) < size:
        return list(prompt)
    ids = []
    for part in prompt:
        if isinstance(part, bool) or not hasattr(part, "__index__"):
            raise RequestError(
                "a list as prompt holds token ids (integers) or messages (mappings "
                f"with 'role' and 'content'), not {type(part).__name__}; for several "
                "prompts at once call engine.generate with a list of strings"
            )
        try:
            token = part.__index__()
        except TypeError as error:
            raise RequestError(f"a token id must be one integer: {error}") from error
        if not 0 <= token < size:
            raise RequestError(f"token id {token} is outside the vocabulary of {size}")
        ids.append(token)
    return ids


def _render_messages(
    tokenizer: Any, messages: list[dict[str, Any]], tools: Tools | None
) -> _Rendered:
    for message in messages:
        if not isinstance(message.get("role"), str):
            raise RequestError(f"a chat message needs a 'role': {message!r:.200}")
        if "content" not in message and not message.get("tool_calls"):
            raise RequestError(f"a chat message needs a 'content': {message!r:.200}")
        message["content"] = _text_content(message.get("content"))
    if not tokenizer.chat_template:
        return _as_rendered(tokenizer, plain_chat(messages))
    return _Rendered(render_chat(tokenizer, messages, tools), special=False)


def _text_content(content: Any) -> str:
    """Text of a message: a string, or a list of text blocks."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for block in content if isinstance(content, list) else [content]:
        if isinstance(block, str):
            texts.append(block)
        elif isinstance(block, Mapping) and isinstance(block.get("text"), str):
            texts.append(block["text"])
        else:
            raise RequestError(
                "a message's content must be text or a list of text blocks; images and "
                f"audio are not supported: {content!r:.200}"
            )
    return "".join(texts)


def plain_chat(messages: Sequence[Message]) -> str:
    """``role: content`` lines, for a tokenizer without a chat template."""
    lines = [f"{m['role']}: {m.get('content') or ''}" for m in messages]
    return "\n".join([*lines, "assistant:"])


def render_chat(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    tools: Tools | None = None,
) -> str:
    """Render with the tokenizer's template, adapting what it refuses.

    Raises:
        RequestError: If it refuses the adapted messages too; its reason is quoted.
    """
    attempts = (
        messages,
        fold_system(messages),
        merge_neighbours(fold_system(messages)),
    )
    reason: Exception | None = None
    for attempt in attempts:
        try:
            text: str = tokenizer.apply_chat_template(
                attempt,
                tools=list(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=True,
            )
        except Exception as error:  # templates raise Jinja's, Python's and their own
            reason = reason or error
        else:
            return text
    raise RequestError(
        f"the chat template refuses these messages: {reason}"
    ) from reason


def fold_system(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Put leading system texts in front of the first user turn."""
    system = [str(m.get("content") or "") for m in messages if m["role"] == "system"]
    rest = [dict(m) for m in messages if m["role"] != "system"]
    if not system:
        return rest
    preamble = "\n\n".join(system)
    for message in rest:
        if message["role"] == "user":
            message["content"] = f"{preamble}\n\n{message.get('content') or ''}"
            return rest
    return [{"role": "user", "content": preamble}, *rest]


def merge_neighbours(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Join neighbouring plain turns of one role, for templates that must alternate."""
    merged: list[dict[str, Any]] = []
    for message in messages:
        mergeable = merged and merged[-1]["role"] == message["role"]
        if mergeable and set(message) <= {"role", "content"} >= set(merged[-1]):
            both = (merged[-1].get("content") or "", message.get("content") or "")
            merged[-1]["content"] = "\n\n".join(both)
        else:
            merged.append(dict(message))
    return merged
