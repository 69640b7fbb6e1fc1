"""What a request's timeline is made of: recorded in every lane, layer by layer."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pcr_core import Result, SamplingParams

PROMPT = [token % 250 for token in range(200)]
PARAMS = SamplingParams(max_tokens=3)


def layers(result: Result, lane: str) -> set[int | None]:
    return {one.layer for one in result.intervals if one.lane == lane}


def assert_sound(result: Result) -> None:
    timing = result.timing
    for one in result.intervals:
        assert 0.0 <= one.start <= one.stop <= timing.total
        if one.lane in ("read", "load", "compute"):
            assert one.stop <= timing.ttft + 1e-9
    compute = [one for one in result.intervals if one.lane == "compute"]
    assert all(a.stop <= b.start for a, b in pairwise(compute))


@pytest.mark.parametrize("overlap", ["none", "up", "down", "both"])
def test_cold_and_hits(make_engine: Any, tmp_path: Path, overlap: str) -> None:
    engine = make_engine(cache_dir=tmp_path, overlap=overlap)
    depth = set(range(engine.model.config.num_hidden_layers))
    cold = engine.generate(PROMPT, PARAMS)
    assert layers(cold, "compute") == depth | {None}
    assert layers(cold, "offload") == depth
    assert layers(cold, "load") == layers(cold, "read") == set()
    assert sum(one.lane == "decode" for one in cold.intervals) == 2
    dram = engine.generate(PROMPT, PARAMS)
    assert layers(dram, "load") == depth
    assert layers(dram, "read") == set()
    engine.close()
    engine = make_engine(cache_dir=tmp_path, overlap=overlap)
    ssd = engine.generate(PROMPT, PARAMS)
    assert ssd.usage.cached_by_tier.keys() == {"ssd"}
    assert layers(ssd, "load") == depth
    assert layers(ssd, "read"), "files were read for it"
    for result in (cold, dram, ssd):
        assert_sound(result)
        assert str(result.timeline())
    assert cold.text == dram.text == ssd.text


def test_a_row_that_is_there_needs_no_copies(make_engine: Any) -> None:
    engine = make_engine(resident_rows=1)
    engine.generate(PROMPT, PARAMS)
    device = engine.generate(PROMPT, PARAMS)
    assert device.usage.cached_by_tier.keys() == {"device"}
    assert layers(device, "load") == layers(device, "offload") == set()
    assert layers(device, "compute")
    assert_sound(device)
