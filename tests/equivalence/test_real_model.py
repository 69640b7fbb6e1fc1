"""SmolLM2 on real text: cold, from DRAM and, after a restart, from SSD."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pcr_core import Engine, EngineConfig, Result, SamplingParams
from pcr_core.model.cpu_dtype import has_products

PARAMS = SamplingParams(max_tokens=6, logprobs=True)
CHUNK = 64


def prompts() -> list[str]:
    """Two questions of about 400 tokens over the same beginning: our own docs."""
    root = Path(__file__).resolve().parents[2]
    text = (root / "docs" / "storage-format.md").read_text(encoding="utf-8")
    assert len(text) > 3600
    shared, own = text[:1300], text[1300:1700]
    return [
        f"{shared}\n{own}\nQuestion: How is a chunk named?\nAnswer:",
        f"{shared}\nQuestion: {json.dumps(own[::-1])} What is an index?\nAnswer:",
    ]


def answers(engine: Engine) -> list[Result]:
    return [engine.generate(prompt, PARAMS) for prompt in prompts()]


def bits(results: list[Result]) -> list[tuple[list[int], list[float] | None]]:
    return [(result.token_ids, result.logprobs) for result in results]


# A CPU without bfloat16 products takes minutes, too.
SLOW_BF16 = () if has_products(torch.bfloat16) else (pytest.mark.slow,)


@pytest.mark.parametrize(
    ("dtype", "threads"),
    [
        pytest.param("bfloat16", 1, marks=[*SLOW_BF16]),
        ("float32", 1),
        # Beside other work two threads take minutes.
        pytest.param("bfloat16", 2, marks=pytest.mark.slow),
        pytest.param("float32", 2, marks=pytest.mark.slow),
    ],
)
def test_cold_dram_and_ssd_say_the_same(
    smollm2_dir: Path,
    smollm2_probes: Path,
    tmp_path: Path,
    dtype: str,
    threads: int,
) -> None:
    if threads == 1:
        (tmp_path / "probes").symlink_to(smollm2_probes)
    config = EngineConfig(
        model=str(smollm2_dir),
        dtype=dtype,
        threads=threads,
        cache_dir=tmp_path,
        chunk_tokens=CHUNK,
        dram_bytes="200MiB",
        ssd_bytes="200MiB",
        exact=True,
        resident_rows=0,
    )
    with Engine(config) as engine:
        cold, dram = answers(engine), answers(engine)
        lengths = [result.usage.prompt_tokens for result in cold]
        assert min(lengths) > 300
        # The second prompt begins as the first does.
        assert cold[0].usage.cached_tokens == 0
        assert cold[1].usage.cached_tokens >= 4 * CHUNK
        whole = [length // CHUNK * CHUNK for length in lengths]
        assert [r.usage.cached_by_tier for r in dram] == [{"dram": n} for n in whole]
    with Engine(config) as engine:
        ssd = answers(engine)
        assert ssd[0].usage.cached_by_tier == {"ssd": whole[0]}
        assert ssd[1].usage.cached_tokens == whole[1]
        assert ssd[1].usage.cached_by_tier["ssd"] > 0
        assert engine.stats().exact
    alone = config.model_copy(update={"namespace": "alone"})
    with Engine(alone) as engine:
        # In the other order, the second prompt runs cold.
        reference = [engine.generate(prompts()[1], PARAMS)]
        assert reference[0].usage.cached_tokens == 0
    assert bits(cold) == bits(dram) == bits(ssd)
    assert bits(reference) == bits(cold[1:])
