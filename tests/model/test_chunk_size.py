"""Which chunk size ``"auto"`` stands for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pcr_core import ConfigError, EngineConfig
from pcr_core.model.prefill_plan import free, grid, shape_independent
from pcr_core.model.setup import (
    LARGE_CHUNK,
    SMALL_CHUNK,
    choose_cuts,
    chunk_tokens_for,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("cuts", [None, free(), shape_independent()])
def test_small_on_a_cpu_large_on_a_gpu(cuts: Any) -> None:
    config = EngineConfig()
    assert chunk_tokens_for(config, CPU, cuts) == SMALL_CHUNK
    assert chunk_tokens_for(config, CUDA, cuts) == LARGE_CHUNK


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_on_the_grid_a_chunk_is_a_forward(device: torch.device) -> None:
    config = EngineConfig(exact=True)
    cuts = choose_cuts(config, exact_is_free=False)
    assert cuts.name == "grid"
    assert chunk_tokens_for(config, device, cuts) == cuts.step == LARGE_CHUNK


@pytest.mark.parametrize("tokens", [16, 48, 4096])
def test_what_is_asked_for_is_kept(tokens: int) -> None:
    config = EngineConfig(chunk_tokens=tokens, exact=True)
    for cuts in (None, free(), choose_cuts(config, exact_is_free=False)):
        assert chunk_tokens_for(config, CPU, cuts) == tokens
    assert choose_cuts(config, exact_is_free=False) == grid(tokens)


@pytest.mark.parametrize("tokens", [0, 8, 17, 8192, -16, True, "128", 32.0, None])
def test_anything_else_is_refused(tokens: Any) -> None:
    with pytest.raises(ConfigError, match=r"chunk_tokens.*(multiple of 16|auto)"):
        EngineConfig(chunk_tokens=tokens)
