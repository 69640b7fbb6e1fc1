"""Rates and sizes: by hand, from files, and what is refused."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcr_core.errors import ConfigError
from pcr_core.simulator.kv_size import PACKAGED, KvSize, read_kv_size
from pcr_core.simulator.rates import ATTENTION, Rates, read_rates
from pcr_core.stats import Decisions

MEASURED = Decisions("lru", {}, 4, 2e9, 512.0, 0.0)


def test_between_two_depths_time_is_interpolated():
    """1 ms a token at the top, 3 ms at 1,000, so 5 ms at 2,000."""
    rates = Rates(prefill=((1000, 1000 / 3), (0, 1000)))
    assert rates.compute_seconds(0, 1000) == pytest.approx(2.0)
    assert rates.compute_seconds(500, 500) == pytest.approx(1.25)
    assert rates.compute_seconds(1000, 1000) == pytest.approx(4.0)
    assert rates.compute_seconds(700, 0) == 0.0


def test_above_the_first_depth_its_rate_holds():
    rates = Rates(prefill=((100, 1000), (200, 1000)))
    assert rates.compute_seconds(0, 300) == pytest.approx(0.3)


def test_one_depth_is_enough():
    """Twice the first token's time at ``ATTENTION``, on the line through the point."""
    rates = Rates(prefill=((ATTENTION, 500),))
    assert rates.compute_seconds(0, int(ATTENTION)) == pytest.approx(ATTENTION * 0.0015)
    ahead = rates.compute_seconds(int(ATTENTION), int(ATTENTION))
    assert ahead == pytest.approx(ATTENTION * 0.0025)


def test_the_engines_figures():
    rates = Rates.of(MEASURED, decode_step=0.04)
    assert rates.compute_seconds(0, Decisions.RATED) == pytest.approx(2.0)
    assert (rates.ssd_read, rates.decode_step) == (2e9, 0.04)


depths = st.lists(
    st.tuples(st.integers(0, 5000), st.floats(1, 1e5)),
    min_size=1,
    max_size=5,
    unique_by=lambda point: point[0],
)


@given(depths, st.integers(0, 6000), st.integers(0, 6000), st.integers(0, 6000))
def test_time_is_positive_and_adds_up(points, cached, first, second):
    rates = Rates(prefill=tuple(points))
    one = rates.compute_seconds(cached, first)
    other = rates.compute_seconds(cached + first, second)
    both = rates.compute_seconds(cached, first + second)
    assert both == pytest.approx(one + other, abs=1e-6)
    assert (one > 0) == (first > 0)


def test_reading_and_steps():
    rates = Rates(((0, 1),), ssd_read=1e6, ssd_latency=0.5, decode_step=2, decode_row=1)
    assert [rates.read_seconds(n) for n in (0, 1_000_000)] == [0.0, 1.5]
    assert [rates.step_seconds(n) for n in (0.5, 1, 3)] == [2, 2, 4]
    with pytest.raises(ConfigError, match="give ssd_read"):
        Rates(((0, 1),)).read_seconds(1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prefill": ()}, "must be pairs of a depth"),
        ({"prefill": ((0, 0),)}, "must be pairs"),
        ({"prefill": ((-1, 5),)}, "must be pairs"),
        ({"prefill": ((0, float("nan")),)}, "must be pairs"),
        ({"prefill": (("a", 5),)}, "must be pairs"),
        ({"prefill": 7}, "must be pairs"),
        ({"prefill": ((5, 1), (5, 2))}, "two rates for one depth"),
        ({"prefill": ((0, 1),), "ssd_read": -1}, "ssd_read is -1; it must be a number"),
        ({"prefill": ((0, 1),), "overhead": "1"}, "overhead is '1'"),
        ({"prefill": ((0, 1),), "decode_row": float("inf")}, "decode_row is inf"),
    ],
)
def test_wrong_rates_are_refused(given: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        Rates(**given)


def test_an_engine_that_has_done_nothing_has_no_rates():
    with pytest.raises(ConfigError, match="run some prompts"):
        Rates.of(Decisions("lru", {}, 4, 0.0, 0.0, None))


# --- files ---


def test_rates_come_back_from_a_file(tmp_path: Path):
    rates = Rates(prefill=((0, 1000), (4096, 400)), ssd_read=1e9, decode_step=0.03)
    path = tmp_path / "rates.json"
    path.write_text(json.dumps(rates.as_dict()))
    assert read_rates(path) == rates
    path.write_text(json.dumps(asdict(MEASURED)))
    assert read_rates(path) == Rates.of(MEASURED)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "must hold an object"),
        ("{}", "holds nothing; rates are prefill"),
        ('{"prefill": [[0, 1]], "speed": 1}', "holds prefill, speed; rates are"),
        ('{"prefill": 3}', "must be pairs"),
        ('{"prefill_rate": 3}', "is not dataclasses.asdict"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, message: str):
    path = tmp_path / "rates.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_rates(path)
    with pytest.raises(ConfigError, match="cannot read rates"):
        read_rates(tmp_path / "missing")


# --- sizes ---

LLAMA = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "dtype": "bfloat16",
}


def config(folder: Path, values: object) -> str:
    (folder / "config.json").write_text(json.dumps(values))
    return str(folder)


def test_sizes_from_a_config(tmp_path: Path):
    assert read_kv_size(config(tmp_path, LLAMA)) == KvSize(32, 8, 128)
    assert KvSize(32, 8, 128).token_bytes == 131_072
    assert read_kv_size(str(tmp_path), "float32").token_bytes == 262_144
    own = {**LLAMA, "head_dim": 64, "num_key_value_heads": None, "dtype": None}
    assert read_kv_size(config(tmp_path, own)) == KvSize(32, 32, 64, "float32")
    assert read_kv_size(config(tmp_path, {"text_config": LLAMA})) == KvSize(32, 8, 128)
    assert read_kv_size(str(tmp_path / "config.json")) == KvSize(32, 8, 128)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "is not the config.json"),
        ({}, "does not say how large the KV is"),
        ({**LLAMA, "num_hidden_layers": 0}, "layers is 0"),
        ({**LLAMA, "dtype": "int4"}, "dtype is 'int4'; it must be one of"),
        ({**LLAMA, "kv_lora_rank": 512}, "latent attention"),
        ({**LLAMA, "num_attention_heads": 0}, "does not say"),
    ],
)
def test_configs_that_say_something_else(tmp_path: Path, values: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        read_kv_size(config(tmp_path, values))


@pytest.mark.parametrize("name", ["missing", "a/b/c", "nobody/nothing", "model.gguf"])
def test_a_model_that_is_not_here(name: str):
    with pytest.raises(ConfigError, match="there is no config"):
        read_kv_size(name)


def test_the_packaged_model(smollm2_dir: Path):
    assert read_kv_size(str(smollm2_dir)) == PACKAGED
