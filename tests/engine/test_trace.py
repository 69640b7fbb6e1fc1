"""Recording what an engine serves, without text, for ``pcr simulate``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pcr_core import ConfigError, SamplingParams
from pcr_core.trace import read_trace

FEW = SamplingParams(max_tokens=3)


def prompt(*numbers: int) -> list[int]:
    """A chunk for each number, and a question."""
    return [*(n % 200 for number in numbers for n in [number] * 32), 7, 8, 9]


def test_a_trace_has_the_shape_of_the_traffic_and_none_of_its_content(
    make_engine: Any, tmp_path: Path
) -> None:
    path = tmp_path / "traffic.jsonl"
    engine = make_engine(trace=path)
    for numbers in ((1, 2, 3), (1, 2, 4), (5,)):
        engine.generate(prompt(*numbers), FEW)
    chunk_bytes = engine._loop.tiers._format.layout.nbytes
    engine.close()
    trace = read_trace(path)
    assert (trace.chunk_tokens, trace.chunk_bytes) == (32, chunk_bytes)
    first, second, third = trace.requests
    assert [len(r.chunks) for r in trace.requests] == [3, 3, 1]
    assert first.chunks[:2] == second.chunks[:2]
    assert first.chunks[2] != second.chunks[2]
    assert third.chunks[0] not in first.chunks
    assert first.prompt_tokens == 99
    assert first.output_tokens == 3
    assert first.arrival <= second.arrival <= third.arrival
    raw = path.read_bytes()
    for key in engine._loop.tiers.keys_of(prompt(1, 2, 3)):
        assert key[:8] not in raw
        assert key.hex()[:16].encode() not in raw


def test_a_trace_is_continued_by_the_next_engine(
    make_engine: Any, tmp_path: Path
) -> None:
    path = tmp_path / "traffic.jsonl"
    for _ in range(2):
        engine = make_engine(trace=path)
        engine.generate(prompt(1, 2), FEW)
        engine.close()
    assert len(read_trace(path).requests) == 2


def test_a_trace_that_cannot_be_written_is_a_config_error(
    make_engine: Any, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="cannot record a trace"):
        make_engine(trace=tmp_path / "no" / "such" / "folder.jsonl")
    (tmp_path / "notes.txt").write_text("not a trace\n")
    with pytest.raises(ConfigError, match="not a trace"):
        make_engine(trace=tmp_path / "notes.txt")
    assert (tmp_path / "notes.txt").read_text() == "not a trace\n"


def test_cancelled_requests_are_not_recorded(
    make_engine: Any, hold: Any, tmp_path: Path
) -> None:
    path = tmp_path / "traffic.jsonl"
    engine = make_engine(trace=path)
    with hold(engine):
        given_up = engine.submit(prompt(1), FEW)
        given_up.cancel()
        served = engine.submit(prompt(2), FEW)
    served.result()
    engine.close()
    assert len(read_trace(path).requests) == 1
