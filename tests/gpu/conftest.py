"""A CUDA device, and models on it whose answers do not depend on what is cached."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.equivalence.conftest import World, worlds


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(scope="module")
def world(
    tmp_path_factory: pytest.TempPathFactory,
    make_tiny_model: Callable[..., Any],
    tiny_tokenizer: Any,
) -> Iterator[Callable[..., World]]:
    """``world(kind, dtype, chunk=16, overlap="auto")``: on the grid, built once."""
    probes = tmp_path_factory.mktemp("probes")
    with worlds(probes, make_tiny_model, tiny_tokenizer, "cuda") as get:
        yield lambda *names, **settings: get(*names, cuts="grid", **settings)
