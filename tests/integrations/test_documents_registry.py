"""The registry of texts: bounded, by text, versions of one id side by side."""

from __future__ import annotations

import json
import threading

import hypothesis.strategies as st
import pytest
from hypothesis import given

from pcr_core import Document
from pcr_integrations.documents import DocumentRegistry
from pcr_integrations.documents._pieces import SHORTEST_PIECE, pieces_of
from pcr_integrations.documents._registry import Place

FERRY = "The ferry leaves at nine and comes back at five."
TIDES = 'High water is at ten and\n\tat half past "ten" - ✓ 😀.'


def found(registry: DocumentRegistry, *parts: str) -> set[tuple[str, str]]:
    return {
        (document.id, document.text)
        for place in registry.find(parts)
        for document in place.documents
    }


def test_texts_are_found_where_they_stand() -> None:
    registry = DocumentRegistry()
    registry.add([Document("f", f"  {FERRY}\n"), Document("t", TIDES)])
    first, second, third = registry.find(["no", f"a {TIDES}{FERRY}", FERRY])
    assert (first.part, first.start, first.stop) == (1, 2, 2 + len(TIDES))
    assert (second.text, third.part) == (FERRY, 2)
    assert FERRY in registry
    assert f"{FERRY} " in registry
    assert "no" not in registry
    assert len(registry) == 2


@given(times=st.integers(1, 2), ascii_only=st.booleans())
def test_texts_are_found_inside_json(times: int, ascii_only: bool) -> None:
    registry = DocumentRegistry()
    registry.add([Document("t", TIDES)])
    content = TIDES
    for _ in range(times):
        content = json.dumps({"result": content}, ensure_ascii=ascii_only)
    (place,) = registry.find([content])
    assert place == Place(0, None, None, TIDES, (Document("t", TIDES),))
    assert registry.find([repr([TIDES])]) == [place]


def test_a_text_with_backslashes_of_its_own() -> None:
    registry = DocumentRegistry()
    latex = r"\begin{equation} \nabla \times E \end{equation}"
    registry.add([Document("l", latex)])
    for content in (latex, json.dumps(latex), json.dumps([json.dumps(latex)])):
        assert found(registry, content) == {("l", latex)}


def test_one_text_has_several_ids_and_one_id_several_texts() -> None:
    registry = DocumentRegistry()
    registry.add([Document("a", FERRY), Document("b", FERRY), Document("a", TIDES)])
    both = f"{FERRY} {TIDES}"
    assert found(registry, both) == {("a", FERRY), ("b", FERRY), ("a", TIDES)}
    assert registry.discard("a") == 2
    assert found(registry, both) == {("b", FERRY)}
    assert registry.discard("a") == 0


def test_the_newest_ids_of_a_text_count() -> None:
    registry = DocumentRegistry()
    registry.add(Document(f"{number}", FERRY) for number in range(40))
    assert {id for id, _ in found(registry, FERRY)} == {str(n) for n in range(24, 40)}


def test_short_texts_are_left_out_and_counted() -> None:
    registry = DocumentRegistry()
    registry.add([Document("s", " fifteen letters ")])
    assert registry.find(["fifteen letters"]) == []
    assert registry.stats.too_short == 1


def test_memory_is_bounded_and_what_is_in_use_stays() -> None:
    registry = DocumentRegistry(max_bytes=20_000)
    registry.add([Document("f", FERRY)])
    for number in range(200):
        registry.add([Document(f"{number}", f"Document number {number} " * 10)])
        assert registry.stats.bytes <= 20_000
        if number % 3 == 0:
            assert found(registry, FERRY) == {("f", FERRY)}
    stats = registry.stats
    assert stats.evicted == 201 - stats.texts
    assert 2 <= stats.texts < 20
    assert found(registry, "Document number 199 " * 10)
    assert not found(registry, "Document number 1 " * 10)


def test_one_text_larger_than_the_bound_is_kept_until_the_next() -> None:
    registry = DocumentRegistry(max_bytes=10)
    registry.add([Document("f", FERRY)])
    assert FERRY in registry
    registry.add([Document("t", TIDES)])
    assert (FERRY in registry, TIDES in registry) == (False, True)
    with pytest.raises(ValueError, match="above 0"):
        DocumentRegistry(max_bytes=0)


def test_clear() -> None:
    registry = DocumentRegistry()
    registry.add([Document("f", FERRY)])
    registry.clear()
    assert registry.find([FERRY]) == []
    assert (registry.stats.texts, registry.stats.bytes) == (0, 0)


def test_threads_add_and_search_at_once() -> None:
    registry = DocumentRegistry(max_bytes=30_000)
    errors: list[BaseException] = []

    def work(name: int) -> None:
        try:
            for number in range(60):
                text = f"Text {number} of thread {name}, with some words behind it."
                registry.add([Document("d", text)])
                for place in registry.find([f"{text}\n{FERRY}"]):
                    assert place.text in (text, FERRY)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(registry._index._heads) <= len(registry)


LONG = " ".join(f"Sentence {n} says something about the harbour." for n in range(20))


def test_a_document_that_was_cut_is_known_by_its_pieces() -> None:
    registry = DocumentRegistry()
    registry.add([Document("long", LONG), Document("f", FERRY)])
    prompt = f"{FERRY} {LONG[:500]}"
    names = [(d.id, d.text) for p in registry.find([prompt]) for d in p.documents]
    assert names[0] == ("f", FERRY)
    assert {id for id, _ in names[1:]} == {"long"}
    covered = sum(len(text) for _, text in names[1:])
    assert 500 - 2 * 100 < covered <= 500
    # As a whole it is one document; its pieces are not named beside it.
    assert found(registry, f"{LONG} {LONG[:500]}") == {("long", LONG)}
    registry.discard("long")
    assert found(registry, prompt) == {("f", FERRY)}
    assert not registry._pieces._owners


def test_what_many_documents_have_in_common_is_no_piece_of_any() -> None:
    registry = DocumentRegistry()
    notice = (
        "All rights are reserved by whoever has written this text, now and later on."
    )
    notice += " It must not be copied."
    registry.add(Document(f"{n}", f"{notice}\nText {n}. {FERRY}") for n in range(4))
    assert found(registry, f"{notice}\nSomething else.") == set()
    registry.discard("0")
    assert len(found(registry, f"{notice}\nSomething else.")) == 3


def test_only_the_newest_texts_have_pieces() -> None:
    registry = DocumentRegistry()
    registry.add(Document(f"{n}", f"{n} {LONG}") for n in range(300))
    assert len(registry._pieces._texts) == 256


@given(st.text(alphabet="ab. \n\u3002", max_size=400))
def test_pieces_are_in_the_text_and_do_not_overlap(text: str) -> None:
    at = 0
    for piece in pieces_of(text):
        at = text.index(piece, at) + len(piece)
        assert len(piece) >= SHORTEST_PIECE
