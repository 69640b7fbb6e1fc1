"""Rows of the layout matrix: what LangChain puts where (see test_layouts)."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, dynamic_prompt
from langchain_classic.chains import (
    RetrievalQA,
    create_history_aware_retriever,
    create_retrieval_chain,
)
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_classic.retrievers import ContextualCompressionRetriever
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.retrievers import BaseRetriever
from langchain_core.tools import create_retriever_tool

from pcr_integrations.langchain import (
    PCRLLM,
    ChatPCR,
    PCRDocumentCompressor,
    PCRRetriever,
)
from pcr_integrations.langchain import prompts as docs_first
from tests.integrations.layout_kit import texts

Ask = Callable[[str, Any, str], Any]


class Fixed(BaseRetriever):
    row: str

    def _get_relevant_documents(
        self, query: str, *, run_manager: Any
    ) -> list[Document]:
        return [
            Document(id=f"{self.row}-{i}", page_content=text)
            for i, text in enumerate(texts(self.row))
        ]


def retriever(row: str) -> PCRRetriever:
    return PCRRetriever(inner=Fixed(row=row))


def chat(engine: Any) -> ChatPCR:
    return ChatPCR(engine=engine, max_tokens=2)


def text(engine: Any) -> PCRLLM:
    return PCRLLM(engine=engine, max_tokens=2)


def joined(documents: list[Document]) -> str:
    return "\n\n".join(document.page_content for document in documents)


RETRIEVAL_QA_CHAT = ChatPromptTemplate.from_messages(
    [
        (
            "system",
            "Answer any use questions based solely on the context below:\n\n"
            "<context>\n{context}\n</context>",
        ),
        MessagesPlaceholder("chat_history", optional=True),
        ("human", "{input}"),
    ]
)
RLM_RAG_PROMPT = ChatPromptTemplate.from_template(
    "You are an assistant for question-answering tasks. Use the following pieces of "
    "retrieved context to answer the question. If you don't know the answer, just say "
    "that you don't know. Use three sentences maximum and keep the answer concise.\n"
    "Question: {question} \nContext: {context} \nAnswer:"
)


def retrieval_chain(row: str, engine: Any, question: str) -> Any:
    stuff = create_stuff_documents_chain(chat(engine), RETRIEVAL_QA_CHAT)
    return create_retrieval_chain(retriever(row), stuff).invoke({"input": question})


def history_aware(row: str, engine: Any, question: str) -> Any:
    rewrite = ChatPromptTemplate.from_messages(
        [MessagesPlaceholder("chat_history"), ("human", "{input}")]
    )
    aware = create_history_aware_retriever(chat(engine), retriever(row), rewrite)
    stuff = create_stuff_documents_chain(chat(engine), RETRIEVAL_QA_CHAT)
    history = [HumanMessage(f"About {question}"), AIMessage("Yes?")]
    return create_retrieval_chain(aware, stuff).invoke(
        {"input": question, "chat_history": history}
    )


def lcel(prompt: ChatPromptTemplate) -> Ask:
    def ask(row: str, engine: Any, question: str) -> Any:
        given = {
            "context": itemgetter("question") | retriever(row) | joined,
            "question": itemgetter("question"),
        }
        return (given | prompt | chat(engine)).invoke({"question": question})

    return ask


def retrieval_qa(kind: str, model: Callable[[Any], Any], **options: Any) -> Ask:
    def ask(row: str, engine: Any, question: str) -> Any:
        chain = RetrievalQA.from_chain_type(
            model(engine),
            chain_type=kind,
            retriever=retriever(row),
            chain_type_kwargs=options,
        )
        return chain.invoke({"query": question})

    return ask


def compressed(row: str, engine: Any, question: str) -> Any:
    base = ContextualCompressionRetriever(
        base_compressor=PCRDocumentCompressor(), base_retriever=Fixed(row=row)
    )
    stuff = create_stuff_documents_chain(chat(engine), RETRIEVAL_QA_CHAT)
    return create_retrieval_chain(base, stuff).invoke({"input": question})


def two_steps(row: str, engine: Any, question: str) -> Any:
    found = retriever(row)

    @dynamic_prompt
    def with_context(request: Any) -> str:
        query = request.state["messages"][-1].text
        return (
            "You are a helpful assistant. Use the following context in your response:"
            f"\n\n{joined(found.invoke(query))}"
        )

    agent = create_agent(chat(engine), tools=[], middleware=[with_context])
    return agent.invoke({"messages": [HumanMessage(question)]})


def with_sources(template: str) -> Ask:
    def ask(row: str, engine: Any, question: str) -> Any:
        found = retriever(row)

        class AddContext(AgentMiddleware[Any, Any]):
            def before_model(self, state: Any, runtime: Any) -> dict[str, Any]:
                last = state["messages"][-1]
                context = joined(found.invoke(last.text))
                content = template.format(question=last.text, context=context)
                return {"messages": [last.model_copy(update={"content": content})]}

        agent = create_agent(chat(engine), tools=[], middleware=[AddContext()])
        return agent.invoke({"messages": [HumanMessage(question)]})

    return ask


def tool_result(row: str, engine: Any, question: str) -> Any:
    """The second turn of an agent: a tiny random model calls no tool by itself."""
    tool = create_retriever_tool(retriever(row), "search", "Search the documents.")
    model = chat(engine).bind_tools([tool])
    call = {"name": "search", "args": {"query": question}, "id": "1"}
    return model.invoke(
        [
            SystemMessage("Use the tool."),
            HumanMessage(question),
            AIMessage("", tool_calls=[call]),
            ToolMessage(tool.invoke({"query": question}), tool_call_id="1"),
        ]
    )


ROWS: dict[str, tuple[Ask, list[bool]]] = {
    "retrieval-qa-chat": (retrieval_chain, [True]),
    "history_aware_retriever": (history_aware, [True]),
    "compression": (compressed, [True]),
    "rlm/rag-prompt": (lcel(RLM_RAG_PROMPT), [False]),
    "rlm/rag-prompt, documents first": (lcel(docs_first.RAG), [True]),
    "RetrievalQA stuff, chat": (retrieval_qa("stuff", chat), [True]),
    "RetrievalQA stuff, completion": (retrieval_qa("stuff", text), [True]),
    "refine, chat": (retrieval_qa("refine", chat), [True, False]),
    "refine, completion": (retrieval_qa("refine", text), [True, False]),
    "refine, chat, documents first": (
        retrieval_qa("refine", chat, refine_prompt=docs_first.REFINE_CHAT),
        [True, True],
    ),
    "refine, completion, documents first": (
        retrieval_qa("refine", text, refine_prompt=docs_first.REFINE),
        [True, True],
    ),
    "map_reduce": (retrieval_qa("map_reduce", chat), [True, True]),
    "agent, dynamic_prompt": (two_steps, [True]),
    "agent, source documents": (
        with_sources(
            "{question}\n\nUse the following context to answer the query:\n{context}"
        ),
        [False],
    ),
    "agent, source documents, documents first": (
        with_sources(docs_first.DOCUMENTS_THEN_QUESTION.template),
        [True],
    ),
    "agent, retriever tool": (tool_result, [False]),
}
"""By name: how to ask, and whether the documents of each prompt are reused."""
