"""The wrappers follow the engine's settings, and know only its public face."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

import pcr_integrations
from pcr_core import ConfigError, EngineConfig, SamplingParams
from pcr_integrations import langchain, llama_index
from pcr_integrations._fields import PcrFields
from pcr_integrations._options import ALIASES
from pcr_integrations.langchain import ChatPCR

PACKAGE = Path(pcr_integrations.__file__).parent


def test_every_setting_of_the_engine_is_a_field() -> None:
    ours = set(PcrFields.model_fields) - {"engine", "timeout"}
    assert ours == {*EngineConfig.model_fields, *SamplingParams.model_fields}


SETTINGS = {
    "dram_bytes": "auto",
    "eviction": "pgdsf",
    "lookahead_window": 3,
    "prefetch": "timeout",
    "prefetch_timeout": 0.5,
    "write_policy": "on_evict",
    "namespace": "tenant",
    "namespace_bytes": "1GiB",
    "trace": "trace.jsonl",
}
WRAPPERS = [ChatPCR, langchain.PCRLLM, llama_index.PCRLLM]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_settings_of_the_tiers_reach_the_engine(wrapper: Any) -> None:
    made = wrapper(**SETTINGS)
    assert EngineConfig(**made._engine_settings()) == EngineConfig(**SETTINGS)
    default = wrapper()
    assert EngineConfig(**default._engine_settings()) == EngineConfig()


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(
    "bad",
    [
        {"eviction": "random"},
        {"lookahead_window": -1},
        {"prefetch": "on"},
        {"prefetch_timeout": 0},
        {"write_policy": "never"},
        {"namespace_bytes": 0},
        {"dram_bytes": 0},
    ],
)
def test_a_bad_setting_is_refused_at_once(wrapper: Any, bad: dict[str, Any]) -> None:
    (name,) = bad
    with pytest.raises(ConfigError, match=name):
        wrapper(**bad)


def test_every_alias_of_a_call_option_is_an_alias_of_the_field() -> None:
    for alias, name in ALIASES.items():
        choices = PcrFields.model_fields[name].validation_alias
        assert alias in choices.choices


def test_adapters_import_only_the_top_of_pcr_core() -> None:
    inner = [
        f"{path.relative_to(PACKAGE)}: {module}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for module in _imported(node)
        if module.startswith("pcr_core.")
    ]
    assert not inner


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    return []
