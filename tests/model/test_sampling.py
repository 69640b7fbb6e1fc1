"""Choosing tokens: every parameter does something, seeds repeat, logprobs are true."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from pcr_core.errors import ModelError, RequestError
from pcr_core.model.sampling import Sampler, end_token_ids, processors
from pcr_core.sampling_params import SamplingParams

LOGITS = torch.tensor([[2.0, 1.9, 1.0, 0.0, -3.0, 1.8]])
PROMPT = [0, 4]


def sampler(prompt: list[int] = PROMPT, end: tuple[int, ...] = (), **fields: Any):
    return Sampler(SamplingParams(**fields), prompt, end)


def many(logits: torch.Tensor = LOGITS, count: int = 400, **fields: Any) -> Counter:
    """How often each token is drawn first."""
    return Counter(
        sampler(
            temperature=fields.get("temperature", 1.0), seed=seed, **_rest(fields)
        ).choose(logits)
        for seed in range(count)
    )


def _rest(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name != "temperature"}


def test_greedy_takes_the_largest() -> None:
    assert sampler().choose(LOGITS) == 0
    assert sampler().choose(LOGITS.bfloat16()) == 0


def test_temperature_spreads() -> None:
    cold, warm = many(temperature=0.05), many(temperature=3.0)
    assert set(cold) <= {0, 1, 5}
    assert set(warm) == set(range(6))
    assert cold[0] > warm[0]


def test_truncations() -> None:
    assert set(many(top_k=2)) == {0, 1}
    assert set(many(top_k=1)) == {0}
    assert set(many(top_k=999)) == set(many())
    assert set(many(top_p=0.5)) == {0, 1}
    assert set(many(min_p=0.5)) == {0, 1, 5}
    assert set(many(min_p=1.0)) == {0}


def test_draws_follow_the_distribution() -> None:
    drawn = many(count=3000)
    for token, chance in enumerate(LOGITS.softmax(-1)[0].tolist()):
        assert drawn[token] / 3000 == pytest.approx(chance, abs=0.04)


def test_repetition_penalty_covers_prompt_and_output() -> None:
    one = sampler(repetition_penalty=1.2)
    assert [one.choose(LOGITS) for _ in range(3)] == [1, 5, 0]
    assert sampler(prompt=[3], repetition_penalty=1.2).choose(LOGITS) == 0


def test_presence_and_frequency_penalty_cover_the_output_only() -> None:
    for name in ("presence_penalty", "frequency_penalty"):
        one = sampler(**{name: 0.5})
        assert [one.choose(LOGITS) for _ in range(3)] == [0, 1, 5], name
    # Once, and once per occurrence: 2.0 - 0.5 stays above 1.0, 2.0 - 3 * 0.5 does not.
    logits = torch.tensor([[2.0, 0.7]])
    assert [sampler(presence_penalty=0.5).choose(logits) for _ in range(1)] == [0]
    present, frequent = sampler(presence_penalty=0.5), sampler(frequency_penalty=0.5)
    assert [present.choose(logits) for _ in range(5)] == [0] * 5
    assert [frequent.choose(logits) for _ in range(5)] == [0, 0, 0, 1, 0]


def test_bias() -> None:
    assert sampler(logit_bias={4: 100.0}).choose(LOGITS) == 4
    assert sampler(logit_bias={0: -100.0, 1: -100.0}).choose(LOGITS) == 5
    assert LOGITS[0, 0] == 2.0, "the model's logits were changed"


def test_min_tokens_forbids_every_end() -> None:
    one = sampler(end=(0, 1), min_tokens=2)
    assert [one.choose(LOGITS) for _ in range(4)] == [5, 5, 0, 0]


def test_processors_are_only_those_asked_for() -> None:
    assert len(processors(SamplingParams(), 2, (1,))) == 0
    assert len(processors(SamplingParams(temperature=1.0), 2, ())) == 1


def test_seeds_repeat() -> None:
    def draw(seed: int | None) -> list[int]:
        one = sampler(temperature=1.0, seed=seed)
        return [one.choose(LOGITS) for _ in range(20)]

    assert draw(7) == draw(7)
    assert draw(7) != draw(8)
    assert len({tuple(draw(None)) for _ in range(5)}) == 5
    before = torch.random.get_rng_state()
    draw(7)
    assert torch.equal(before, torch.random.get_rng_state()), "global state was used"


@given(st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=8), st.booleans())
def test_logprobs_are_of_the_unmodified_distribution(values, greedy) -> None:
    logits = torch.tensor([values])
    fields: dict[str, Any] = {} if greedy else {"temperature": 2.0, "seed": 1}
    one = sampler(
        prompt=[0], logprobs=True, logit_bias={1: 5.0}, presence_penalty=1.0, **fields
    )
    chosen = [one.choose(logits) for _ in range(3)]
    expected = logits.double().log_softmax(-1)[0, chosen].tolist()
    assert one.logprobs == pytest.approx(expected, abs=1e-4)
    assert sampler().logprobs is None


def test_nan_is_an_error_that_helps() -> None:
    for logits in (LOGITS * float("nan"), torch.tensor([[1.0, float("nan")]])):
        with pytest.raises(ModelError, match="float32"):
            sampler().choose(logits)


@pytest.mark.parametrize("temperature", [1e-6, 1e-20, 1e-40, 1e30])
def test_extreme_temperatures_still_choose(temperature: float) -> None:
    assert sampler(temperature=temperature, seed=1).choose(LOGITS * 20) in range(6)


def test_infinite_logits_of_a_model_are_chosen_from() -> None:
    masked = LOGITS.clone()
    masked[0, :4] = float("-inf")
    assert set(many(masked)) == {4, 5}
    assert sampler().choose(masked) == 5


def _model(end: Any) -> Any:
    return SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=end))


def test_end_tokens() -> None:
    tokenizer = SimpleNamespace(eos_token_id=9)
    assert end_token_ids(_model(3), tokenizer) == (3,)
    assert end_token_ids(_model([3, 4]), tokenizer) == (3, 4)
    assert end_token_ids(_model(None), tokenizer) == (9,)
    assert end_token_ids(_model(None), SimpleNamespace(eos_token_id=None)) == ()


# --- the parameters themselves ---


def test_parameters_are_frozen_and_comparable() -> None:
    params = SamplingParams(stop="a", stop_token_ids=3)
    assert (params.stop, params.stop_token_ids) == (("a",), (3,))
    assert params == SamplingParams(stop=["a"], stop_token_ids=[3])
    assert SamplingParams(stop=None).stop == ()
    with pytest.raises(Exception, match="frozen"):
        params.max_tokens = 3


def test_several_problems_are_named_at_once() -> None:
    with pytest.raises(RequestError, match=r"top_p.*top_k"):
        SamplingParams(top_p=3, top_k=-2)
