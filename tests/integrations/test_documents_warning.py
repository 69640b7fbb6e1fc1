"""A prompt that makes reuse impossible is named once, with the remedy."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.runnables import RunnableLambda

from pcr_integrations.documents import ReuseWarning
from pcr_integrations.langchain import PCRLLM, ChatPCR, PCRRetriever

MakeEngine = Callable[..., Any]
FOUND = [Document(id="a", page_content="A document that every question needs.")]
TEXT = FOUND[0].page_content


@pytest.fixture
def retriever() -> PCRRetriever:
    return PCRRetriever(inner=RunnableLambda(lambda query: FOUND))


def findings(run: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(one.message) for one in caught if one.category is ReuseWarning]


def asking(
    retriever: PCRRetriever, write: Callable[[str], Any], *questions: str
) -> Callable[[], None]:
    def run() -> None:
        for question in questions:
            retriever.invoke(question)
            write(question)

    return run


def test_the_question_in_front(
    make_engine: MakeEngine, retriever: PCRRetriever
) -> None:
    model = ChatPCR(engine=make_engine())

    def write(question: str) -> None:
        model.invoke(f"Answer.\nQuestion: {question}\nContext: {TEXT}\nAnswer:")

    assert findings(asking(retriever, write, "When is it?")) == []
    again = asking(retriever, write, "When is it?", "Where is it?", "Who is it?")
    (said,) = findings(again)
    assert "documents of PCRRetriever(RunnableLambda) stand behind text" in said
    assert "pcr_integrations.langchain.prompts" in said
    assert findings(asking(retriever, write, "Why is that so?")) == []


def test_a_rewritten_question_in_front_of_a_text_prompt(
    make_engine: MakeEngine, retriever: PCRRetriever
) -> None:
    model = PCRLLM(engine=make_engine())

    def write(question: str) -> None:
        model.invoke(f"The query is {question[::-1]}. Context: {TEXT}")

    run = asking(retriever, write, "one one one", "two two two", "three three")
    assert len(findings(run)) == 1


def test_results_of_tools_have_another_remedy(
    make_engine: MakeEngine, retriever: PCRRetriever
) -> None:
    model = ChatPCR(engine=make_engine())

    def write(question: str) -> None:
        call = {"name": "search", "args": {"query": question}, "id": "1"}
        model.invoke(
            [
                SystemMessage("Use tools."),
                HumanMessage(question),
                AIMessage("", tool_calls=[call]),
                ToolMessage(TEXT, tool_call_id="1"),
            ]
        )

    (said,) = findings(asking(retriever, write, "When is it?", "Where is it?"))
    assert "the result of a tool" in said


def test_a_warning_made_an_error_leaves_no_request_behind(
    make_engine: MakeEngine, retriever: PCRRetriever
) -> None:
    engine = make_engine(stepwise=True)
    engine.step(3)  # the first answer, and no more
    model = ChatPCR(engine=engine)

    def write(question: str) -> None:
        model.invoke(f"Question: {question}\nContext: {TEXT}\nAnswer:")

    run = asking(retriever, write, "When is it?", "Where is it?")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ReuseWarning):
            run()
    assert engine.completions[1].cancelled
    engine.step(9)


@pytest.mark.parametrize(
    "front",
    [
        lambda question, turn: "Context:\n",
        # Two templates in turn, as in refine and tree_summarize.
        lambda question, turn: ("Context:\n", "Context of several:\n")[turn % 2],
        # What precedes is another conversation, of another length.
        lambda question, turn: "x" * turn,
    ],
)
def test_documents_in_front_are_fine(
    make_engine: MakeEngine, retriever: PCRRetriever, front: Callable[[str, int], str]
) -> None:
    model = ChatPCR(engine=make_engine())
    turns = iter(range(10))

    def write(question: str) -> None:
        turn = next(turns)
        history: list[Any] = []
        before = front(question, turn)
        if before.startswith("x"):
            history = [HumanMessage("Hi"), AIMessage("Yes?")] * turn
        model.invoke(
            [*history, SystemMessage(f"{before}{TEXT}"), HumanMessage(question)]
        )

    questions = [f"Question number {number}?" for number in range(5)]
    assert findings(asking(retriever, write, *questions)) == []


def test_another_document_first_is_no_finding(
    make_engine: MakeEngine, retriever: PCRRetriever
) -> None:
    """A title in front of the text changes with the document, not the question."""
    texts = [f"Text {number} of a titled document." for number in range(5)]
    titled = PCRRetriever(
        inner=RunnableLambda(
            lambda query: [Document(page_content=texts[int(query[-1])])]
        )
    )
    model = ChatPCR(engine=make_engine())

    def write(question: str) -> None:
        text = texts[int(question[-1])]
        model.invoke(f"Context:\nTitle: {text[:6]}\n{text}\n{question}")

    questions = [f"Question {number}" for number in range(5)]
    assert findings(asking(titled, write, *questions)) == []
