"""An engine's copies run where it was told, and it says where they do."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from pcr_core import ConfigError, EngineConfig, SamplingParams
from pcr_core.model import setup
from pcr_core.model.overlap import OverlapChoice
from pcr_core.model.streams import InlineLane, WorkerLane

FEW = SamplingParams(max_tokens=3, logprobs=True)
PROMPT = [number % 200 for number in range(150)]


def copy_threads() -> list[str]:
    names = (thread.name for thread in threading.enumerate())
    return sorted(name for name in names if name.startswith("pcr-copy"))


@pytest.mark.parametrize(
    ("mode", "threads"),
    [
        ("none", []),
        ("up", ["pcr-copy-up"]),
        ("down", ["pcr-copy-down"]),
        ("both", ["pcr-copy-down", "pcr-copy-up"]),
    ],
)
def test_a_mode_that_is_asked_for(
    make_engine: Any, mode: str, threads: list[str]
) -> None:
    with make_engine(overlap=mode) as engine:
        streams = engine._parts.prepared.runner.streams
        for lane, direction in ((streams.load, "up"), (streams.offload, "down")):
            beside = mode in (direction, "both")
            assert isinstance(lane, WorkerLane if beside else InlineLane)
        assert copy_threads() == threads
        cold = engine.generate(PROMPT, FEW)
        warm = engine.generate(PROMPT, FEW)
        assert warm.usage.cached_by_tier["dram"] > 0
        assert (warm.token_ids, warm.logprobs) == (cold.token_ids, cold.logprobs)
        stats = engine.stats()
        assert (stats.overlap, stats.overlap_ratios, stats.copying) == (mode, {}, 0.0)
        assert dict(stats.rows())["overlap"] == mode
    assert copy_threads() == []


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        (
            OverlapChoice(
                "up", {"none": 1.0, "up": 0.8, "down": 1.02, "both": 0.9}, 0.3
            ),
            "up (measured, times none: none 1.00, up 0.80, down 1.02, both 0.90)",
        ),
        (OverlapChoice("none", {}, 0.0123), "none (copies take 1.2% of a hit)"),
    ],
)
def test_what_the_probe_chose_is_used_and_shown(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch, choice: OverlapChoice, text: str
) -> None:
    monkeypatch.setattr(setup, "choose_overlap", lambda *_: choice)
    with make_engine() as engine:
        assert engine._parts.prepared.runner.streams.mode == choice.mode
        stats = engine.stats()
        assert stats.overlap == choice.mode
        assert stats.overlap_ratios == choice.ratios
        assert stats.copying == choice.copying
        assert dict(stats.rows())["overlap"] == text
        assert text in str(stats)


def test_auto_that_chose_none_is_none(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot be slower: nothing that runs a request tells the two apart."""
    monkeypatch.setattr(setup, "choose_overlap", lambda *_: OverlapChoice("none"))

    def parts(mode: str) -> Any:
        with make_engine(overlap=mode) as engine:
            runner, stats = engine._parts.prepared.runner, engine.stats()
            streams = runner.streams
            lanes = [type(streams.load), type(streams.offload), type(streams.stopwatch)]
            assert copy_threads() == []
            about = (runner.cuts, runner.chunk_tokens, runner.decoding)
            return (streams.mode, lanes, *about, stats.namespace, stats.overlap)

    assert parts("auto") == parts("none")


@pytest.mark.parametrize("value", ["sideways", "", None, True, "UP"])
def test_other_modes_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="overlap"):
        EngineConfig(overlap=value)
