"""Rows of the layout matrix: what LlamaIndex puts where (see test_layouts)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.chat_engine import (
    CondensePlusContextChatEngine,
    ContextChatEngine,
)
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.query_engine import CitationQueryEngine, RetrieverQueryEngine
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

from pcr_integrations.llama_index import PCRLLM, PCRRetriever
from pcr_integrations.llama_index.prompts import REFINE
from tests.integrations.layout_kit import texts


class Fixed(BaseRetriever):
    def __init__(self, row: str) -> None:
        super().__init__()
        self._row = row

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [
            NodeWithScore(
                node=TextNode(
                    id_=f"{self._row}-{i}", text=text, metadata={"page": f"p. {i}"}
                ),
                score=1.0 - i,
            )
            for i, text in enumerate(texts(self._row))
        ]


Ask = Callable[[str, Any, str], Any]


def query(mode: str, **templates: Any) -> Ask:
    def ask(row: str, llm: PCRLLM, question: str) -> Any:
        engine = RetrieverQueryEngine.from_args(
            PCRRetriever(Fixed(row)), llm=llm, response_mode=mode, **templates
        )
        return engine.query(question)

    return ask


def chat(kind: Any) -> Ask:
    def ask(row: str, llm: PCRLLM, question: str) -> Any:
        memory = ChatMemoryBuffer.from_defaults(llm=llm)
        retriever = PCRRetriever(Fixed(row))
        return kind.from_defaults(retriever, llm=llm, memory=memory).chat(question)

    return ask


def citation(row: str, llm: PCRLLM, question: str) -> Any:
    retriever = PCRRetriever(Fixed(row))
    engine = CitationQueryEngine.from_args(None, retriever=retriever, llm=llm)
    return engine.query(question)


def _with(ask: Ask, *, chats: bool = True) -> Ask:
    """Ask with a model that answers chats, or one that completes text."""

    def with_engine(row: str, engine: Any, question: str) -> Any:
        return ask(
            row, PCRLLM(engine=engine, max_tokens=2, is_chat_model=chats), question
        )

    return with_engine


REFINE_FIRST = query("refine", refine_template=REFINE)
ROWS: dict[str, tuple[Ask, list[bool]]] = {
    "text_qa, chat": (_with(query("compact")), [True]),
    "text_qa, completion": (_with(query("compact"), chats=False), [True]),
    "tree_summarize": (_with(query("tree_summarize")), [True]),
    "accumulate": (_with(query("accumulate")), [True, True]),
    "compact_accumulate": (_with(query("compact_accumulate")), [True]),
    "refine, chat": (_with(query("refine")), [True, True]),
    "refine, completion": (_with(query("refine"), chats=False), [True, False]),
    "refine, documents first": (_with(REFINE_FIRST, chats=False), [True, True]),
    "context": (_with(chat(ContextChatEngine)), [True]),
    "condense_plus_context": (_with(chat(CondensePlusContextChatEngine)), [True]),
    "citation": (_with(citation), [True]),
    # A Python list of texts is printed into the prompt.
    "simple_summarize": (_with(query("simple_summarize")), [True]),
}
"""By name: how to ask, and whether the documents of each prompt are reused."""
