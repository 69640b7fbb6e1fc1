"""Prompts that put the documents in front of the question, so that they are reused.

Each takes the variables of the stock prompt that it stands in for.
"""

from __future__ import annotations

from langchain_core.prompts import ChatPromptTemplate, PromptTemplate

RAG = ChatPromptTemplate.from_messages(
    [
        (
            "system",
            "You are an assistant for question-answering tasks. Use the following "
            "pieces of retrieved context to answer the question. If you don't know the "
            "answer, just say that you don't know. Use three sentences maximum and "
            "keep the answer concise.\n\nContext:\n{context}",
        ),
        ("human", "{question}"),
    ]
)
"""For ``rlm/rag-prompt``: ``context``, ``question``."""

DOCUMENTS_THEN_QUESTION = PromptTemplate.from_template(
    "Use the following context to answer the query:\n{context}\n\n{question}"
)
"""For a human message with question and documents: ``context``, ``question``."""

REFINE = PromptTemplate.from_template(
    "Refine an existing answer with more context. If the context isn't useful, return "
    "the existing answer.\n------------\n{context_str}\n------------\n"
    "The original question is as follows: {question}\n"
    "We have provided an existing answer: {existing_answer}\n"
    "Refined Answer:"
)
"""For the refine chain's ``refine_prompt``: ``context_str``, ``question``,
``existing_answer``."""

REFINE_CHAT = ChatPromptTemplate.from_messages(
    [
        (
            "system",
            "Refine an existing answer with more context. If the context isn't useful, "
            "return the existing answer.\n------------\n{context_str}\n------------",
        ),
        ("human", "{question}"),
        ("ai", "{existing_answer}"),
        ("human", "Refine your answer with the context above."),
    ]
)
"""As ``REFINE``, for chat models."""

__all__ = ["DOCUMENTS_THEN_QUESTION", "RAG", "REFINE", "REFINE_CHAT"]
