"""Every processor and truncation against transformers' own."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pcr_core.model.draw import Warp, candidates, draw
from pcr_core.model.sampling import Sampler, processors
from pcr_core.sampling_params import SamplingParams

VOCABULARY = 3000  # more than are sorted at first


def logits_of(
    seed: int, *, size: int = VOCABULARY, spread: float = 3.0
) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(1, size, generator=random) * spread


def theirs(warp: Warp) -> LogitsProcessorList:
    """As ``generate`` puts them together."""
    chain = LogitsProcessorList([TemperatureLogitsWarper(warp.temperature)])
    if warp.top_k:
        chain.append(TopKLogitsWarper(warp.top_k))
    if warp.top_p < 1.0:
        chain.append(TopPLogitsWarper(warp.top_p))
    if warp.min_p:
        chain.append(MinPLogitsWarper(warp.min_p))
    return chain


warps = st.builds(
    Warp,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 2.0, 5.0]),
    top_p=st.sampled_from([0.01, 0.3, 0.5, 0.9, 0.99, 1.0]),
    top_k=st.sampled_from([0, 1, 2, 50, 1500, 5000]),
    min_p=st.sampled_from([0.0, 0.01, 0.05, 0.2, 1.0]),
)


@settings(max_examples=150)
@given(warp=warps, seed=st.integers(0, 10_000), spread=st.sampled_from([0.1, 1.0, 4.0]))
def test_chances_are_those_of_transformers(
    warp: Warp, seed: int, spread: float
) -> None:
    logits = logits_of(seed, spread=spread)
    expected = theirs(warp)(None, logits)[0].softmax(-1)
    ids, chances = candidates(logits[0].numpy(), warp)
    assert ids.tolist() == sorted(ids.tolist())
    got = torch.zeros(VOCABULARY, dtype=torch.float64)
    got[torch.from_numpy(ids)] = torch.from_numpy(chances)
    differs = (got > 0) != (expected > 0)
    # Which of two tokens at the very border is the last one, rounding decides.
    assert int(differs.sum()) <= 1
    assert torch.allclose(got, expected.double(), atol=1e-5 + float(got[differs].sum()))


def test_a_flat_distribution_needs_more_than_the_likeliest() -> None:
    flat = torch.linspace(0.0, 1e-3, VOCABULARY)
    ids, _ = candidates(flat.numpy(), Warp(1.0, 0.9, 0, 0.0))
    assert len(ids) == pytest.approx(0.9 * VOCABULARY, rel=1e-2)


def test_impossible_tokens_are_never_drawn() -> None:
    scores = torch.full((50,), -math.inf)
    scores[[7, 30]] = torch.tensor([1.0, 1.0])
    for warp in (
        Warp(1.0, 1.0, 0, 0.0),
        Warp(1.0, 1.0, 10, 0.0),
        Warp(1.0, 0.9, 0, 0.0),
        Warp(1.0, 0.5, 40, 0.01),
    ):
        drawn = {
            draw(scores.numpy(), warp, torch.Generator().manual_seed(seed))
            for seed in range(40)
        }
        assert drawn == {7, 30} or (warp.top_p == 0.5 and len(drawn) == 1)


def test_rounding_of_logits_moves_no_draw_far() -> None:
    """In a batch the same logits may differ in their last bits."""
    logits = logits_of(3)[0]
    logits[1::2] = logits[::2]  # pairs of equal scores, which a sort may swap
    nudged = logits + 1e-6 * torch.sign(logits_of(4)[0])
    warp = Warp(0.8, 0.95, 200, 0.0)
    for seed in range(100):
        first = draw(logits.numpy(), warp, torch.Generator().manual_seed(seed))
        other = draw(nudged.numpy(), warp, torch.Generator().manual_seed(seed))
        assert first == other


@settings(max_examples=60)
@given(
    prompt=st.lists(st.integers(0, 39), min_size=1, max_size=30),
    seed=st.integers(0, 1000),
    penalty=st.sampled_from([0.7, 1.0, 1.3, 5.0]),
    minimum=st.integers(0, 4),
    bias=st.dictionaries(st.integers(0, 39), st.sampled_from([-3.0, 2.0]), max_size=4),
)
def test_greedy_choices_are_those_of_transformers(
    prompt: list[int], seed: int, penalty: float, minimum: int, bias: dict[int, float]
) -> None:
    ends = [3, 8]
    chain = LogitsProcessorList()
    if bias:
        chain.append(SequenceBiasLogitsProcessor([[[k], v] for k, v in bias.items()]))
    chain.append(RepetitionPenaltyLogitsProcessor(penalty))
    if minimum:
        chain.append(MinNewTokensLengthLogitsProcessor(len(prompt), minimum, ends))
    params = SamplingParams(
        repetition_penalty=penalty, min_tokens=minimum, logit_bias=bias
    )
    sampler, history = Sampler(params, prompt, ends), list(prompt)
    for step in range(6):
        logits = logits_of(seed * 10 + step, size=40)
        expected = int(chain(torch.LongTensor([history]), logits).argmax())
        assert sampler.choose(logits) == expected
        history.append(expected)


def test_what_a_model_generates_greedily_is_what_transformers_generates(
    tiny_llama: Any,
) -> None:
    prompt = [256, 5, 9, 9, 30]
    settings_ = {"repetition_penalty": 1.4, "min_new_tokens": 6}
    config = GenerationConfig(
        **settings_, max_new_tokens=12, eos_token_id=258, pad_token_id=258
    )
    expected = tiny_llama.generate(torch.tensor([prompt]), config)[0, len(prompt) :]
    params = SamplingParams(repetition_penalty=1.4, min_tokens=6)
    sampler, tokens = Sampler(params, prompt, [258]), list(prompt)
    for _ in range(len(expected)):
        with torch.inference_mode():
            logits = tiny_llama(torch.tensor([tokens])).logits[:, -1]
        tokens.append(sampler.choose(logits))
    assert tokens[len(prompt) :] == expected.tolist()


def test_the_prompt_is_looked_at_once() -> None:
    """A step must not cost more behind a longer prompt."""

    class Counted(list):
        reads = 0

        def __iter__(self) -> Any:
            Counted.reads += 1
            return super().__iter__()

    params = SamplingParams(
        repetition_penalty=1.2, presence_penalty=0.5, min_tokens=3, top_p=0.9, seed=1
    )
    sampler = Sampler(params, Counted(range(40)), [3])
    before = Counted.reads
    for _ in range(5):
        sampler.choose(logits_of(1, size=40))
    assert Counted.reads == before


def test_only_what_is_asked_for_runs() -> None:
    assert processors(SamplingParams(), [1, 2], (1,)) == []
    assert processors(SamplingParams(temperature=1.0, top_k=4), [1], (1,)) == []
    assert len(processors(SamplingParams(min_tokens=1), [1], (1,))) == 1
    assert processors(SamplingParams(min_tokens=1), [1], ()) == []
