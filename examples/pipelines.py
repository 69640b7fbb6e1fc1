"""The same retrieval-augmented question answering in LlamaIndex and in LangChain.

Both take an engine and an index and return a function from question to ``Answer``. The
code between is what a user of either framework writes; only the LLM object is ours.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever as LangChainRetriever
from langchain_core.runnables import RunnablePassthrough
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent
from llama_index.core.prompts.chat_prompts import TEXT_QA_PROMPT_TMPL_MSGS
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.retrievers import BaseRetriever as LlamaIndexRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

from examples.answers import Answer
from examples.corpus import PlotIndex
from pcr_core import Engine
from pcr_integrations.langchain import ChatPCR
from pcr_integrations.llama_index import PCRLLM

Ask = Callable[[str], Answer]


def _answer(
    framework: str,
    question: str,
    text: str,
    report: Mapping[str, Any],
) -> Answer:
    usage = report["usage"]
    return Answer(
        framework=framework,
        question=question,
        text=text.strip(),
        prompt_tokens=usage["prompt_tokens"],
        dram=usage["cached_by_tier"].get("dram", 0),
        ssd=usage["cached_by_tier"].get("ssd", 0),
        computed=usage["computed_tokens"],
        ttft=report["timing"]["ttft"],
    )


# --- LlamaIndex ---


class PlotNodes(LlamaIndexRetriever):
    """Hands whole plots to a LlamaIndex query engine, best first."""

    def __init__(self, index: PlotIndex, k: int) -> None:
        self._index = index
        self._k = k
        super().__init__()

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [
            NodeWithScore(node=TextNode(id_=plot.id, text=plot.text), score=score)
            for plot, score in self._index.search(query_bundle.query_str, k=self._k)
        ]


class LastChat(BaseEventHandler):
    """Keeps what the LLM reported last: a query engine's response does not carry it."""

    report: dict[str, Any] = {}  # noqa: RUF012 (a pydantic field, copied per instance)

    def handle(self, event: Any, **_: Any) -> None:
        if isinstance(event, LLMChatEndEvent) and event.response is not None:
            self.report = event.response.raw


@functools.cache
def _last_chat() -> LastChat:
    """The one handler of this process: LlamaIndex keeps handlers for good."""
    handler = LastChat()
    get_dispatcher().add_event_handler(handler)
    return handler


def llama_index_pipeline(
    engine: Engine, index: PlotIndex, *, k: int, max_tokens: int
) -> Ask:
    """A query engine as LlamaIndex users build it, with default prompts."""
    llm = PCRLLM(engine=engine, max_tokens=max_tokens, temperature=0.0)
    llm.install_tokenizer()
    query_engine = RetrieverQueryEngine.from_args(
        PlotNodes(index, k), llm=llm, response_mode="compact"
    )
    last = _last_chat()

    def ask(question: str) -> Answer:
        response = query_engine.query(question)
        return _answer("LlamaIndex", question, str(response), last.report)

    return ask


# --- LangChain ---


class PlotDocuments(LangChainRetriever):
    """Hands whole plots to a LangChain chain, best first."""

    index: Any
    k: int

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun
    ) -> list[Document]:
        return [
            Document(plot.text, id=plot.id)
            for plot, _ in self.index.search(query, k=self.k)
        ]


def _as_context(documents: list[Document]) -> str:
    return "\n\n".join(document.page_content.strip() for document in documents)


def langchain_pipeline(
    engine: Engine, index: PlotIndex, *, k: int, max_tokens: int
) -> Ask:
    """A retrieval chain as LangChain users build it.

    Its prompt has the words of LlamaIndex' default one: prompts with the same beginning
    share KV, whichever framework they come from.
    """
    prompt = ChatPromptTemplate.from_messages(
        [(str(m.role.value), str(m.content)) for m in TEXT_QA_PROMPT_TMPL_MSGS]
    )
    chat = ChatPCR(engine=engine, max_tokens=max_tokens, temperature=0.0)
    inputs = {
        "context_str": PlotDocuments(index=index, k=k) | _as_context,
        "query_str": RunnablePassthrough(),
    }
    chain = inputs | prompt | chat

    def ask(question: str) -> Answer:
        message = chain.invoke(question)
        report = message.response_metadata["pcr"]
        return _answer("LangChain", question, str(message.content), report)

    return ask
