"""Prefix KV cache reuse for local Hugging Face models.

    from pcr_core import Engine, EngineConfig, SamplingParams

    with Engine(EngineConfig(model="...")) as engine:
        print(engine.generate("Hello", SamplingParams(max_tokens=16)).text)

Names are imported when first used: settings and errors load neither torch nor
transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pcr_core.config import EngineConfig
    from pcr_core.document_use import DocumentTotals, DocumentUse
    from pcr_core.documents import Document, ForgetReceipt
    from pcr_core.engine import Engine
    from pcr_core.errors import (
        CancelledError,
        ConfigError,
        DeadlineExceededError,
        DocumentNotFoundError,
        EngineClosedError,
        ModelError,
        PcrError,
        PromptTooLongError,
        QueueFullError,
        RequestError,
        StoreError,
        UnsupportedModelError,
    )
    from pcr_core.explain.explanation import Explanation
    from pcr_core.request import Completion
    from pcr_core.result import Result, Timing, Usage
    from pcr_core.sampling_params import SamplingParams
    from pcr_core.stats import CacheStats, Decisions, EngineStats

_HOMES = {
    "Engine": "engine",
    "EngineConfig": "config",
    "CacheStats": "stats",
    "Document": "documents",
    "DocumentTotals": "document_use",
    "DocumentUse": "document_use",
    "ForgetReceipt": "documents",
    "Decisions": "stats",
    "EngineStats": "stats",
    "Explanation": "explain.explanation",
    "Completion": "request",
    "SamplingParams": "sampling_params",
    **dict.fromkeys(("Result", "Timing", "Usage"), "result"),
    **dict.fromkeys(
        (
            "CancelledError",
            "ConfigError",
            "DeadlineExceededError",
            "DocumentNotFoundError",
            "EngineClosedError",
            "ModelError",
            "PcrError",
            "PromptTooLongError",
            "QueueFullError",
            "RequestError",
            "StoreError",
            "UnsupportedModelError",
        ),
        "errors",
    ),
}

__all__ = [
    "CacheStats",
    "CancelledError",
    "Completion",
    "ConfigError",
    "DeadlineExceededError",
    "Decisions",
    "Document",
    "DocumentNotFoundError",
    "DocumentTotals",
    "DocumentUse",
    "Engine",
    "EngineClosedError",
    "EngineConfig",
    "EngineStats",
    "Explanation",
    "ForgetReceipt",
    "ModelError",
    "PcrError",
    "PromptTooLongError",
    "QueueFullError",
    "RequestError",
    "Result",
    "SamplingParams",
    "StoreError",
    "Timing",
    "UnsupportedModelError",
    "Usage",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return __all__
