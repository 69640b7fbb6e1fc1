"""The public surface: these names and no others, and cheap to import."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import pcr_core

NAMES = {
    "CacheStats",
    "CancelledError",
    "Completion",
    "ConfigError",
    "DeadlineExceededError",
    "Decisions",
    "Document",
    "DocumentNotFoundError",
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
}
HEAVY = ("torch", "transformers", "lmdb", "numpy", "langchain_core", "llama_index")


def test_the_names_are_exactly_these() -> None:
    assert set(pcr_core.__all__) == NAMES
    assert sorted(pcr_core.__all__) == pcr_core.__all__
    assert dir(pcr_core) == sorted(NAMES)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_name_is_there_and_documented(name: str) -> None:
    found = getattr(pcr_core, name)
    assert found.__name__ == name
    assert found.__module__.startswith("pcr_core.")
    assert found.__doc__


def test_another_name_is_not() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Enginee'"):
        pcr_core.Enginee  # noqa: B018
    with pytest.raises(ImportError, match="Enginee"):
        from pcr_core import Enginee  # noqa: F401


def test_star_import() -> None:
    space: dict[str, object] = {}
    exec("from pcr_core import *", space)
    assert set(space) >= NAMES


def _loaded_by(code: str) -> set[str]:
    """Which heavy packages a fresh interpreter has after running ``code``."""
    report = f"\nimport sys; print(*(m for m in {HEAVY} if m in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code + report],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    return set(done.stdout.split())


def test_settings_and_errors_load_nothing_heavy() -> None:
    code = (
        "import pcr_core\n"
        "from pcr_core import EngineConfig, SamplingParams, Completion, Result, Usage\n"
        "from pcr_core import PcrError, ConfigError, CacheStats, EngineStats\n"
        "from pcr_core import Document, Explanation\n"
        "EngineConfig(dram_bytes='1GiB'); SamplingParams(max_tokens=3)"
    )
    assert _loaded_by(code) == set()


ADAPTERS = {
    "documents": {"DocumentRegistry", "DocumentSource", "ReuseWarning", "registry"},
    "langchain": {"ChatPCR", "PCRDocumentCompressor", "PCRLLM", "PCRRetriever"},
    "llama_index": {"PCRLLM", "PCRPostprocessor", "PCRRetriever"},
}


@pytest.mark.parametrize("module", sorted(ADAPTERS))
def test_adapters_have_their_names_and_load_no_torch(module: str) -> None:
    package = importlib.import_module(f"pcr_integrations.{module}")
    assert set(package.__all__) >= ADAPTERS[module]
    for name in package.__all__:
        assert getattr(package, name).__doc__
    assert not _loaded_by(f"import pcr_integrations.{module}") & {"torch", "lmdb"}


def test_documents_load_no_framework() -> None:
    assert _loaded_by("import pcr_integrations.documents") == set()


def test_the_engine_loads_no_framework() -> None:
    loaded = _loaded_by("from pcr_core import Engine")
    assert "torch" in loaded
    assert not loaded & {"langchain_core", "llama_index"}
