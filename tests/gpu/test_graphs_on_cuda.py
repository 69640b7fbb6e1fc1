"""On a real GPU: recorded decode steps give what ordinary ones give."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pcr_core import Engine, EngineConfig, SamplingParams
from pcr_core.model import graphs_probe
from pcr_core.model.decode_slots import DecodeSlots
from pcr_core.model.graphs import CudaGraphs, NoGraphs
from pcr_core.model.loading import load
from pcr_core.model.rounding import differ_by_rounding
from pcr_core.model.setup import model_prepared
from pcr_core.model.static_decode import StepInSlots
from tests.model.test_static_decode import KINDS, LENGTHS, STEPS, Pair

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_has_the_bits_of_the_step_it_repeats(
    tmp_path: Path,
    make_tiny_model: Callable[..., Any],
    tiny_tokenizer: Any,
    device: torch.device,
    kind: str,
    dtype: str,
) -> None:
    config = EngineConfig(cache_dir=tmp_path, chunk_tokens=32, cuda_graphs="off")
    model = make_tiny_model(kind).to(getattr(torch, dtype)).to(device)
    loaded = load(config, model, tiny_tokenizer)
    with model_prepared(loaded, config) as prepared:
        pair = Pair(loaded, prepared.runner, CudaGraphs(device))
        # The same slots and steps on the other side, never recorded.
        slots = DecodeSlots(
            loaded.shapes, loaded.dtype, device, 64 * 2**20, lambda: None
        )
        ordinary = pair.plain.step
        plain = StepInSlots(pair.plain.call, slots, NoGraphs(), ordinary)
        pair.plain.decode_by(plain)
        pair.agree = torch.equal  # type: ignore[method-assign]
        for number, names in enumerate(STEPS):
            for name in set(names) - set(pair.rows):
                pair.join(name, LENGTHS[name])
            for name in set(pair.rows) - set(names):
                pair.leave(name)
            for repeat in range(3):
                fed = [(name * 31 + number * 7 + repeat) % 250 for name in names]
                rows = [pair.rows[name][0] for name in names]
                for row in rows:
                    plain.settle(row.cache)
                    pair.plain.make_room(row, 1500)
                expected = ordinary.logits([row.cache for row in rows], fed)
                pair.decode(names, fed)
                assert differ_by_rounding(expected, pair.last, loaded.dtype)
        pair.close()


def test_an_engine_that_records_answers_as_one_that_does_not(
    tmp_path: Path,
    make_tiny_model: Callable[..., Any],
    tiny_tokenizer: Any,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the probe finds of so small a model's time, it is made to say yes."""
    monkeypatch.setattr(graphs_probe, "_WORTH", float("inf"))
    prompts = [[(7 * at + size) % 250 for at in range(size)] for size in (20, 600, 45)]
    answers = {}
    for setting in ("off", "auto"):
        config = EngineConfig(
            cache_dir=tmp_path / setting, exact=False, cuda_graphs=setting
        )
        model = make_tiny_model("llama").to(device)
        with Engine(config, model=model, tokenizer=tiny_tokenizer) as engine:
            found = engine.generate(prompts, SamplingParams(max_tokens=40))
            answers[setting] = [result.token_ids for result in found]
            stats = engine.stats()
            assert stats.cuda_graphs == (setting == "auto"), stats.cuda_graphs_reason
    assert answers["auto"] == answers["off"]
