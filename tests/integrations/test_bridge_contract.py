"""The wrappers follow the engine's settings, and know only its public face."""

from __future__ import annotations

import ast
from pathlib import Path

import pcr_integrations
from pcr_core import EngineConfig, SamplingParams
from pcr_integrations._fields import PcrFields
from pcr_integrations._options import ALIASES

PACKAGE = Path(pcr_integrations.__file__).parent


def test_every_setting_of_the_engine_is_a_field() -> None:
    ours = set(PcrFields.model_fields) - {"engine", "timeout"}
    assert ours == {*EngineConfig.model_fields, *SamplingParams.model_fields}


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
