"""What the start-up probes found is remembered, checked, and never half read."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from pcr_core.config import EngineConfig
from pcr_core.model import overlap, probe, setup
from pcr_core.model.attention import AttentionPlan
from pcr_core.model.linear import LayerPlan
from pcr_core.model.loading import LoadedModel, load
from pcr_core.model.probe import Verdict, keep_verdict, read_verdict, verdict_path
from pcr_core.model.row_tiles import RowTiles
from pcr_core.model.setup import model_prepared

VERDICT = Verdict(
    {
        (64, 96, False): LayerPlan(True, RowTiles({16: 0.1, 64: 0.25})),
        (64, 96, True): LayerPlan(False, RowTiles({32: 1.0})),
    },
    AttentionPlan((32, 64), 128),
    True,
    LayerPlan(True, RowTiles({1: 0.5}), RowTiles({4: 0.2, 8: 0.3})),
    "close",
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "probes" / "machine.json"


def other(number: int) -> Verdict:
    layers = {(number, 1, False): LayerPlan(False, RowTiles({16: 1.0}))}
    return dataclasses.replace(VERDICT, layers=layers)


def test_a_verdict_is_remembered(path: Path) -> None:
    assert read_verdict(path) is None
    assert keep_verdict(path, VERDICT) == VERDICT
    assert read_verdict(path) == VERDICT
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_the_first_writer_wins(path: Path) -> None:
    keep_verdict(path, VERDICT)
    assert keep_verdict(path, other(1)) == VERDICT
    assert read_verdict(path) == VERDICT


def test_writers_at_once_agree(path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        kept = list(pool.map(lambda n: keep_verdict(path, other(n)), range(24)))
    assert all(verdict == kept[0] for verdict in kept)
    assert read_verdict(path) == kept[0]
    assert len(list(path.parent.iterdir())) == 1


def _damaged(text: str) -> list[str]:
    content = json.loads(text)
    without = {key: value for key, value in content.items() if key != "layers"}
    return [
        "",
        "not json",
        text[: len(text) // 2],
        "[]",
        "null",
        "{}",
        json.dumps(without),
        json.dumps({**content, "layers": [{"in": 1}]}),
        json.dumps({**content, "layers": 5}),
        json.dumps({**content, "attention": None}),
        json.dumps({**content, "attention": {"causal_tails": None}}),
        json.dumps({**content, "layers": [{**content["layers"][0], "tiles": []}]}),
    ]


def test_a_damaged_file_counts_as_none_and_is_replaced(path: Path) -> None:
    keep_verdict(path, VERDICT)
    for text in _damaged(path.read_text()):
        path.write_text(text)
        assert read_verdict(path) is None, text
        assert keep_verdict(path, VERDICT) == VERDICT
        assert read_verdict(path) == VERDICT


def test_a_file_that_is_no_text_counts_as_none(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_bytes(b"\xff\xfe\x00")
    assert read_verdict(path) is None


def test_where_nothing_can_be_written_it_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        verdict = keep_verdict(tmp_path / "file" / "probes" / "x.json", VERDICT)
    assert verdict == VERDICT
    assert "cannot be remembered" in caplog.text


@pytest.fixture
def loaded(tiny_llama: Any, tiny_tokenizer: Any) -> LoadedModel:
    return load(EngineConfig(), tiny_llama, tiny_tokenizer)


def test_the_file_is_named_by_machine_and_model(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    base = verdict_path(tmp_path, loaded, ["fields"])
    assert base == verdict_path(tmp_path, loaded, ["fields"])
    assert base.parent == tmp_path / "probes"
    assert base != verdict_path(tmp_path, loaded, ["other"])
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        assert base != verdict_path(tmp_path, loaded, ["fields"])
    finally:
        torch.set_num_threads(before)


def test_the_second_start_measures_nothing(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(cache_dir=tmp_path)
    with model_prepared(loaded, config) as prepared:
        first = prepared.namespace
    monkeypatch.setattr(setup, "_probe", _must_not_run)
    monkeypatch.setattr(overlap, "_measure", _must_not_run)
    with model_prepared(loaded, config) as prepared:
        assert first == prepared.namespace
    assert len(list((tmp_path / "probes").iterdir())) == 2


def _must_not_run(*_: Any) -> None:
    raise AssertionError("probed again")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_the_probe_sees_what_is_shape_dependent(
    make_tiny_model: Callable[..., Any],
    tiny_tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    dtype: torch.dtype,
) -> None:
    """It says no where a layer's result depends on the number of rows."""
    model = make_tiny_model(kind).to(dtype)
    loaded = load(EngineConfig(), model, tiny_tokenizer)
    layers = setup.plan_layers(model)
    attention = setup.KvAttention(AttentionPlan())

    def verdict() -> bool:
        with (
            setup.attention_installed(model, attention),
            setup.row_tiles_installed(model, layers),
        ):
            return probe.is_shape_independent(loaded, 16)

    assert verdict()
    hook = model.model.layers[1].mlp.register_forward_hook(
        lambda module, inputs, output: output * (1 + output.shape[1] * 1e-2)
    )
    assert not verdict()
    hook.remove()
    assert verdict()


def test_the_probe_fits_a_short_context(
    make_tiny_model: Callable[..., Any], tiny_tokenizer: Any, tmp_path: Path
) -> None:
    model = make_tiny_model("llama")
    model.config.max_position_embeddings = 40
    config = EngineConfig(cache_dir=tmp_path, chunk_tokens=16)
    loaded = load(config, model, tiny_tokenizer)
    assert loaded.context_window == 40
    with model_prepared(loaded, config) as prepared:
        assert prepared.runner.cuts.exact


@pytest.mark.parametrize(
    ("widths", "threads", "aligned"),
    [
        ({576, 192, 1536, 64}, 1, True),
        ({576, 192, 1536, 64}, 2, True),
        ({4096, 14336, 128}, 2, True),
        ({4096, 128}, 3, False),  # 592 rows of 128 in three parts cut a vector
        ({90}, 7, False),
    ],
)
def test_elementwise_work_is_split_at_whole_vectors(
    widths: set[int], threads: int, aligned: bool
) -> None:
    assert probe.elementwise_is_aligned(widths, threads, 8192) is aligned
