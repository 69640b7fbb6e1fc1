"""The registry of texts: bounded, by text, versions of one id side by side."""

from __future__ import annotations

import json
import threading

import hypothesis.strategies as st
import pytest
from hypothesis import given

from pcr_core import Document
from pcr_integrations.documents import DocumentRegistry
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
