"""Explain: what hits, what does not, why, and what to change."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

import pcr_core
from pcr_core.documents import Document, DocumentSpan, locate
from pcr_core.explain.explanation import Explanation, Verdict
from pcr_core.explain.history import PastPrompt, PromptHistory, Sighting, sighting_in
from pcr_core.explain.lookup import Lookup
from pcr_core.explain.reasons import explain
from pcr_core.index.chunk import ChunkKey, Namespace, chunk_keys
from pcr_core.model.prompt import encode_with_offsets

CHUNK = 16
NAMESPACE = Namespace.of([])
A = Document("a", "Anna keeps four grey geese by the old mill, and one white one.")
B = Document("b", "Bruno mends the bridge whenever the river has carried it away.")
C = Document("c", "Clara writes down the weather of each day in a blue notebook.")
SYSTEM = "Answer from the documents, in one short sentence.\n\n"


@dataclass(frozen=True)
class Gone:
    tier: str
    when: float
    reason: str
    by: str = ""


class Service:
    """What an engine knows: chunks by key, how they were lost, and earlier prompts."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.chunks: dict[ChunkKey, Any] = {}
        self.gone: dict[ChunkKey, Gone] = {}
        self.history = PromptHistory()

    def encode(self, text: str, documents: Sequence[Document]) -> tuple[Any, Any]:
        prompt = encode_with_offsets(self.tokenizer, text)
        return prompt.tokens, locate(prompt.text, documents, prompt.offsets)

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def run(self, text: str, *documents: Document, tier: str = "dram") -> None:
        tokens, spans = self.encode(text, documents)
        for key in chunk_keys(NAMESPACE, tokens, CHUNK):
            self.chunks.setdefault(key, tier)
        self.history.add(tokens, spans)

    def keys(self, text: str) -> list[ChunkKey]:
        return chunk_keys(NAMESPACE, self.encode(text, [])[0], CHUNK)

    def lookup(self, text: str, *documents: Document, **more: Any) -> Lookup:
        tokens, spans = self.encode(text, documents)
        keys = chunk_keys(NAMESPACE, tokens, CHUNK)
        holders = list(map(self.history.holder, spans))
        earlier = [self.history.nearest(tokens), *holders]
        facts: dict[str, Any] = {
            "states": [self.chunks.get(key, "none") for key in keys],
            "spans": spans,
            "earlier": [prompt for prompt in earlier if prompt],
            "sightings": [
                sighting_in(holder, span) if holder else None
                for span, holder in zip(spans, holders, strict=True)
            ],
            "gone": {i: self.gone[k] for i, k in enumerate(keys) if k in self.gone},
        }
        return Lookup(tokens, CHUNK, **{**facts, **more})

    def explain(self, text: str, *documents: Document, **more: Any) -> Explanation:
        return explain(self.lookup(text, *documents, **more), self.decode)


@pytest.fixture
def service(tiny_tokenizer: Any) -> Service:
    return Service(tiny_tokenizer)


def rag(*documents: Document, system: str = SYSTEM, question: str = "Who?") -> str:
    context = "\n\n".join(document.text for document in documents)
    return f"{system}{context}\n\nQuestion: {question}"


def verdicts(explanation: Explanation) -> list[tuple[str, str]]:
    return [(part.name, part.verdict) for part in explanation.documents]


# --- hits ---


def test_a_prompt_run_before_is_reused_to_its_last_full_chunk(service: Service) -> None:
    service.run(rag(A, B), A, B)
    found = service.explain(rag(A, B), A, B)
    tokens = len(service.encode(rag(A, B), [])[0])
    assert found.hit_tokens == tokens // CHUNK * CHUNK
    assert found.computed_tokens == tokens % CHUNK
    assert found.prompt.verdict == "end of prompt"
    assert f"the last {tokens % CHUNK} tokens always run" in found.prompt.why
    assert verdicts(found) == [("a", "reused"), ("b", "reused")]
    assert all(part.why == "" for part in found.documents)
    assert found.difference is None
    assert found.hints == ()
    assert pcr_core.Explanation is type(found)


def test_the_last_token_runs_even_if_its_chunk_is_stored(service: Service) -> None:
    text = "x" * (2 * CHUNK - 1)  # and a BOS
    service.run(text)
    assert service.explain(text).computed_tokens == 1
    found = service.explain(text, must_compute=4)
    assert (found.hit_tokens, found.computed_tokens) == (2 * CHUNK - 4, 4)
    assert found.prompt.verdict == "end of prompt"
    assert "the last 4 tokens always run" in found.prompt.why
    assert service.explain(text, must_compute=CHUNK).computed_tokens == CHUNK
    assert service.explain(text, must_compute=2 * CHUNK).hit_tokens == 0


def test_hits_are_counted_by_tier_and_document(service: Service) -> None:
    service.run(rag(A, B), A, B, tier="ssd")
    for key in service.keys(rag(A, B))[:6]:
        service.chunks[key] = "dram"
    found = service.explain(rag(A, B), A, B)
    first = found.documents[0]
    assert first.first_token == len(SYSTEM) + 1
    assert first.dram_tokens == 6 * CHUNK - first.first_token
    assert first.ssd_tokens == first.tokens - first.dram_tokens
    assert found.documents[1].ssd_tokens == found.documents[1].tokens
    assert found.prompt.dram_tokens == 6 * CHUNK


def test_chunks_behind_a_hole_are_hits(service: Service) -> None:
    service.run(rag(A, B), A, B)
    del service.chunks[service.keys(rag(A, B))[5]]
    found = service.explain(rag(A, B), A, B)
    assert verdicts(found) == [("a", "not stored"), ("b", "reused")]
    assert found.documents[0].computed_tokens == CHUNK
    assert found.prompt.verdict == "not stored"


# --- why not ---


def test_never_seen(service: Service) -> None:
    found = service.explain(rag(A, B), A, B)
    assert verdicts(found) == [("a", "not known"), ("b", "not known")]
    assert found.prompt.verdict == "not known"
    assert found.hit_tokens == 0
    assert found.difference is None


def test_another_order(service: Service) -> None:
    service.run(rag(A, B), A, B)
    found = service.explain(rag(B, A), A, B)
    assert verdicts(found) == [("b", "order changed"), ("a", "order changed")]
    assert found.documents[0].why == (
        "now it is behind no document, then it was behind a; a fixed order would be "
        "reused"
    )
    assert "behind b, then it was behind no document" in found.documents[1].why
    assert found.hit_tokens == len(SYSTEM) // CHUNK * CHUNK  # BOS and system prompt


def test_the_order_is_known_from_an_older_prompt(service: Service) -> None:
    """The prompt that is most alike holds other documents."""
    service.run(rag(A, B), A, B)
    service.run(rag(C), C)
    found = service.explain(rag(B, A), A, B)
    assert verdicts(found) == [("b", "order changed"), ("a", "order changed")]


def test_other_documents_before_it(service: Service) -> None:
    service.run(rag(A, B), A, B)
    found = service.explain(rag(C, B), B, C)
    assert verdicts(found) == [
        ("c", "not known"),
        ("b", "other documents before it"),
    ]
    assert found.documents[1].why == "now it is behind c, then it was behind a"


def test_many_documents_are_not_all_named(service: Service) -> None:
    many = [Document(f"d{i}", f"Text number {i} of {i * 77}.") for i in range(9)]
    service.run(rag(B), B)
    found = service.explain(rag(*many, B), *many, B)
    assert "behind 5 others, d5, d6, d7, d8, then" in found.documents[-1].why


def test_text_in_front_changed(service: Service) -> None:
    service.run(rag(A, B), A, B)
    found = service.explain(rag(A, B, system=SYSTEM.replace("one", "a")), A, B)
    index = len("Answer from the documents, in ") + 1
    assert verdicts(found) == [
        ("a", "other text before it"),
        ("b", "other text before it"),
    ]
    assert found.documents[0].why == f"the text differs from token {index} on"
    assert found.difference is not None
    assert found.difference.index == index
    assert (found.difference.now, found.difference.then) == ("a", "o")
    assert found.difference.before == "cuments, in "
    assert found.difference.after_now == " short s"
    assert found.difference.after_then == "ne short"


def test_a_document_with_another_text(service: Service) -> None:
    service.run(rag(A, B), A, B)
    changed = Document("a", A.text.replace("four", "five"))
    found = service.explain(rag(changed, B), changed, B)
    assert verdicts(found) == [("a", "text changed"), ("b", "other text before it")]
    assert found.documents[0].why == "another text was seen under this id"
    assert found.documents[0].hit_tokens > 0
    assert found.documents[1].why.endswith(", in document 'a'")


def test_the_same_text_in_an_older_prompt_counts_more(service: Service) -> None:
    """Several texts under one id, and the nearest prompt holds another one."""
    other = Document("a", C.text)
    service.run(rag(B, A), A, B)
    service.run(rag(other, C), other, C)
    assert verdicts(service.explain(rag(A), A)) == [("a", "other documents before it")]


def test_the_end_of_a_document_shares_a_chunk_with_a_new_question(
    service: Service,
) -> None:
    service.run(f"{SYSTEM}{A.text} Who keeps the grey geese by the old mill?", A)
    text = f"{SYSTEM}{A.text} Where is the mill that the geese live by?"
    _, spans = service.encode(text, [A])
    found = service.explain(text, A)
    shared = spans[0].stop_token % CHUNK
    assert verdicts(found) == [("a", "shared chunk")]
    assert found.documents[0].computed_tokens == shared > 0
    assert f"its last {shared} tokens share a chunk" in found.documents[0].why
    assert found.hints == ()


def test_chunks_that_were_evicted(service: Service) -> None:
    service.run(rag(A, B), A, B)
    for key in service.keys(rag(A, B))[4:]:
        del service.chunks[key]
        service.gone[key] = Gone("ssd", 1_700_000_000.0, "ssd budget", "document c")
    found = service.explain(rag(A, B), A, B)
    assert verdicts(found) == [("a", "gone"), ("b", "gone")]
    why = found.documents[0].why
    assert why.startswith("tokens 64 to 79 left SSD at 2023-11-1")
    assert "(ssd budget, for document c), first of 4 missing chunks; a larger" in why
    assert why.endswith("ssd_bytes keeps more")


def test_chunks_that_were_removed_on_purpose(service: Service) -> None:
    service.run(rag(A), A)
    key = service.keys(rag(A))[4]
    del service.chunks[key]
    service.gone[key] = Gone("dram", 1_700_000_000.0, "forgotten by request")
    why = service.explain(rag(A), A).documents[0].why
    assert why.endswith("(forgotten by request)")


# --- after a restart ---


def test_the_difference_is_known_from_a_stored_chunk(service: Service) -> None:
    """History is empty; a chunk with the same parent is on SSD."""
    service.run(rag(A, B), A, B, tier="ssd")
    tokens, _ = service.encode(rag(A, B), [])
    service.history = PromptHistory()
    now = rag(A, C)
    states = service.lookup(now).states
    missing = states.index("none")
    start = missing * CHUNK
    sibling = PastPrompt.of(tokens[: start + CHUNK])
    found = service.explain(now, A, C, earlier=[sibling])
    assert found.difference is not None
    assert (found.difference.now, found.difference.then) == ("C", "B")
    assert found.documents[1].verdict == "not known"


@pytest.mark.parametrize(
    ("seen", "verdict"),
    [
        (Sighting(None), "other text before it"),
        (Sighting(("a", "b")), "order changed"),
        (Sighting(("c", "b")), "other documents before it"),
        (Sighting(("b",)), "other text before it"),
        (Sighting(("b",), b"other text"), "text changed"),
    ],
)
def test_what_is_known_of_a_document(service, seen, verdict) -> None:
    found = service.explain(rag(B, A), A, B, sightings=[seen, None])
    assert found.documents[0].verdict == verdict
    assert found.documents[0].why


def test_an_earlier_prompt_is_ignored_where_chunks_prove_more(service: Service) -> None:
    service.run(rag(A, B), A, B)
    far = PastPrompt.of(service.encode("Answer quickly!", [])[0])
    found = service.explain(rag(A, C), A, C, earlier=[far])
    assert found.difference is None
    assert found.prompt.verdict == "not known"
    assert "no stored chunk tells what followed token" in found.prompt.why
    near = PastPrompt.of(service.encode(rag(A, B), [])[0])
    both = service.explain(rag(A, C), A, C, earlier=[far, near])
    assert both.difference is not None
    assert both.difference.now == "C"


def restarted(service: Service, text: str, *documents: Document, **more: Any) -> Any:
    """Explain what another process has stored; nothing is remembered."""
    service.history = PromptHistory()
    return service.explain(text, *documents, **more)


def test_the_tail_of_a_document_whose_chunks_are_stored(service: Service) -> None:
    text = SYSTEM + A.text
    service.run(text, A, tier="ssd")
    found = restarted(service, f"{text}\n\nWho keeps the grey geese?", A)
    assert found.hit_tokens == len(text + "_") // CHUNK * CHUNK
    assert verdicts(found) == [("a", "shared chunk")]


def test_the_text_changed_behind_stored_chunks(service: Service) -> None:
    service.run(rag(A), A, tier="ssd")
    tokens, _ = service.encode(rag(A), [])
    changed = Document("a", A.text.replace("white", "brown"))
    stop = (rag(A).index("white") // CHUNK + 1) * CHUNK
    sibling = PastPrompt.of(tokens[:stop])
    found = restarted(service, rag(changed), changed, earlier=[sibling])
    assert verdicts(found) == [("a", "text changed")]


def test_the_rest_of_a_document_that_began_here(service: Service) -> None:
    service.run(rag(A, B), A, B, tier="ssd")
    for key in service.keys(rag(A, B))[5:]:
        del service.chunks[key]
    found = restarted(service, rag(A, B), A, B, sightings=[None, Sighting()])
    assert verdicts(found) == [("a", "not stored"), ("b", "other text before it")]
    assert "evicted before this process started" in found.documents[0].why


def test_a_short_document_that_is_known_to_have_begun_here(service: Service) -> None:
    short = Document("s", "Tiny.")
    here = [Sighting(here=True)]
    found = service.explain(
        f"{SYSTEM}{short.text} And what then?", short, sightings=here
    )
    assert verdicts(found) == [("s", "shared chunk")]


def test_nothing_known_says_so_and_what_a_restart_loses(service: Service) -> None:
    found = restarted(service, rag(A), A)
    for part in (found.prompt, *found.documents):
        assert part.verdict == "not known"
        assert "restart" in part.why


@pytest.mark.parametrize("end", ["", " ", " Who?"])
def test_a_document_twice(service: Service, end: str) -> None:
    """Also if its last token was another one then."""
    twice = Document("a", A.text + " ")
    service.run(twice.text + end, twice)
    found = service.explain(f"{A.text}\n{A.text}", twice)
    assert verdicts(found) == [("a", "shared chunk"), ("a", "other text before it")]
    assert found.difference is not None
    why = found.documents[1].why
    assert why.startswith(("the same document already", "the text differs from token"))


# --- which earlier prompt ---


def test_prompts_with_nothing_in_common_are_not_compared(service: Service) -> None:
    service.run(rag(A, B), A, B)
    found = service.explain("Report the weather of each of the last seven days.")
    assert found.difference is None
    assert found.prompt.verdict == "not known"


def test_a_prompt_that_holds_the_document_is_compared(service: Service) -> None:
    service.run(rag(A, question="Where are the geese?"), A)
    service.run("Today it rains, and it will rain tomorrow.")
    for question in ("Who?", "Where are the geese?", "When, and how often?"):
        text = "Today is Monday. " + rag(A, question=question)
        found = service.explain(text, A)
        assert found.prompt.verdict == "text changed"
        assert found.difference is not None
        assert (found.difference.index, found.difference.then) == (1, "A")
        assert verdicts(found) == [("a", "other text before it")]


# --- why a computed chunk is in no tier ---


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"dram_chunks": 1}, "no room: the prompt has 3 full chunks, and DRAM"),
        ({"dram_chunks": 3}, "DRAM was in use by others"),
    ],
)
def test_not_stored(service: Service, facts: Any, why: str) -> None:
    text = "x" * 3 * CHUNK
    service.run(text)
    service.chunks.clear()
    found = service.explain(text, **facts)
    assert found.prompt.verdict == "not stored"
    assert why in found.prompt.why


def test_all_verdicts_are_documented() -> None:
    verdicts = set(get_args(Verdict))
    assert set(re.findall(r'- ``"(.+?)"``', Explanation.__doc__ or "")) == verdicts
    guide = Path(__file__).parents[2] / "docs" / "cache.md"
    section = guide.read_text("utf-8").split("\n## ")[1]
    assert set(re.findall(r"^\| `(.+?)`", section, re.MULTILINE)) == verdicts


def test_one_of_a_thing_is_not_plural(service: Service) -> None:
    text = "x" * CHUNK  # and a BOS
    service.run(text)
    found = str(service.explain(text))
    assert "1 full chunk of 16" in found
    assert "the last token always runs" in found


# --- without documents ---


def test_a_prompt_that_goes_on_where_another_ended(service: Service) -> None:
    service.run("One two three.")
    found = service.explain("One two three. Four five six seven eight.")
    assert found.prompt.verdict == "not known"
    assert found.prompt.why == (
        "new from token 15 on, where the nearest earlier prompt ends"
    )
    assert found.difference is not None
    assert (found.difference.now, found.difference.then) == (" ", "")
    assert "the earlier prompt ends here" in str(found)


def test_a_prompt_that_is_the_beginning_of_another(service: Service) -> None:
    service.run("One two three. Four five six seven eight.")
    found = service.explain("One two three. Four five six")
    assert found.difference is None
    assert found.prompt.verdict == "end of prompt"


def test_a_prompt_that_differs(service: Service) -> None:
    service.run("One two three. Four five six seven eight.")
    found = service.explain("One too three. Four five six seven eight.")
    assert found.prompt.verdict == "text changed"
    assert found.prompt.why.endswith("from token 6 on")


# --- hints ---


def dated(day: int) -> str:
    return f"You are helpful. Today is 2025-03-{day:02d}. {SYSTEM}"


def test_a_date_that_changed(service: Service) -> None:
    service.run(rag(A, B, system=dated(3)), A, B)
    found = service.explain(rag(A, B, system=dated(4)), A, B)
    assert found.difference is not None
    assert found.hints == (
        f"the prompt changes at token {found.difference.index}, in what looks like a "
        "date: '2025-03-04' (it was '2025-03-03'); move it behind the documents",
    )


@pytest.mark.parametrize(
    ("before", "now", "name"),
    [
        ("Request 41.", "Request 42.", "a counter: 'Request 42'"),
        ("user_id: u1.", "user_id: u2.", "an id: 'user_id: u2'"),
        ("Now 10:15:32.", "Now 10:15:59.", "a time: '10:15:59'"),
    ],
)
def test_other_things_that_changed(service, before, now, name) -> None:
    service.run(rag(A, system=f"{before} {SYSTEM}"), A)
    (hint,) = service.explain(rag(A, system=f"{now} {SYSTEM}"), A).hints
    assert name in hint
    assert "(it was" in hint


def test_an_early_date_before_anything_was_run(service: Service) -> None:
    (hint,) = service.explain(rag(A, system=dated(3)), A).hints
    assert hint == (
        "'2025-03-03' at token 27 looks like a date: when it changes, everything "
        "behind it is computed again; move it behind the documents"
    )
    (hint,) = service.explain("Today is 2025-03-03. " + "x" * 40).hints
    assert hint.endswith("move it to the end of the prompt")


def test_what_another_request_shares_is_steady_but_for_dates(service: Service) -> None:
    system = f"Ticket 4711 of 2025-03-03. {SYSTEM}"
    assert len(service.explain(rag(A, system=system), A).hints) == 2
    service.run(rag(B, system=system), B)
    (hint,) = service.explain(rag(A, system=system), A).hints
    assert "'2025-03-03'" in hint


def test_no_more_than_three_hints(service: Service) -> None:
    system = "Turn 7, request 8, 2025-03-03, 10:15:32, user_id: u1. "
    assert len(service.explain(rag(A, system=system), A).hints) == 3


def test_dates_in_documents_and_questions_are_no_alarm(service: Service) -> None:
    old, new = (Document("d", f"{C.text} On {day} May 1911.") for day in (3, 4))
    service.run(rag(old, B, question="On 3 May 2025?"), old, B)
    assert service.explain(rag(new, B), new, B).hints == ()
    assert service.explain(rag(old, B, question="On 4 May 2025?"), old, B).hints == ()


def test_a_date_where_nothing_can_be_reused_is_no_alarm(service: Service) -> None:
    assert service.explain("3 May 2025").hints == ()
    service.run("x" * 100 + " 3 May 2025")
    assert service.explain("x" * 100 + " 4 May 2025").hints == ()


def test_the_same_text_in_other_tokens(service: Service) -> None:
    import tokenizers

    tokenizer = copy.deepcopy(service.tokenizer)
    alphabet = tokenizer.get_vocab()
    vocab = {token: i for token, i in alphabet.items() if i < 256} | {"ab": 256}
    raw = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[("a", "b")]))
    raw.decoder = tokenizers.decoders.ByteLevel()
    one, other = [vocab["x"]] * 4 + [256], [vocab["x"]] * 4 + [vocab["a"], vocab["b"]]
    rest = [vocab["y"]] * 60
    look = Lookup(
        one + rest, CHUNK, ["none"] * 4, earlier=[PastPrompt.of(other + rest)]
    )
    found = explain(look, raw.decode)
    (hint,) = found.hints
    assert hint.startswith("the same text was cut into other tokens at token 4")


# --- text of tokens ---


def test_a_character_is_shown_whole(service: Service) -> None:
    """😀 and 😁 differ in the last of four bytes."""
    service.run("Smile 😀, please, and again.")
    found = service.explain("Smile 😁, please, and again.")
    at = found.difference
    assert at is not None
    assert at.index == 1 + 6 + 3
    assert (at.before, at.now, at.then) == ("<|bos|>Smile ", "😁", "😀")
    assert at.after_now == at.after_then == ", please"


def test_bytes_that_are_no_text(service: Service) -> None:
    tokens = [200, 201] * 20
    before = PastPrompt.of([*tokens[:20], 202])
    found = explain(
        Lookup(tokens, CHUNK, ["none"] * 2, earlier=[before]), service.decode
    )
    assert found.difference is not None
    assert found.difference.index == 20


# --- the table ---


def test_the_table(service: Service) -> None:
    service.run(rag(A, B, system=dated(3)), A, B)
    text = str(service.explain(rag(A, B, system=dated(4)), A, B))
    assert text.splitlines() == [
        "prompt            232 tokens, 14 full chunks of 16",
        "reused            32 of 232 (14%): 0 device, 32 DRAM, 0 SSD",
        "computed          200; text changed: it differs from the nearest earlier "
        "prompt from token 36 on",
        "document a        tokens 90 to 151: reused 0 of 62 (0%); other text before "
        "it: the text differs from token 36 on",
        "document b        tokens 154 to 215: reused 0 of 62 (0%); other text before "
        "it: the text differs from token 36 on",
        "first difference  token 36, after 'is 2025-03-0'",
        "  it is           '4', then '. Answer'",
        "  it was          '3', then '. Answer'",
        "hint              the prompt changes at token 36, in what looks like a date: "
        "'2025-03-04' (it was '2025-03-03'); move it behind the documents",
    ]


def test_white_space_is_visible(service: Service) -> None:
    service.run("one\ttwo and three and four")
    found = str(service.explain("one\n\ttwo and three and four"))
    assert r"'\n', then '\ttwo and'" in found


def test_names_fit_into_the_table(service: Service) -> None:
    names = ["<b>", "x" * 100, "one\ntwo"]
    documents = [Document(name, A.text) for name in names]
    found = service.explain(rag(A), *documents)
    html = found._repr_html_()
    assert "document &lt;b&gt;" in html
    assert "<b>" not in html
    assert f"document {'x' * 37}..." in str(found)
    assert r"document 'one\ntwo'" in str(found)
    assert [part.name for part in found.documents] == names


# --- what the device holds, and heads ---


def counts(part: Any) -> tuple[int, int, int, int]:
    return (
        part.device_tokens,
        part.dram_tokens,
        part.ssd_tokens,
        part.computed_tokens,
    )


def test_what_the_device_holds(service: Service) -> None:
    text = rag(A, B)
    service.run(text, A, B)
    size = len(service.encode(text, [])[0])
    found = service.explain(text, A, B, resident=size - 1)
    assert counts(found.prompt) == (size - 1, 0, 0, 1)
    assert found.prompt.verdict == "end of prompt"
    assert [part.verdict for part in found.documents] == ["reused", "reused"]
    assert f"{size - 1} device, 0 DRAM, 0 SSD" in str(found)


def test_a_stored_chunk_that_the_device_holds_in_part_is_read_whole(
    service: Service,
) -> None:
    text = rag(A)
    service.run(text, A)
    size = len(service.encode(text, [])[0])
    full = size // CHUNK * CHUNK
    rest = size - full
    found = service.explain(text, resident=3 * CHUNK + 5, must_compute=rest)
    assert counts(found.prompt) == (3 * CHUNK, full - 3 * CHUNK, 0, rest)
    nothing = ["none"] * (size // CHUNK)
    found = service.explain(text, A, resident=3 * CHUNK + 5, states=nothing)
    assert counts(found.prompt) == (3 * CHUNK + 5, 0, 0, size - 3 * CHUNK - 5)
    assert found.prompt.verdict == "not stored"


def test_the_device_alone_proves_that_a_prompt_was_here(service: Service) -> None:
    tokens = list(range(40))
    lookup = Lookup(tokens, CHUNK, ["none", "none"], resident=32)
    found = explain(lookup, service.decode)
    assert counts(found.prompt) == (32, 0, 0, 8)
    assert found.prompt.verdict == "end of prompt"


def test_heads_count_as_dram(service: Service) -> None:
    tokens = list(range(60))
    states = ["dram", "none", "none"]
    span = DocumentSpan("d", 20, 30, b"t")
    lookup = Lookup(tokens, CHUNK, states, spans=[span], heads={1: 9, 3: 10})
    found = explain(lookup, service.decode)
    assert counts(found.prompt) == (0, CHUNK + 9 + 10, 0, 60 - CHUNK - 19)
    assert counts(found.documents[0]) == (0, 5, 0, 5)
    assert found.prompt.verdict == "not known"
    longer = Lookup(tokens, CHUNK, states, resident=20, heads={1: 9})
    assert counts(explain(longer, service.decode).prompt) == (20, 5, 0, 35)


# --- a real tokenizer ---


def test_with_a_real_tokenizer(smollm2_dir: Any) -> None:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2_dir)
    service = Service(tokenizer)
    service.run(rag(A, B, C, system="Today is Monday, 3 March 2025. "), A, B, C)
    found = service.explain(
        rag(A, C, B, system="Today is Tuesday, 4 March 2025. "), A, B, C
    )
    assert verdicts(found) == [
        ("a", "other text before it"),
        ("c", "order changed"),
        ("b", "order changed"),
    ]
    assert found.difference is not None
    assert (found.difference.now, found.difference.then) == (" Tuesday", " Monday")
    assert "(it was 'Monday, 3 March 2025')" in found.hints[0]


# --- anything at all ---


def test_states_must_fit() -> None:
    with pytest.raises(ValueError, match="1 states do not fit 2 full chunks"):
        Lookup([1] * 35, 16, ["none"])
    with pytest.raises(ValueError, match="1 sightings do not fit 0 spans"):
        Lookup([1], 16, [], sightings=[None])


@st.composite
def lookups(draw: st.DrawFn) -> Lookup:
    token = st.integers(97, 99)
    tokens = draw(st.lists(token, min_size=1, max_size=20))
    full = len(tokens) // 4
    names = st.sampled_from(["a", "b", "c"])
    place = st.integers(0, len(tokens) - 1)

    def span(first: int, last: int, name: str) -> DocumentSpan:
        return DocumentSpan(name, min(first, last), max(first, last) + 1, b"t")

    spans = st.lists(st.builds(span, place, place, names), max_size=3)
    found = draw(spans)
    order = st.none() | st.lists(names, unique=True).map(tuple)
    digest = st.sampled_from([b"", b"t", b"u"])
    sightings = st.lists(
        st.none() | st.builds(Sighting, order, digest),
        min_size=len(found),
        max_size=len(found),
    )
    state = st.sampled_from(["none", "dram", "ssd"])
    states = draw(st.lists(state, min_size=full, max_size=full))
    return Lookup(
        tokens,
        4,
        states,
        must_compute=draw(st.integers(1, 2 * CHUNK)),
        resident=draw(st.integers(0, len(tokens) - 1)),
        spans=found,
        earlier=draw(
            st.lists(st.builds(PastPrompt.of, st.lists(token, max_size=20), spans))
        ),
        sightings=draw(st.sampled_from([[], draw(sightings)])),
        gone={
            i: Gone("ssd", 1.0, "ssd budget")
            for i in draw(st.sets(st.integers(0, max(0, full - 1))))
            if full
        },
    )


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lookups())
def test_numbers_add_up_for_anything(service: Service, lookup: Lookup) -> None:
    found = explain(lookup, service.decode)
    full = len(lookup.states)
    held = lookup.in_place
    assert lookup.resident // 4 * 4 <= held <= lookup.resident
    must_compute = min(lookup.must_compute, len(lookup.tokens) - held)
    assert found.computed_tokens >= must_compute > 0
    assert len(found.documents) == len(lookup.spans)
    for part in (found.prompt, *found.documents):
        reused = [
            lookup.states[i // 4]
            for i in range(max(held, part.first_token), part.stop_token)
            if i // 4 < full and i < len(lookup.tokens) - lookup.must_compute
        ]
        in_row = max(0, min(held, part.stop_token) - part.first_token)
        assert part.device_tokens == in_row
        assert part.dram_tokens == reused.count("dram")
        assert part.ssd_tokens == reused.count("ssd")
        assert (part.verdict == "reused") == (part.computed_tokens == 0)
        assert (part.why == "") == (part.verdict == "reused")
    assert str(found).count("\n") == len(found.rows()) - 1
