"""Rates measured on a tiny engine: they exist, and leave nothing behind."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcr_core import EngineConfig
from pcr_core.errors import ConfigError
from pcr_core.measuring import fit, measure
from pcr_core.simulator.kv_size import KvSize


@pytest.mark.usefixtures("check_thread_leaks")
def test_a_tiny_engine_is_measured(tmp_path, tiny_llama, tiny_tokenizer):
    config = EngineConfig(cache_dir=tmp_path, dtype="float32", exact=False, threads=1)
    found = measure(config, model=tiny_llama, tokenizer=tiny_tokenizer)
    rates, own = found.rates, tiny_llama.config
    assert found.kv == KvSize(
        own.num_hidden_layers, own.num_key_value_heads, own.head_dim, "float32"
    )
    assert rates.compute_seconds(0, 100) > 0
    assert rates.ssd_read > 0
    assert rates.decode_step > 0
    assert [path.name for path in tmp_path.iterdir()] == []


def test_without_ssd_nothing_is_read(tmp_path, tiny_llama, tiny_tokenizer):
    config = EngineConfig(
        cache_dir=tmp_path, dtype="float32", exact=False, threads=1, ssd_bytes=0
    )
    found = measure(config, model=tiny_llama, tokenizer=tiny_tokenizer)
    assert found.rates.ssd_read == 0


def test_a_short_window_is_refused(tmp_path, tiny_llama, tiny_tokenizer):
    tiny_llama.config.max_position_embeddings = 64
    config = EngineConfig(cache_dir=tmp_path, dtype="float32", exact=False)
    with pytest.raises(ConfigError, match="window of 64 tokens is too short"):
        measure(config, model=tiny_llama, tokenizer=tiny_tokenizer)


@given(st.floats(1e-6, 1e-1), st.floats(0, 1e-5), st.floats(0, 0.5), st.integers(3, 5))
def test_the_law_is_found_again(each, per_depth, overhead, points):
    lengths = [64 * 2**power for power in range(points)]
    samples = [(n, overhead + each * n + per_depth * n * n / 2) for n in lengths]
    law = fit(samples)
    for length, seconds in samples:
        again = law[2] + law[0] * length + law[1] * length**2 / 2
        assert again == pytest.approx(seconds, rel=0.05)


@given(st.lists(st.floats(1e-6, 100), min_size=1, max_size=4))
def test_noise_never_gives_a_negative_rate(seconds):
    each, per_depth, overhead = fit(
        [(64 * 4**index, taken) for index, taken in enumerate(seconds)]
    )
    assert each > 0
    assert per_depth >= 0
    assert overhead >= 0
