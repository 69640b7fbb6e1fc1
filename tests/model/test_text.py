"""Text while it arrives: partial characters, stop strings, nothing lost or doubled."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from transformers import PreTrainedTokenizerFast

from pcr_core.model.text import TextStream

fixtures = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def spaces() -> PreTrainedTokenizerFast:
    """As SentencePiece models have it: a word carries its blank, the first drops it.

    Bytes that are no whole character are tokens of their own (byte fallback).
    """
    words = ["<unk>", "▁", "▁a", "▁b", "a", "b", "▁the", "e", "é", "."]
    vocab = {word: index for index, word in enumerate(words)}
    vocab |= {f"<0x{byte:02X}>": len(words) + byte for byte in range(256)}
    raw = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab=vocab, merges=[], byte_fallback=True)
    )
    decoders = tokenizers.decoders
    raw.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, clean_up_tokenization_spaces=False
    )


def whole(tokenizer: Any, tokens: list[int]) -> str:
    text: str = tokenizer.decode(tokens, skip_special_tokens=True)
    return text


def streamed(tokenizer: Any, tokens: list[int], stop: tuple[str, ...] = ()) -> str:
    stream = TextStream(tokenizer, stop)
    pieces = []
    for token in tokens:
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    return "".join([*pieces, stream.finish()])


@fixtures
@given(tokens=st.lists(st.integers(0, 258), max_size=40))
def test_pieces_join_to_the_whole_text_bytes(tiny_tokenizer, tokens) -> None:
    """Any bytes, valid or not, special tokens among them."""
    assert streamed(tiny_tokenizer, tokens) == whole(tiny_tokenizer, tokens)


@fixtures
@given(text=st.text(max_size=30))
def test_pieces_join_to_the_whole_text_words(tiny_tokenizer, text) -> None:
    tokens = tiny_tokenizer(text, add_special_tokens=False).input_ids
    assert streamed(tiny_tokenizer, tokens) == whole(tiny_tokenizer, tokens)


@fixtures
@given(tokens=st.lists(st.integers(1, 9), max_size=30))
def test_pieces_join_where_the_first_blank_is_dropped(spaces, tokens) -> None:
    assert streamed(spaces, tokens) == whole(spaces, tokens)


@fixtures
@given(text=st.text(alphabet="ab e.é✓😀", min_size=1, max_size=12))
def test_pieces_join_with_byte_fallback(spaces, text) -> None:
    tokens = [10 + byte for byte in text.encode()]
    assert streamed(spaces, tokens) == whole(spaces, tokens)


def test_a_character_of_four_tokens_comes_whole(tiny_tokenizer) -> None:
    tokens = tiny_tokenizer("a😀b", add_special_tokens=False).input_ids
    assert len(tokens) == 6
    stream = TextStream(tiny_tokenizer)
    assert [stream.push(token) for token in tokens] == ["a", "", "", "", "😀", "b"]
    assert stream.finish() == ""


def test_an_unfinished_character_is_shown_at_the_end(tiny_tokenizer) -> None:
    tokens = tiny_tokenizer("a😀", add_special_tokens=False).input_ids[:3]
    stream = TextStream(tiny_tokenizer)
    assert [stream.push(token) for token in tokens] == ["a", "", ""]
    assert stream.finish() == whole(tiny_tokenizer, tokens)[1:] != ""


def test_special_tokens_are_no_text(tiny_tokenizer) -> None:
    stream = TextStream(tiny_tokenizer)
    assert stream.push(tiny_tokenizer.eos_token_id) == ""
    letter = tiny_tokenizer.convert_tokens_to_ids("a")
    assert stream.push(letter) == "a"


# --- stop strings ---


def _push_all(tokenizer: Any, text: str, *stop: str) -> tuple[list[str], TextStream]:
    tokens = tokenizer(text, add_special_tokens=False).input_ids
    stream = TextStream(tokenizer, stop)
    pieces = []
    for token in tokens:
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    return pieces, stream


def test_a_stop_string_across_tokens(tiny_tokenizer) -> None:
    pieces, stream = _push_all(tiny_tokenizer, "one STOP two", "STOP")
    assert stream.stopped
    assert "".join(pieces) == "one "
    assert stream.finish() == ""


def test_what_may_begin_a_stop_string_is_held_back(tiny_tokenizer) -> None:
    pieces, stream = _push_all(tiny_tokenizer, "aSTa", "STOP")
    assert pieces == ["a", "", "", "STa"]
    pieces, stream = _push_all(tiny_tokenizer, "aST", "STOP")
    assert pieces == ["a", "", ""]
    assert stream.finish() == "ST"
    assert not stream.stopped


def test_a_stop_string_that_overlaps_itself(tiny_tokenizer) -> None:
    pieces, stream = _push_all(tiny_tokenizer, "xaaab", "aab")
    assert "".join(pieces) == "xa"
    assert stream.stopped


def test_the_earliest_of_several_wins(spaces) -> None:
    stream = TextStream(spaces, ("e", "th"))
    assert stream.push(6) == ""  # "the"
    assert stream.stopped


def test_a_stop_string_of_several_bytes_a_character(tiny_tokenizer) -> None:
    pieces, stream = _push_all(tiny_tokenizer, "ab✓é!", "✓é")
    assert stream.stopped
    assert "".join(pieces) == "ab"


def test_a_stop_string_may_be_completed_by_finish(tiny_tokenizer) -> None:
    """The last, unfinished character shows as a replacement character."""
    tokens = tiny_tokenizer("ab✓", add_special_tokens=False).input_ids[:-1]
    assert streamed(tiny_tokenizer, tokens, ("b\ufffd",)) == "a"


@fixtures
@given(
    text=st.text(alphabet="ab", max_size=30),
    stop=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3),
)
def test_text_ends_before_the_first_stop_string(tiny_tokenizer, text, stop) -> None:
    """One character a token: the stop string that is complete first ends the text."""
    tokens = tiny_tokenizer(text, add_special_tokens=False).input_ids
    expected = text
    for end in range(len(text) + 1):
        starts = [end - len(one) for one in stop if text[:end].endswith(one)]
        if starts:
            expected = text[: min(starts)]
            break
    assert streamed(tiny_tokenizer, tokens, tuple(stop)) == expected


@fixtures
@given(
    tokens=st.lists(st.integers(1, 9), max_size=30),
    stop=st.text(alphabet="abthe. ", min_size=1, max_size=4),
)
def test_no_stop_string_is_ever_shown(spaces, tokens, stop) -> None:
    shown, text = streamed(spaces, tokens, (stop,)), whole(spaces, tokens)
    assert stop not in shown
    assert shown == text.split(stop)[0]
