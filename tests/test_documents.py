"""Documents: found wherever and however they stand, never from too late a token."""

from __future__ import annotations

import dataclasses
import json
import pickle
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

import pcr_core
from pcr_core.documents import (
    Document,
    DocumentSpan,
    document_digest,
    head_chunk,
    locate,
)
from pcr_core.errors import DocumentNotFoundError, RequestError
from pcr_core.model.prompt import encode_with_offsets

fixtures = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])

WORDS = st.text(alphabet='ab \n"\\é✓😀\u2028', max_size=12)
TEXTS = WORDS.filter(str.strip)


def characters(text: str, *documents: Document) -> list[tuple[str, int, int]]:
    """``locate`` where each token is one character."""
    spans = locate(text, documents, [(i, i + 1) for i in range(len(text))])
    return [(span.document, span.first_token, span.stop_token) for span in spans]


def found(text: str, wanted: str) -> list[str]:
    """The texts of a document's spans."""
    document = Document("d", wanted)
    return [text[first:stop] for _, first, stop in characters(text, document)]


def holds(text: str, core: str) -> bool:
    """Whether a text holds another, as it is or escaped up to twice."""
    forms = {core}
    for _ in range(2):
        forms |= {json.dumps(one)[1:-1] for one in forms}
        forms |= {json.dumps(one, ensure_ascii=False)[1:-1] for one in forms}
    return any(one in text for one in forms)


# --- what a document is ---


def test_a_document_is_a_value() -> None:
    one = Document(id="a", text="x")
    assert one == Document("a", "x") != Document("a", "y")
    assert len({one, Document("a", "x")}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.id = "b"  # type: ignore[misc]
    assert pcr_core.Document is Document


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (("", "x"), "id is empty"),
        ((" ", "x"), "id is empty"),
        (("a", ""), "text is empty"),
        (("a", "\n\t "), "text is empty"),
        ((1, "x"), "id must be a string, not int"),
        (("a", None), "text must be a string, not NoneType"),
        (("a", b"x"), "text must be a string, not bytes"),
    ],
)
def test_what_is_no_document(fields: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Document(*fields)


def test_digests_name_a_document_of_a_tenant() -> None:
    """The bytes are in users' stores."""
    digest = document_digest("tenant", "a")
    assert digest.hex() == "391395e778fed198a2801bf183be8f5b"
    assert len(digest) == 16
    others = [("", "a"), ("tenant", "b"), ("tenan", "ta"), ("", "tenanta")]
    assert digest not in [document_digest(*other) for other in others]
    assert len(document_digest("", "\ud800")) == 16


# --- where it stands ---


def test_every_occurrence_counts() -> None:
    assert characters("ab-ab", Document("d", "ab")) == [("d", 0, 2), ("d", 3, 5)]
    assert characters("aaaaa", Document("d", "aa")) == [("d", 0, 2), ("d", 2, 4)]


def test_documents_may_overlap_contain_and_repeat_each_other() -> None:
    spans = characters(
        "one two three",
        Document("inner", "two"),
        Document("outer", "one two"),
        Document("next", "two three"),
        Document("twin", "two"),
        Document("inner", "two"),
    )
    assert spans == [
        ("outer", 0, 7),
        ("inner", 4, 7),
        ("twin", 4, 7),
        ("next", 4, 13),
    ]


def test_texts_may_share_an_id_and_are_told_apart() -> None:
    text, pieces = "one two", [Document("file", "one"), Document("file", "two")]
    spans = locate(text, pieces, [(i, i + 1) for i in range(7)])
    assert [(span.document, span.first_token) for span in spans] == [
        ("file", 0),
        ("file", 4),
    ]
    assert spans[0].text_digest != spans[1].text_digest
    again = locate("two", pieces[1:], [(0, 3)])
    assert again[0].text_digest == spans[1].text_digest


@pytest.mark.parametrize(
    ("text", "wanted", "expected"),
    [
        ("<hello>", "\n hello\n", "hello"),
        ("<\n hello\n>", "\n hello\n", "\n hello\n"),
        ("<\thello\n\n>", " \thello\n", "\thello\n"),
        ('{"x": "\\n a\\"b\\n"}', '\n a"b\n', '\\n a\\"b\\n'),
        ('{"x": "a\\"b\\n"}', '\n a"b\n', 'a\\"b\\n'),
    ],
)
def test_white_space_around_it_may_be_stripped(text, wanted, expected) -> None:
    assert found(text, wanted) == [expected]


@pytest.mark.parametrize("ascii_only", [False, True])
@pytest.mark.parametrize("times", [0, 1, 2])
def test_it_may_stand_inside_json(times: int, ascii_only: bool) -> None:
    wanted = 'Line "one"\nline\ttwo \\ é✓😀'
    text = f"results: {wanted}"
    for _ in range(times):
        text = json.dumps({"content": text}, ensure_ascii=ascii_only)
    (piece,) = found(text, wanted)
    for _ in range(times):
        piece = json.loads(f'"{piece}"')
    assert piece == wanted


def test_plain_and_escaped_occurrences_are_all_found() -> None:
    wanted = "a\nb"
    assert found(f"{wanted} {json.dumps(wanted)}", wanted) == ["a\nb", "a\\nb"]


def test_what_is_missing_is_named() -> None:
    with pytest.raises(RequestError, match=r"document 'b' is not in the prompt; pass"):
        characters("one", Document("a", "one"), Document("b", "two"))
    with pytest.raises(RequestError, match=r"document 'x{77}\.\.\.'"):
        characters("one", Document("x" * 1000, "two"))


def test_all_that_are_missing_are_handed_back() -> None:
    here, gone, lost = Document("a", "one"), Document("b", "2"), Document("c", "3")
    with pytest.raises(DocumentNotFoundError, match=r"'b' \(and 1 more\)") as caught:
        characters("one", gone, here, lost)
    assert caught.value.documents == (gone, lost)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.documents, str(again)) == ((gone, lost), str(caught.value))


@given(before=WORDS, wanted=TEXTS, after=WORDS)
def test_inside_a_printed_python_list(before: str, wanted: str, after: str) -> None:
    assert found(repr([before + wanted + after]), wanted)


def test_other_things_than_documents_are_refused() -> None:
    for wrong in (["one"], [{"id": "d", "text": "one"}], "one"):
        with pytest.raises(RequestError, match=r"write documents=\[Document\(id="):
            locate("one", wrong, [(0, 3)])  # type: ignore[arg-type]


def test_one_document_needs_no_list() -> None:
    one = Document("d", "one")
    assert locate("one", one, [(0, 3)]) == locate("one", [one], [(0, 3)])  # type: ignore[arg-type]


@pytest.mark.parametrize(("first", "chunk"), [(0, 0), (15, 0), (16, 1), (40, 2)])
def test_head_chunk(first: int, chunk: int) -> None:
    assert head_chunk(DocumentSpan("d", first, 99), 16) == chunk


@given(before=WORDS, wanted=TEXTS, behind=WORDS)
def test_what_was_put_in_is_found(before, wanted, behind) -> None:
    """Every span holds it, and one of them at least a part of where it was put."""
    text = before + wanted + behind
    core = wanted.strip()
    start = len(before) + wanted.index(core)
    spans = characters(text, Document("d", wanted))
    assert all(holds(text[first:stop], core) for _, first, stop in spans)
    assert any(first < start + len(core) and start < stop for _, first, stop in spans)


# --- characters to tokens ---


@st.composite
def tokenised(draw: st.DrawFn) -> tuple[str, list[tuple[int, int]], list[int]]:
    """A text, its token offsets without blanks (as byte-level BPE), each char's token.

    A special token without text may stand on either side.
    """
    text = draw(st.text(alphabet="ab ", min_size=1, max_size=24))
    cuts = draw(st.sets(st.integers(1, len(text)), max_size=12)) | {len(text)}
    special = draw(st.booleans())
    offsets, owners, start = [(0, 0)] * special, [], 0
    for cut in sorted(cuts):
        owners += [len(offsets)] * (cut - start)
        piece = text[start:cut]
        first = start + len(piece) - len(piece.lstrip(" "))
        offsets.append((first, max(first, start + len(piece.rstrip(" ")))))
        start = cut
    return text, offsets + [(0, 0)] * special, owners


@given(tokenised(), st.data())
def test_no_token_of_a_document_is_left_out(case, data) -> None:
    text, offsets, owners = case
    first = data.draw(st.integers(0, len(text) - 1))
    stop = data.draw(st.integers(first + 1, len(text)))
    if not text[first:stop].strip():
        return
    spans = locate(text, [Document("d", text[first:stop])], offsets)
    covered = {i for span in spans for i in range(span.first_token, span.stop_token)}
    assert min(covered) <= owners[first]
    core = text[first:stop].strip()
    at = text.find(core)
    while at >= 0:
        assert set(owners[at : at + len(core)]) <= covered
        at = text.find(core, at + len(core))


def test_exact_where_tokens_are() -> None:
    text = "one two three"
    offsets = [(0, 0), (0, 3), (4, 7), (8, 13)]  # blanks trimmed, a BOS in front
    assert locate(text, [Document("d", "one")], offsets)[0].first_token == 1
    (two,) = locate(text, [Document("d", "two")], offsets)
    assert (two.first_token, two.stop_token) == (2, 3)
    assert locate(text, [Document("d", "three")], [*offsets, (0, 0)])[0].stop_token == 4


def test_the_tokens_of_one_character_stay_together() -> None:
    offsets = [(0, 1), (1, 2), (1, 2), (1, 2), (1, 2), (2, 3)]  # "a😀b" in bytes
    (span,) = locate("a😀b", [Document("d", "😀")], offsets)
    assert (span.first_token, span.stop_token) == (1, 5)


# --- real tokenizers ---


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_dir: Any) -> Any:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(smollm2_dir)


@pytest.fixture(params=["bytes", "smollm2"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    name = "tiny_tokenizer" if request.param == "bytes" else "smollm2_tokenizer"
    return request.getfixturevalue(name)


@settings(max_examples=50, parent=fixtures)
@given(before=WORDS, wanted=TEXTS, behind=WORDS)
def test_spans_decode_to_the_document(tokenizer, before, wanted, behind) -> None:
    text = f"{before}{wanted}{behind}"
    prompt = encode_with_offsets(tokenizer, text)
    document = Document("d", wanted)
    for span in locate(prompt.text, [document], prompt.offsets):
        inside = tokenizer.decode(prompt.tokens[span.first_token : span.stop_token])
        assert holds(inside, wanted.strip())
    first = locate(prompt.text, [document], prompt.offsets)[0].first_token
    in_front = tokenizer.decode(prompt.tokens[:first], skip_special_tokens=True)
    assert len(in_front.rstrip("\ufffd")) <= len(before) + wanted.index(wanted.strip())


def test_a_rag_prompt(tokenizer: Any) -> None:
    documents = [
        Document("harbour", "The harbour of Wellmouth was closed in 1911.\n"),
        Document("castle", 'Nobody knows who built "the castle".'),
    ]
    context = "\n\n".join(document.text for document in documents)
    messages = [
        {"role": "system", "content": "Answer from the context."},
        {"role": "user", "content": f"Context: {context}\n\nQuestion: when?"},
    ]
    prompt = encode_with_offsets(tokenizer, messages)
    spans = locate(prompt.text, documents, prompt.offsets)
    assert [span.document for span in spans] == ["harbour", "castle"]
    for span, document in zip(spans, documents, strict=True):
        tokens = prompt.tokens[span.first_token : span.stop_token]
        text = tokenizer.decode(tokens)
        assert document.text.strip() in text
        assert len(text) <= len(document.text) + 4


def test_a_tool_result_in_a_template(tiny_tokenizer: Any) -> None:
    """As Llama 3's: what a tool returned goes through ``tojson``."""
    import copy

    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}"
        "{{ m.content | tojson }}{% else %}{{ m.content | trim }}{% endif %}"
        "{% endfor %}"
    )
    wanted = '\nÜber "alles":\n- nichts\n'
    document = Document("d", wanted)
    for role, expected in (
        ("tool", json.dumps(wanted, ensure_ascii=False)[1:-1]),
        ("user", wanted.strip()),
    ):
        prompt = encode_with_offsets(tokenizer, [{"role": role, "content": wanted}])
        (span,) = locate(prompt.text, [document], prompt.offsets)
        tokens = prompt.tokens[span.first_token : span.stop_token]
        assert tokenizer.decode(tokens) == expected
