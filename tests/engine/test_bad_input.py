"""Wrong input fails early, with a typed error that says what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pcr_core import (
    ConfigError,
    Engine,
    EngineConfig,
    PcrError,
    PromptTooLongError,
    RequestError,
    SamplingParams,
    StoreError,
    service,
)

ONE = SamplingParams(max_tokens=1)


# --- prompts ---


def test_a_prompt_that_is_too_long_names_both_numbers(engine: Engine) -> None:
    before = engine.stats()
    with pytest.raises(PromptTooLongError, match=r"2048 tokens.*2048") as caught:
        engine.submit([1] * 2048)
    assert (caught.value.prompt_tokens, caught.value.context_window) == (2048, 2048)
    assert "fewer" in str(caught.value)
    after = engine.stats()
    assert after.cache.requests == before.cache.requests, "it was computed"
    assert after.failed == before.failed


def test_a_prompt_that_just_fits_gives_one_token(engine: Engine) -> None:
    result = engine.generate([1] * 2047, SamplingParams(max_tokens=50))
    assert len(result.token_ids) == 1
    assert result.finish_reason == "length"
    assert result.usage.prompt_tokens == 2047


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ([], "empty"),
        (None, "NoneType"),
        (7, "int"),
        (b"bytes", "bytes"),
        ({"role": "user"}, "dict"),
        ([1, 2.5], "float"),
        ([1, "two"], "str"),
        ([1, True], "bool"),
        ([1, -1], "-1"),
        ([1, 10**6], "1000000"),
        ([1, None], "NoneType"),
        ([{"content": "no role"}], "role"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "images"),
    ],
)
def test_wrong_prompts(engine: Engine, prompt: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        engine.submit(prompt)


@pytest.mark.parametrize("params", [{"max_tokens": 3}, "greedy", 5])
def test_params_of_another_type(engine: Engine, params: Any) -> None:
    with pytest.raises(RequestError, match="SamplingParams"):
        engine.submit("hello", params)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"max_token": 3}, r"max_token.*known are.*max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"max_tokens": 4, "min_tokens": 5}, "min_tokens is 5"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"stop": ""}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"logit_bias": {-1: 5.0}}, "logit_bias"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias"),
        ({"seed": "soon"}, "seed"),
        ({"max_tokens": True}, r"max_tokens.*not True"),
        ({"temperature": False}, r"temperature.*not False"),
        ({"temperature": float("inf")}, "temperature"),
        ({"seed": True}, "seed"),
        ({"stop_token_ids": True}, "stop_token_ids"),
        ({"stop_token_ids": [5, True]}, "stop_token_ids"),
        ({"logit_bias": {True: 1.0}}, "logit_bias"),
        ({"logit_bias": {1: True}}, "logit_bias"),
    ],
)
def test_wrong_sampling_parameters(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        SamplingParams(**fields)


def test_a_bias_outside_the_vocabulary_is_refused_before_compute(
    engine: Engine,
) -> None:
    before = engine.stats().failed
    with pytest.raises(RequestError, match=r"logit_bias.*100000"):
        engine.submit("hello", SamplingParams(logit_bias={100000: 1.0}))
    assert engine.stats().failed == before


# --- settings ---


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"dram_byte": 1}, r"dram_byte:.*no such setting; did you mean dram_bytes\?"),
        ({"colour": 1}, r"colour:.*no such setting; known are: model, cache_dir"),
        ({"dram_bytes": -1}, r"dram_bytes.*negative"),
        ({"ssd_bytes": -1}, r"ssd_bytes.*negative"),
        ({"dram_bytes": "lots"}, r"dram_bytes.*2GiB"),
        ({"dram_bytes": True}, "dram_bytes"),
        ({"dram_bytes": 1.5}, "dram_bytes"),
        ({"chunk_tokens": 17}, "chunk_tokens"),
        ({"chunk_tokens": 0}, "chunk_tokens"),
        ({"device": "tpu"}, "device"),
        ({"dtype": "int8"}, "dtype"),
        ({"threads": 0}, "threads"),
        ({"max_queue": 0}, "max_queue"),
        ({"threads": True}, r"threads.*not True"),
        ({"max_queue": True}, r"max_queue.*not True"),
        ({"chunk_tokens": True}, r"chunk_tokens.*not True"),
        ({"dram_bytes": 0}, r"dram_bytes.*'auto'"),
        ({"dram_bytes": "Auto"}, r"dram_bytes.*2GiB"),
        ({"eviction": "random"}, r"eviction.*'lookahead-lru'.*'adaptive'"),
        ({"lookahead_window": -1}, r"lookahead_window.*0 to 1024"),
        ({"lookahead_window": 1025}, r"lookahead_window.*0 to 1024"),
        ({"lookahead_window": True}, r"lookahead_window.*not True"),
        ({"lookahead_window": 2.0}, r"lookahead_window.*'auto'"),
        ({"lookahead_window": "all"}, r"lookahead_window.*'auto'"),
        ({"prefetch": "on"}, r"prefetch.*'best_effort'.*'off'"),
        ({"prefetch": True}, r"prefetch.*'best_effort'.*'off'"),
        ({"prefetch_timeout": 0}, r"prefetch_timeout.*greater than 0"),
        ({"prefetch_timeout": float("inf")}, r"prefetch_timeout.*finite"),
        ({"prefetch_timeout": True}, r"prefetch_timeout.*not True"),
        ({"write_policy": "never"}, r"write_policy.*'write_through'.*'on_evict'"),
        ({"namespace": "\ud800"}, "namespace"),
        ({"namespace": 5}, r"namespace.*string"),
        ({"namespace_bytes": 0}, r"namespace_bytes.*greater than 0"),
        ({"namespace_bytes": -1}, r"namespace_bytes.*negative"),
        ({"namespace_bytes": "much"}, r"namespace_bytes.*2GiB"),
        ({"trace": 5}, r"trace.*path"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        EngineConfig(**settings)


@pytest.mark.parametrize(
    ("size", "expected"),
    [("2GiB", 2 << 30), ("500MB", 500_000_000), ("1k", 1000), ("7", 7), (0, 0)],
)
def test_sizes(size: Any, expected: int) -> None:
    assert EngineConfig(ssd_bytes=size).ssd_bytes == expected


def test_configurations_compare_and_hash() -> None:
    a, b = EngineConfig(dram_bytes="1KiB"), EngineConfig(dram_bytes=1024)
    assert a == b
    assert hash(a) == hash(b)
    with pytest.raises(Exception, match="frozen"):
        a.dram_bytes = 5
    auto = EngineConfig()
    assert (auto.dram_bytes, auto.lookahead_window) == ("auto", "auto")
    assert auto == EngineConfig(dram_bytes="auto", lookahead_window="auto")
    assert hash(auto) == hash(EngineConfig())
    for other in (
        {"dram_bytes": "1GiB"},
        {"lookahead_window": 0},
        {"prefetch": "off"},
        {"prefetch_timeout": 2.0},
        {"write_policy": "on_evict"},
        {"eviction": "lru"},
        {"namespace_bytes": "1GiB"},
        {"trace": "trace.jsonl"},
    ):
        assert EngineConfig(**other) != auto
        assert EngineConfig(**other) == EngineConfig(**other)
        assert hash(EngineConfig(**other)) == hash(EngineConfig(**other))


@pytest.mark.parametrize(
    ("left", "budget"),
    [(0, 64 << 20), (1 << 30, 1 << 28), (8 << 30, 2 << 30), (1 << 40, 4 << 30)],
)
def test_the_dram_budget_follows_what_is_left(
    monkeypatch: pytest.MonkeyPatch, left: int, budget: int
) -> None:
    monkeypatch.setattr(service, "available_bytes", lambda: left)
    assert service.dram_budget(EngineConfig()) == budget
    assert service.dram_budget(EngineConfig(dram_bytes=5)) == 5


def test_a_budget_beyond_what_is_left_is_taken_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(service, "available_bytes", lambda: 1000)
    assert service.dram_budget(EngineConfig(dram_bytes=1000)) == 1000
    assert not caplog.records
    assert service.dram_budget(EngineConfig(dram_bytes=1001)) == 1001
    assert "only 1000 bytes more" in caplog.text


def test_an_engine_in_a_small_container(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "available_bytes", lambda: 100 << 20)
    stats = make_engine(dram_bytes="auto").stats().cache
    assert 60 << 20 < stats.dram_budget <= 64 << 20


@pytest.mark.parametrize("name", ["dram_bytes", "ssd_bytes", "namespace_bytes"])
def test_a_budget_below_one_chunk(make_engine: Any, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name} is 100 bytes.*at least \d+"):
        make_engine(**{name: 100})


def test_a_cache_folder_that_is_a_file(make_engine: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("hello")
    with pytest.raises(ConfigError, match="cache_dir"):
        make_engine(cache_dir=tmp_path / "file")
    assert (tmp_path / "file").read_text() == "hello"


def test_a_cache_folder_that_cannot_be_made(make_engine: Any) -> None:
    with pytest.raises(ConfigError, match=r"cache_dir.*ssd_bytes=0"):
        make_engine(cache_dir=Path("/proc/nowhere"))
    engine = make_engine(cache_dir=Path("/proc/nowhere"), ssd_bytes=0)
    assert len(engine.generate("hello", ONE).token_ids) == 1


def test_a_folder_of_another_format_is_left_untouched(
    make_engine: Any, tmp_path: Path
) -> None:
    make_engine().close()
    format_file = tmp_path / "kv" / "format.json"
    format_file.write_text(json.dumps({"format": 99}))
    before = _tree(tmp_path / "kv")
    with pytest.raises(StoreError, match=r"format 99.*nothing was changed"):
        make_engine()
    assert _tree(tmp_path / "kv") == before


def _tree(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_models_that_are_not_there(tmp_path: Path) -> None:
    for name, says in (
        (str(tmp_path / "nothing"), "no folder"),
        (str(tmp_path / "nothing.gguf"), "no file"),
    ):
        with pytest.raises(ConfigError, match=says):
            Engine(EngineConfig(model=name, cache_dir=tmp_path))


def test_a_model_without_its_tokenizer(tiny_llama: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tokenizer"):
        Engine(EngineConfig(cache_dir=tmp_path), model=tiny_llama)


def test_a_failed_start_leaves_the_model_as_it_was(
    make_engine: Any, tiny_llama: Any
) -> None:
    before = {name: id(module) for name, module in tiny_llama.named_modules()}
    with pytest.raises(ConfigError):
        make_engine(model=tiny_llama, dram_bytes=100)
    assert tiny_llama.config._attn_implementation == "sdpa"
    assert "forward" not in vars(tiny_llama.model.layers[0].mlp.up_proj)
    assert before == {name: id(module) for name, module in tiny_llama.named_modules()}
    engine = make_engine(model=tiny_llama)
    assert engine.generate("hello", ONE).token_ids


# --- one bad request among good ones ---


def test_a_bad_prompt_in_a_list_is_found_before_any_runs(engine: Engine) -> None:
    before = engine.stats()
    with pytest.raises(RequestError):
        engine.generate(["good", [1, 10**6], "good"], ONE)
    after = engine.stats()
    assert after.cancelled == before.cancelled
    assert after.finished == before.finished


def test_every_error_is_ours() -> None:
    for error in (ConfigError, RequestError, StoreError, PromptTooLongError):
        assert issubclass(error, PcrError)
    assert issubclass(ConfigError, ValueError)
    # LlamaIndex' query engines make "Empty Response" of a model's ValueError.
    assert not issubclass(RequestError, ValueError)
