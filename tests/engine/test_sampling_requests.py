"""Sampling as a caller of the engine sees it: defaults, constraints, isolation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from pcr_core import Engine, EngineConfig, ModelError, RequestError, SamplingParams

PROMPT = "Say something."


def config(folder: Path, **fields: Any) -> EngineConfig:
    return EngineConfig(
        cache_dir=folder, chunk_tokens=16, dram_bytes="8MiB", ssd_bytes=0, **fields
    )


@pytest.fixture(scope="module")
def engine(
    make_tiny_model: Callable[..., Any],
    tiny_tokenizer: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Engine]:
    model = make_tiny_model("llama")
    folder = tmp_path_factory.mktemp("cache")
    with Engine(config(folder), model=model, tokenizer=tiny_tokenizer) as engine:
        yield engine


# --- the model's generation config ---


def test_a_model_that_samples_by_default_does_so(
    tiny_llama: Any, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    tiny_llama.generation_config = GenerationConfig(
        do_sample=True,
        temperature=5.0,
        top_k=40,
        repetition_penalty=1.2,
        eos_token_id=7,
    )
    with Engine(config(tmp_path), model=tiny_llama, tokenizer=tiny_tokenizer) as engine:
        used = engine.resolve()
        assert (used.temperature, used.top_k, used.top_p) == (5.0, 40, 1.0)
        assert (used.min_p, used.repetition_penalty) == (0.0, 1.2)
        assert len({engine.generate(PROMPT).text for _ in range(4)}) > 1
        greedy = SamplingParams(temperature=0.0)
        assert engine.resolve(greedy).temperature == 0.0
        assert len({engine.generate(PROMPT, greedy).text for _ in range(3)}) == 1


def test_greedy_where_the_model_says_nothing(engine: Engine) -> None:
    used = engine.resolve(SamplingParams(top_p=0.5))
    assert (used.temperature, used.top_p, used.top_k) == (0.0, 0.5, 0)
    assert len({engine.generate(PROMPT).text for _ in range(3)}) == 1


# --- one request's trouble ---


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stop_token_ids": [264]}, "stop_token_ids names token 264"),
        ({"logit_bias": {999: 1.0}}, "logit_bias names token 999"),
        ({"json_schema": {"type": "nope"}}, "json_schema cannot be compiled"),
        ({"regex": "("}, "regex cannot be compiled"),
    ],
)
def test_refused_before_anything_is_computed(
    engine: Engine, fields: dict[str, Any], message: str
) -> None:
    before = engine.stats()
    with pytest.raises(RequestError, match=message):
        engine.submit(PROMPT, SamplingParams(**fields))
    after = engine.stats()
    assert (after.finished, after.failed) == (before.finished, before.failed)


def test_nan_logits_fail_one_request_only(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever else the step was for."""
    from pcr_core.model.sampling import Sampler

    true = Sampler.choose

    def choose(self: Sampler, logits: torch.Tensor) -> int:
        poisoned = self.logprobs is not None and len(self.logprobs) == 2
        return true(self, logits * float("nan") if poisoned else logits)

    expected = engine.generate(PROMPT, SamplingParams(max_tokens=8)).token_ids
    monkeypatch.setattr(Sampler, "choose", choose)
    good = [engine.submit(PROMPT, SamplingParams(max_tokens=8)) for _ in range(2)]
    bad = engine.submit(PROMPT, SamplingParams(max_tokens=8, logprobs=True))
    good.append(engine.submit(PROMPT, SamplingParams(max_tokens=8)))
    with pytest.raises(ModelError, match="NaN"):
        bad.result(60)
    assert [one.result(60).token_ids for one in good] == [expected] * 3


def test_a_constraint_that_fails_midway_fails_one_request_only(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llguidance")
    from pcr_core.model.constraints import Matcher

    true = Matcher.accept

    def accept(self: Matcher, token: int) -> None:
        true(self, token)
        raise ModelError("the constraint cannot be followed any further")

    monkeypatch.setattr(Matcher, "accept", accept)
    good = engine.submit(PROMPT, SamplingParams(max_tokens=4))
    bad = engine.submit(PROMPT, SamplingParams(regex="[a-z]+"))
    also = engine.submit(PROMPT, SamplingParams(max_tokens=4))
    with pytest.raises(ModelError, match="any further"):
        bad.result(60)
    assert good.result(60).token_ids == also.result(60).token_ids


# --- constraints ---


def test_constrained_texts(engine: Engine) -> None:
    pytest.importorskip("llguidance")
    assert engine.supports_constraints
    result = engine.generate(PROMPT, SamplingParams(choices=["red", "blue"]))
    assert result.text in ("red", "blue")
    assert result.finish_reason == "stop"
    number = engine.generate(PROMPT, SamplingParams(regex="[1-9][0-9]{3}"))
    assert 1000 <= int(number.text) <= 9999
    assert number.usage.completion_tokens == 4, "the end costs no step of its own"


def test_max_tokens_may_cut_a_constrained_text(engine: Engine) -> None:
    pytest.importorskip("llguidance")
    params = SamplingParams(regex="[a-z]{50}", max_tokens=5)
    result = engine.generate(PROMPT, params)
    assert (len(result.text), result.finish_reason) == (5, "length")


def test_a_stop_string_may_end_a_constrained_text(engine: Engine) -> None:
    pytest.importorskip("llguidance")
    params = SamplingParams(choices=["a-b"], stop=["-"])
    result = engine.generate(PROMPT, params)
    assert (result.text, result.finish_reason) == ("a", "stop")


def test_a_stream_of_a_constrained_text_is_the_text(engine: Engine) -> None:
    pytest.importorskip("llguidance")
    completion = engine.submit(PROMPT, SamplingParams(choices=["one two three"]))
    assert "".join(completion.stream()) == "one two three"


def test_alternatives(engine: Engine) -> None:
    result = engine.generate(PROMPT, SamplingParams(max_tokens=3, top_logprobs=2))
    assert result.logprobs is not None
    assert result.top_logprobs is not None
    for token, chance, top in zip(
        result.token_ids, result.logprobs, result.top_logprobs, strict=True
    ):
        assert next(iter(top)) == token
        assert top[token] == pytest.approx(chance, abs=1e-5)
        assert len(top) == 2
    assert engine.generate(PROMPT, SamplingParams(max_tokens=1)).top_logprobs is None
