"""LangChain's retriever suite."""

from __future__ import annotations

from typing import Any

from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.retrievers import BaseRetriever
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_tests.integration_tests import RetrieversIntegrationTests

from pcr_integrations.langchain import PCRRetriever


class TestPCRRetriever(RetrieversIntegrationTests):
    """Over LangChain's own vector store."""

    @property
    def retriever_constructor(self) -> type[BaseRetriever]:
        return PCRRetriever

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        store = InMemoryVectorStore(DeterministicFakeEmbedding(size=8))
        store.add_texts([f"Document number {number} of ten." for number in range(10)])
        return {"inner": store.as_retriever()}

    @property
    def retriever_query_example(self) -> str:
        return "Which number?"
