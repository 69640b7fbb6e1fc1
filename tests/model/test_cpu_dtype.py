"""A CPU that would emulate a checkpoint's dtype computes in float32 instead."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from pcr_core import EngineConfig
from pcr_core.model import cpu_dtype
from pcr_core.model.loading import load


@pytest.fixture
def saved(tiny_llama: Any, tiny_tokenizer: Any, tmp_path: Any) -> Any:
    """``saved(dtype)``: a folder with a checkpoint of that dtype."""

    def save(dtype: str) -> str:
        tiny_llama.to(getattr(torch, dtype)).save_pretrained(tmp_path)
        tiny_tokenizer.save_pretrained(tmp_path)
        return str(tmp_path)

    return save


def pretend(monkeypatch: pytest.MonkeyPatch, *native: torch.dtype) -> None:
    monkeypatch.setattr(cpu_dtype, "has_products", lambda dtype: dtype in native)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_widened_where_it_would_be_emulated(
    saved: Any, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    pretend(monkeypatch, torch.float32)
    folder = saved(dtype)
    wide = load(EngineConfig(model=folder))
    assert wide.dtype is torch.float32
    kept = load(EngineConfig(model=folder, dtype=dtype))
    assert kept.dtype is getattr(torch, dtype), "an explicit dtype is obeyed"
    for a, b in zip(wide.model.parameters(), kept.model.parameters(), strict=True):
        assert torch.equal(a, b.float())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_kept_where_it_is_native(
    saved: Any, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    pretend(monkeypatch, torch.float32, getattr(torch, dtype))
    loaded = load(EngineConfig(model=saved(dtype)))
    assert loaded.dtype is getattr(torch, dtype)


def test_kept_with_a_warning_without_the_memory(
    saved: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pretend(monkeypatch, torch.float32)
    monkeypatch.setattr(cpu_dtype, "available_bytes", lambda: 1000)
    with caplog.at_level(logging.WARNING, "pcr_core.engine"):
        loaded = load(EngineConfig(model=saved("bfloat16")))
    assert loaded.dtype is torch.bfloat16
    assert "no matrix products of bfloat16" in caplog.text


def test_loaded_objects_stay_as_they_are(
    tiny_llama: Any, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, torch.float32)
    model = tiny_llama.to(torch.bfloat16)
    assert load(EngineConfig(), model, tiny_tokenizer).model is model
    assert model.dtype is torch.bfloat16


def test_float32_is_always_native() -> None:
    assert cpu_dtype.has_products(torch.float32)
    for dtype in (torch.bfloat16, torch.float16):
        assert isinstance(cpu_dtype.has_products(dtype), bool)
