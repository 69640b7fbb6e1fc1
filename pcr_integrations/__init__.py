"""Thin adapters that put a PCR engine behind LangChain and LlamaIndex objects.

``pcr_integrations.langchain`` needs ``pip install "pcr-rag[langchain]"`` and
``pcr_integrations.llama_index`` needs ``pip install "pcr-rag[llama-index]"``;
``pcr_integrations.retrieval``, for FAISS, ``pip install "pcr-rag[retrieval]"``.
Importing them loads no torch and no model: an engine is built on first use.
"""

from __future__ import annotations

from importlib import metadata

try:
    __version__ = metadata.version("pcr-rag")
except metadata.PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0+source"

__all__ = ["__version__"]
