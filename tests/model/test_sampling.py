"""Choosing tokens: every parameter does something, seeds repeat, logprobs are true."""

from __future__ import annotations

import json
from collections import Counter
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from pydantic import BaseModel
from transformers import GenerationConfig

from pcr_core.errors import ModelError, RequestError
from pcr_core.model.generation_defaults import sampling_defaults
from pcr_core.model.sampling import Sampler, end_token_ids
from pcr_core.sampling_params import SamplingDefaults, SamplingParams

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


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0}, {"logit_bias": {1: 1}}])
def test_nan_and_overflow_are_errors_that_help(fields: dict[str, Any]) -> None:
    nan, inf = float("nan"), float("inf")
    for values in ([nan, nan], [1.0, nan], [nan, 1.0], [inf, 1.0], [inf, nan]):
        with pytest.raises(ModelError, match="float32"):
            sampler(prompt=[0], **fields).choose(torch.tensor([values]))
    with pytest.raises(ModelError, match="no token is possible"):
        sampler(prompt=[0], **fields).choose(torch.tensor([[-inf, -inf]]))


def test_min_tokens_covers_stop_tokens_and_never_blocks() -> None:
    one = sampler(end=(0,), stop_token_ids=[1], min_tokens=2)
    assert [one.choose(LOGITS) for _ in range(3)] == [5, 5, 0]
    only_ends = torch.full((1, 6), float("-inf"))
    only_ends[0, 0] = 1.0
    assert sampler(end=(0,), min_tokens=2).choose(only_ends) == 0


def test_top_logprobs_are_the_likeliest_first() -> None:
    one = sampler(top_logprobs=3, logit_bias={4: 100.0})
    assert one.choose(LOGITS) == 4
    (top,) = one.top_logprobs
    expected = LOGITS.log_softmax(-1)[0]
    assert list(top) == [0, 1, 5]
    assert list(top.values()) == pytest.approx(expected[[0, 1, 5]].tolist(), abs=1e-5)
    assert one.logprobs == pytest.approx([float(expected[4])], abs=1e-5)
    assert len(_chosen(sampler(top_logprobs=99)).top_logprobs[0]) == 6
    assert _chosen(sampler(logprobs=True)).top_logprobs is None


def _chosen(one: Sampler) -> Sampler:
    one.choose(LOGITS)
    return one


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


# --- the model's generation config ---


def _defaults(**fields: Any) -> SamplingDefaults:
    config = GenerationConfig(**fields)
    return sampling_defaults(SimpleNamespace(generation_config=config))


def test_do_sample_decides_on_greedy() -> None:
    assert _defaults() == SamplingDefaults()
    assert sampling_defaults(SimpleNamespace()) == SamplingDefaults()
    assert _defaults(do_sample=False, temperature=None).temperature == 0.0
    assert _defaults(do_sample=True) == SamplingDefaults(temperature=1.0)
    full = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1}
    assert _defaults(do_sample=True, **full) == SamplingDefaults(**full)
    assert _defaults(repetition_penalty=1.1).repetition_penalty == 1.1


def test_what_is_given_wins_over_the_config() -> None:
    defaults = SamplingDefaults(temperature=0.6, top_p=0.9, repetition_penalty=1.1)
    params = SamplingParams(temperature=0.0, seed=3).resolved(defaults)
    assert (params.temperature, params.top_p, params.seed) == (0.0, 0.9, 3)
    assert params.repetition_penalty == 1.1
    assert SamplingParams(top_p=1.0).resolved(defaults).top_p == 1.0


def test_what_cannot_be_followed_is_said(caplog: pytest.LogCaptureFixture) -> None:
    config = GenerationConfig()
    config.no_repeat_ngram_size = 3
    config.repetition_penalty = -1.0
    model = SimpleNamespace(generation_config=config)
    assert sampling_defaults(model) == SamplingDefaults()
    assert "no_repeat_ngram_size" in caplog.text
    assert "repetition_penalty" in caplog.text


# --- the parameters themselves ---


def test_a_schema_may_be_a_class_text_or_mapping() -> None:
    class Point(BaseModel):
        x: int

    schema = Point.model_json_schema()
    assert SamplingParams(json_schema=Point).json_schema == schema
    assert SamplingParams(json_schema=json.dumps(schema)).json_schema == schema
    assert SamplingParams(json_schema=schema).constraint == ("json_schema", schema)
    assert SamplingParams(choices=["a", "b"]).constraint == ("choices", ("a", "b"))
    assert SamplingParams().constraint is None


@pytest.mark.parametrize(
    "fields",
    [
        {"json_schema": "{"},
        {"json_schema": {"enum": {1, 2}}},
        {"json_schema": [1]},
        {"json_schema": {"maximum": float("nan")}},
        {"regex": ""},
        {"choices": []},
        {"choices": [""]},
        {"regex": "a", "choices": ["a"]},
    ],
)
def test_a_bad_constraint_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(fields))):
        SamplingParams(**fields)


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
