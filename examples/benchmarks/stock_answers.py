"""Answers of stock transformers, for comparison: sdpa attention, a ``DynamicCache``.

Its functions run in a child process: see ``plain``.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache

from examples.benchmarks.answer_scores import LogProbs
from pcr_core.model._compat import cache_argument


@dataclass(frozen=True)
class Prompt:
    """Token ids of a prompt and of its reference answer."""

    ids: tuple[int, ...]
    gold: tuple[int, ...]


Said = tuple[tuple[int, ...], LogProbs]
"""Greedy tokens, and log-probabilities before each token of the reference answer."""


def stock_answers(
    path: str, dtype: str, threads: int, prompts: Sequence[Prompt], limit: int
) -> list[Said]:
    """Answer every prompt in a process of its own, at most ``limit`` tokens each."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_answers, path, dtype, threads, prompts, limit).result()


def _answers(
    path: str, dtype: str, threads: int, prompts: Sequence[Prompt], limit: int
) -> list[Said]:
    torch.set_num_threads(threads)
    transformers.utils.logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    model.eval()
    return [_answer(model, prompt, limit) for prompt in prompts]


@torch.inference_mode()
def _answer(model: Any, prompt: Prompt, limit: int) -> Said:
    """One prefill; the reference answer in one forward behind it; then greedy."""
    cache = DynamicCache(config=model.config)
    name = cache_argument(model)

    def forward(ids: Sequence[int]) -> torch.Tensor:
        logits = model(input_ids=torch.tensor([ids]), use_cache=True, **{name: cache})
        last: torch.Tensor = logits.logits[0].double()
        return last

    first = forward(prompt.ids)[-1:]
    behind = forward(prompt.gold)
    gold = torch.cat([first, behind[:-1]]).log_softmax(-1).numpy()
    cache.crop(-len(prompt.gold))
    ends = model.generation_config.eos_token_id
    ends = set(ends) if isinstance(ends, list) else {ends}
    tokens = [int(first.argmax())]
    while len(tokens) < limit and tokens[-1] not in ends:
        tokens.append(int(forward(tokens[-1:]).argmax()))
    return tuple(tokens), gold
