"""Compiled or torch's: an engine says which, and reads only what its own computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pcr_core import ConfigError, EngineConfig, SamplingParams
from pcr_core.model import compiled_glue

PROMPT = [(7 * at) % 250 for at in range(200)]
SOME = SamplingParams(max_tokens=4, temperature=0)


@pytest.fixture
def _a_compiler() -> None:
    reason = compiled_glue.choose_glue(torch.float32).reason
    if reason:
        pytest.skip(reason)


def asked(engine: Any) -> Any:
    return engine.generate([PROMPT], SOME)[0]


@pytest.mark.usefixtures("_a_compiler")
def test_chunks_are_read_by_the_kernels_that_made_them(make_engine: Any) -> None:
    seen = {}
    for setting in ("auto", "torch", "auto", "torch"):
        with make_engine(cpu_kernels=setting) as engine:
            result, stats = asked(engine), engine.stats()
        kind = "compiled" if setting == "auto" else "torch"
        assert stats.cpu_kernels == kind
        expected = "cpu_kernels='torch'" if kind == "torch" else ""
        assert stats.cpu_kernels_reason == expected
        row = "compiled for this CPU" if kind == "compiled" else f"torch ({expected})"
        assert dict(stats.rows())["kernels"] == row
        if setting not in seen:
            assert result.usage.cached_tokens == 0, "other kernels' chunks are not read"
            seen[setting] = stats.namespace, result.token_ids
        else:
            assert result.usage.cached_by_tier == {"ssd": 192}
            assert (stats.namespace, result.token_ids) == seen[setting]
    assert seen["auto"][0] != seen["torch"][0]


def test_without_a_compiler_all_works(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled_glue._build.cache_clear()
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    try:
        with make_engine() as engine:
            cold, hit, stats = asked(engine), asked(engine), engine.stats()
    finally:
        compiled_glue._build.cache_clear()
    assert stats.cpu_kernels == "torch"
    reason = "there is no C++ compiler (g++)"
    assert dict(stats.rows())["kernels"] == f"torch ({reason})"
    assert stats.exact
    assert hit.token_ids == cold.token_ids
    assert hit.usage.cached_tokens > 0


def test_a_model_without_such_layers_compiles_nothing(
    make_engine: Any, make_tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_compiler() -> str:
        raise AssertionError("nothing is to be compiled")

    monkeypatch.setattr(compiled_glue, "_library", no_compiler)
    with make_engine(model=make_tiny_model("gemma3")) as engine:
        stats = engine.stats()
    assert (stats.cpu_kernels, stats.cpu_kernels_reason) == ("torch", "")
    assert "kernels" not in dict(stats.rows())


@pytest.mark.parametrize("value", ["compiled", "off", None, 1])
def test_other_settings_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="cpu_kernels"):
        EngineConfig(cpu_kernels=value)
