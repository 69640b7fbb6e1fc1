"""Which characters each token stands for, where the tokenizer does not say.

Tokens are decoded one after another. Where the decoded text and the prompt differ,
every token of the differing part is said to stand for all of it. That is the safe side:
a document in there may begin some tokens too early, never too late (where a lost
character equals its neighbour, nobody can tell which of the two was lost).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pcr_core.documents import CharSpan
from pcr_core.prefix import shared_prefix

_UNFINISHED = "\ufffd"
_LONGEST_CHARACTER = 8
"""Tokens to wait for the rest of a character; then it is no character."""


def decoded_offsets(tokenizer: Any, ids: Sequence[int]) -> tuple[str, list[CharSpan]]:
    """Decode token by token.

    The tokens of one character all get its offsets. About 50 microseconds a token.

    Returns:
        The text, special tokens included, and the characters of each token in it.
    """
    pieces: list[str] = []
    spans: list[CharSpan] = []
    size = context = read = 0
    before = ""
    for index in range(len(ids)):
        # Decoding restarts a few tokens back: see TextStream.
        now = _decode(tokenizer, ids[context : index + 1])
        waited = index - read
        unfinished = len(now) <= len(before) or now.endswith(_UNFINISHED)
        if unfinished and waited < _LONGEST_CHARACTER and index + 1 < len(ids):
            continue
        pieces.append(now[len(before) :])
        spans += [(size, size + len(pieces[-1]))] * (waited + 1)
        size += len(pieces[-1])
        context, read = read, index + 1
        before = _decode(tokenizer, ids[context:read])
    return "".join(pieces), spans


def aligned_offsets(
    text: str, decoded: str, spans: Sequence[CharSpan]
) -> list[CharSpan]:
    """Carry offsets from the decoded text over to the prompt that was tokenised.

    Args:
        text: The prompt.
        decoded: What its tokens decode to: nearly the same.
        spans: The characters of each token in ``decoded``.
    """
    head = shared_prefix(text, decoded)
    tail = shared_prefix(text[head:][::-1], decoded[head:][::-1])
    tail_start, shift = len(decoded) - tail, len(text) - len(decoded)

    def start(at: int) -> int:
        return at + shift if at >= tail_start else min(at, head)

    def stop(at: int) -> int:
        return at if at <= head else max(at, tail_start) + shift

    return [(start(first), stop(behind)) for first, behind in spans]


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(
        list(ids),
        skip_special_tokens=False,
        clean_up_tokenization_spaces=False,
        spaces_between_special_tokens=False,
    )
    return text
