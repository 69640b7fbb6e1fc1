"""Promise one on a GPU: on the grid, reuse never changes a bit, whatever was lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pcr_core.model.streams import OVERLAPS
from tests.equivalence.test_reuse_is_exact import STORY, family, run_stories, tell

pytestmark = pytest.mark.gpu

dtypes = pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
modes = pytest.mark.parametrize("mode", OVERLAPS)


@dtypes
@modes
@pytest.mark.parametrize("kind", ["llama", "mistral_sliding"])
def test_random_stories(
    world: Callable[..., Any], kind: str, dtype: str, mode: str
) -> None:
    run_stories(world(kind, dtype, chunk=32, rows=1, overlap=mode), 6)


@dtypes
@modes
@pytest.mark.parametrize("kind", ["gemma3", "qwen2"])
def test_other_models(
    world: Callable[..., Any], kind: str, dtype: str, mode: str
) -> None:
    tell(world(kind, dtype, chunk=32, overlap=mode), STORY, (60, 60))


@dtypes
def test_around_every_chunk_multiple(
    world: Callable[..., Any], tmp_path: Path, dtype: str
) -> None:
    """N - 1, N and N + 1 tokens, each asked twice, and again after a restart."""
    one = world("llama", dtype, chunk=16, overlap="both")
    sizes = [k * 16 + d for k in (1, 2, 3, 32, 33) for d in (-1, 0, 1)]
    stream = family(2, max(sizes))
    for _ in range(2):
        one.open(tmp_path / "kv", slots=80, files=80)
        for size in (*sizes, *sizes):
            assert one.ask(stream[:size]) == one.reference(stream[:size]), size
    one.shut()
