"""Predicted prompts: learned from earlier ones, prefetched, counted, never believed."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.retrievers import BaseRetriever

from pcr_core import ConfigError, EngineClosedError
from pcr_core import Document as NamedText
from pcr_integrations.documents import DocumentRegistry, DocumentSource, Item, registry
from pcr_integrations.documents._hints import HINTS, Hints
from pcr_integrations.langchain import ChatPCR, PCRRetriever

MakeEngine = Callable[..., Any]
TEXTS = {
    name: f"{name} is a document of some length, about {name}." for name in "ABCDEF"
}


class ByQuery(BaseRetriever):
    """Finds the documents whose names are in the query."""

    def _get_relevant_documents(
        self, query: str, *, run_manager: Any
    ) -> list[Document]:
        return [Document(id=n, page_content=TEXTS[n]) for n in query if n in TEXTS]


class Chain:
    """Documents in a system message, then a question."""

    def __init__(self, engine: Any, retriever: PCRRetriever, front: str = "Read:\n"):
        self.model = ChatPCR(engine=engine)
        self.retriever = retriever
        self.front = front

    def ask(self, query: str, separator: str = "\n\n") -> None:
        found = self.retriever.invoke(query)
        text = separator.join(document.page_content for document in found)
        self.model.invoke([SystemMessage(self.front + text), HumanMessage("What?")])


@pytest.fixture
def retriever() -> PCRRetriever:
    return PCRRetriever(inner=ByQuery())


def beginning(
    *names: str, front: str = "Read:\n", separator: str = "\n\n"
) -> list[Any]:
    content = front + separator.join(TEXTS[name] for name in names)
    return [{"role": "system", "content": content}]


def counts(retriever: PCRRetriever) -> tuple[int, int, int]:
    stats = retriever.stats
    return stats.predicted, stats.confirmed, stats.wrong


def test_the_second_prompt_is_prefetched_as_soon_as_documents_are_known(
    make_engine: MakeEngine, retriever: PCRRetriever
) -> None:
    engine = make_engine()
    chain = Chain(engine, retriever)
    chain.ask("AB")
    assert HINTS.wait(60)
    assert engine.hints == []
    retriever.invoke("CD")
    assert HINTS.wait(60)
    assert engine.hints == [beginning("C", "D")]
    assert retriever.last is not None
    assert retriever.last.predicted


def test_predictions_are_counted(
    make_engine: MakeEngine, retriever: PCRRetriever
) -> None:
    chain = Chain(make_engine(), retriever)
    for query in ("AB", "CD", "BA"):
        chain.ask(query)
    assert counts(retriever) == (2, 2, 0)
    chain.front = "Please read:\n"
    chain.ask("AB")
    assert counts(retriever) == (3, 2, 1)
    chain.ask("AB")
    assert counts(retriever) == (4, 3, 1)
    assert "confirmed  3" in str(retriever.stats)
    assert "<th>wrong</th><td>1</td>" in retriever.stats._repr_html_()


def test_more_documents_than_before(
    make_engine: MakeEngine, retriever: PCRRetriever
) -> None:
    engine = make_engine()
    chain = Chain(engine, retriever)
    chain.ask("A")
    chain.ask("BC")  # what stands between documents was not known
    assert HINTS.wait(60)
    assert engine.hints == [beginning("B")]
    chain.ask("DEF")  # it is known now, and always the same
    assert HINTS.wait(60)
    assert engine.hints[1:] == [beginning("D", "E", "F")]
    assert counts(retriever) == (2, 2, 0)


def test_fronts_that_never_come_again_are_not_believed_for_long(
    make_engine: MakeEngine, retriever: PCRRetriever
) -> None:
    chain = Chain(make_engine(), retriever)
    for number in range(12):
        chain.front = f"Prompt {number}:\n"
        chain.ask("ABCDEF"[number % 6])
    assert counts(retriever) == (2, 0, 2)
    for _ in range(2):
        chain.front = "Read:\n"
        chain.ask("A")
    chain.ask("B")
    assert counts(retriever) == (3, 1, 2)


def test_a_chain_that_changes_the_documents_is_not_learned_from(
    make_engine: MakeEngine, retriever: PCRRetriever
) -> None:
    model = ChatPCR(engine=make_engine())
    for _ in range(3):
        first, second = retriever.invoke("AB")
        model.invoke(f"{second.page_content} {first.page_content}")
    assert counts(retriever) == (0, 0, 0)


def test_retrievals_ahead_of_their_prompts(
    make_engine: MakeEngine, retriever: PCRRetriever
) -> None:
    engine = make_engine()
    chain = Chain(engine, retriever)
    chain.ask("AB")
    ahead = [retriever.invoke(query) for query in ("CD", "EF", "BA")]
    for found in ahead:
        text = "\n\n".join(document.page_content for document in found)
        chain.model.invoke([SystemMessage(f"Read:\n{text}"), HumanMessage("What?")])
    assert counts(retriever) == (3, 3, 0)


def test_predictions_that_no_prompt_came_for(
    make_engine: MakeEngine, retriever: PCRRetriever
) -> None:
    Chain(make_engine(), retriever).ask("AB")
    for _ in range(70):
        retriever.invoke("CD")
    stats = retriever.stats
    assert (stats.predicted, stats.confirmed, stats.wrong) == (70, 0, 0)
    assert stats.unused == 6
    assert stats.retrievals == 71
    assert stats.documents == 142


def test_engines_that_are_closed_or_gone_get_no_hints(
    make_engine: MakeEngine, retriever: PCRRetriever
) -> None:
    engine = make_engine()
    Chain(engine, retriever).ask("AB")
    engine.closed = True
    retriever.invoke("CD")
    assert counts(retriever) == (0, 0, 0)


def test_a_hint_that_is_refused_harms_nobody() -> None:
    class Closed:
        def __init__(self) -> None:
            self.asked: list[Any] = []

        def prefetch(self, prompt: Any, *, tools: Any = None) -> None:
            self.asked.append(prompt)
            raise EngineClosedError("closed")

    engine, hints = Closed(), Hints()
    for number in range(3):
        hints.send(engine, str(number), None)  # type: ignore[arg-type]
    assert hints.wait(60)
    assert engine.asked == ["0", "1", "2"]


def test_a_source_says_what_it_would_predict(
    make_engine: MakeEngine, retriever: PCRRetriever
) -> None:
    Chain(make_engine(), retriever).ask("AB")
    items = [Item((NamedText("C", TEXTS["C"]),)), Item((NamedText("D", TEXTS["D"]),))]
    prediction = retriever._source.predict(items)
    assert prediction is not None
    assert prediction.prompt == beginning("C", "D")
    assert counts(retriever) == (0, 0, 0)
    assert TEXTS["C"] not in registry()


def test_copies_of_a_source_are_the_source() -> None:
    source = DocumentSource("name", "stable", 0.5)
    assert copy.deepcopy(source) is source
    other = pickle.loads(pickle.dumps(source))
    assert (other._order, other._tolerance) == ("stable", 0.5)
    for bad in ({"order": "random"}, {"score_tolerance": -1}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            DocumentSource("name", **bad)  # type: ignore[arg-type]


# --- documents reach the engine ---


def test_the_engine_is_told_of_documents_in_every_kind_of_call(
    make_engine: MakeEngine, known_documents: DocumentRegistry
) -> None:
    engine = make_engine()
    known_documents.add([NamedText("a", TEXTS["A"]), NamedText("a2", TEXTS["A"])])
    model = ChatPCR(engine=engine)
    prompt = f"See: {TEXTS['A']}"
    model.invoke(prompt)
    list(model.stream(prompt))
    model.batch([prompt, "nothing in here"])
    assert sorted(engine.documents) == [[], *[["a", "a2"]] * 3]
    stats = known_documents.stats
    assert (stats.prompts, stats.found, stats.lost) == (3, 6, 0)


def test_what_the_rendered_prompt_has_lost_is_left_out_and_counted(
    make_engine: MakeEngine, known_documents: DocumentRegistry
) -> None:
    class Cutting(type(make_engine())):  # type: ignore[misc]
        def render(self, prompt: Any, tools: Any = None) -> str:
            return str(super().render(prompt, tools).replace(TEXTS["B"], "B..."))

    engine = Cutting()
    known_documents.add(NamedText(name, text) for name, text in TEXTS.items())
    answer = ChatPCR(engine=engine).invoke(f"{TEXTS['A']} {TEXTS['B']} {TEXTS['C']}")
    engine.close()
    assert answer.text == "one two three"
    assert engine.documents == [["A", "C"]]
    assert known_documents.stats.lost == 1
