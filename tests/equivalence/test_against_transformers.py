"""The answers are those of plain transformers: stock attention, stock cache, greedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pcr_core import Engine, EngineConfig, SamplingParams

KINDS = ["llama", "mistral_sliding", "gemma3", "qwen2"]
PROMPTS = [
    [7],
    [token % 250 for token in range(31)],
    [(token * 37) % 250 for token in range(150)],
    [(token * token) % 250 for token in range(700)],
]
STEPS = 8


def stock(model: Any, prompt: list[int]) -> tuple[list[int], list[float]]:
    """transformers' own ``generate``: tokens, and the log-probability of each."""
    out = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=STEPS,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    tokens = out.sequences[0, len(prompt) :].tolist()
    rows = torch.cat(out.logits).float().log_softmax(-1)
    return tokens, rows.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_answers_in_fp32(
    make_tiny_model: Any, tiny_tokenizer: Any, tmp_path: Path, kind: str
) -> None:
    model = make_tiny_model(kind)
    expected = [stock(model, prompt) for prompt in PROMPTS]
    config = EngineConfig(
        cache_dir=tmp_path, chunk_tokens=32, dram_bytes="4MiB", ssd_bytes="4MiB"
    )
    params = SamplingParams(max_tokens=STEPS, logprobs=True)
    with Engine(config, model=model, tokenizer=tiny_tokenizer) as engine:
        cold = engine.generate(PROMPTS, params)
        warm = engine.generate(PROMPTS, params)
    for (tokens, logprobs), *answers in zip(expected, cold, warm, strict=True):
        for answer in answers:
            assert answer.token_ids == tokens
            assert answer.logprobs == pytest.approx(logprobs, abs=2e-3)
    assert warm[-1].usage.cached_tokens == 672
    # A wrong mask or position would show: the context decides what is said.
    assert len({tuple(tokens) for tokens, _ in expected}) == len(PROMPTS)


@pytest.mark.parametrize("kind", ["llama", "mistral_sliding"])
def test_the_same_engine_without_exactness_is_close(
    make_tiny_model: Any, tiny_tokenizer: Any, tmp_path: Path, kind: str
) -> None:
    """``exact=False`` may round otherwise, but not compute anything else."""
    model = make_tiny_model(kind)
    expected = [stock(model, prompt) for prompt in PROMPTS]
    config = EngineConfig(
        cache_dir=tmp_path, chunk_tokens=32, dram_bytes="4MiB", exact=False
    )
    params = SamplingParams(max_tokens=STEPS, logprobs=True)
    with Engine(config, model=model, tokenizer=tiny_tokenizer) as engine:
        assert engine.stats().prefill_cuts == "free"
        assert not engine.stats().exact
        answers = [engine.generate(PROMPTS, params) for _ in range(2)][1]
    for (tokens, logprobs), answer in zip(expected, answers, strict=True):
        assert answer.token_ids == tokens
        assert answer.logprobs == pytest.approx(logprobs, abs=2e-3)
