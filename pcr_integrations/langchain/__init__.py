"""LangChain adapters.

from pcr_integrations.langchain import ChatPCR

llm = ChatPCR(max_tokens=64)
llm.invoke("What is a KV cache?").usage_metadata["input_token_details"]["cache_read"]
"""

from __future__ import annotations

from pcr_integrations._extras import needs_extra

with needs_extra("langchain", package="langchain_core"):
    from pcr_integrations.langchain.chat_models import ChatPCR
    from pcr_integrations.langchain.compressors import PCRDocumentCompressor
    from pcr_integrations.langchain.llms import PCRLLM
    from pcr_integrations.langchain.retrievers import PCRRetriever

__all__ = ["PCRLLM", "ChatPCR", "PCRDocumentCompressor", "PCRRetriever"]
