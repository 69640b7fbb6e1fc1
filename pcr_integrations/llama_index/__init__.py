"""LlamaIndex adapters.

from llama_index.core import Settings
from pcr_integrations.llama_index import PCRLLM

Settings.llm = PCRLLM(max_tokens=64)
"""

from __future__ import annotations

from pcr_integrations._extras import needs_extra

with needs_extra("llama-index", package="llama_index"):
    from pcr_integrations.llama_index.batch import abatch_query, batch_query
    from pcr_integrations.llama_index.llm import PCRLLM
    from pcr_integrations.llama_index.postprocessor import PCRPostprocessor
    from pcr_integrations.llama_index.retriever import PCRRetriever

__all__ = [
    "PCRLLM",
    "PCRPostprocessor",
    "PCRRetriever",
    "abatch_query",
    "batch_query",
]
