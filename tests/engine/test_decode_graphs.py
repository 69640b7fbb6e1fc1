"""An engine whose decode steps are recorded answers as ever, and says that they are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pcr_core import ConfigError, EngineConfig, SamplingParams
from pcr_core.model import graphs_probe, setup
from pcr_core.model.graphs import NoGraphs
from pcr_core.model.graphs_probe import GraphsChoice
from pcr_core.model.static_decode import StepInSlots
from tests.engine.kit import on_engine_thread

PROMPTS = [[(7 * at + size) % 250 for at in range(size)] for size in (20, 500, 45)]
SOME = SamplingParams(max_tokens=20)


@pytest.fixture
def on_a_device_with_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that finds all its steps fast, and bits no matter."""
    monkeypatch.setattr(setup, "graphs_for", lambda device: NoGraphs())
    monkeypatch.setattr(graphs_probe, "_WORTH", float("inf"))
    lenient = SimpleNamespace(equal=lambda *_: True)
    monkeypatch.setattr(graphs_probe, "torch", lenient)


def test_a_cpu_has_none(make_engine: Any) -> None:
    with make_engine() as engine:
        stats = engine.stats()
        assert (stats.cuda_graphs, stats.cuda_graph_ratios) == (False, {})
        assert "CUDA graphs" not in dict(stats.rows())


@pytest.mark.usefixtures("on_a_device_with_graphs")
def test_answers_are_the_same(make_engine: Any) -> None:
    with make_engine(cuda_graphs="off") as engine:
        expected = [result.token_ids for result in engine.generate(PROMPTS, SOME)]
        assert not engine.stats().cuda_graphs
        text = dict(engine.stats().rows())["CUDA graphs"]
        assert text == "off (cuda_graphs='off')"
    with make_engine() as engine:
        step = engine._parts.prepared.runner.step
        assert isinstance(step, StepInSlots)
        for _ in range(2):  # cold, and from DRAM
            found = engine.generate(PROMPTS, SOME)
            assert [result.token_ids for result in found] == expected
        stats = engine.stats()
        assert stats.cuda_graphs
        assert list(stats.cuda_graph_ratios) == [1, 8]
        text = dict(stats.rows())["CUDA graphs"]
        assert text.startswith("on (a step of 1, 8 rows takes ")
        assert stats.working_bytes >= step.nbytes > 0
        kept = on_engine_thread(engine, lambda: list(step._slots._seats))
        assert kept == [], "who has an answer has left"
        for part in (*step._slots.keys, *step._slots.values):
            assert not part[:, :, 1:].any()
        step.failure = "kernel"
        text = dict(engine.stats().rows())["CUDA graphs"]
        assert text.startswith("off (a step failed, see the log; ")
    assert step.nbytes == 0


@pytest.mark.usefixtures("on_a_device_with_graphs")
def test_several_answers_and_a_preempted_request(make_engine: Any) -> None:
    several = SamplingParams(max_tokens=12, n=3, temperature=0.9, seed=3)
    answers = {}
    for setting in ("off", "auto"):
        with make_engine(cuda_graphs=setting, row_bytes="1MiB") as engine:
            assert engine.stats().cuda_graphs == (setting == "auto")
            result = engine.generate(PROMPTS[0], several)
            found = engine.generate([*PROMPTS, PROMPTS[1][3:]], SOME)
            answers[setting] = (
                [one.token_ids for one in result.answers],
                [one.token_ids for one in found],
            )
    assert answers["auto"] == answers["off"]


def test_what_the_test_chose_is_shown(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = GraphsChoice(False, {1: 1.2, 8: 0.8}, "it is not faster")
    monkeypatch.setattr(setup, "graphs_for", lambda device: NoGraphs())
    monkeypatch.setattr(setup, "choose_graphs", lambda *_: choice)
    with make_engine() as engine:
        text = dict(engine.stats().rows())["CUDA graphs"]
        assert text == (
            "off (it is not faster; a step of 1, 8 rows takes 1.20, 0.80 of an "
            "ordinary one)"
        )


@pytest.mark.parametrize("value", ["on", True, None])
def test_other_settings_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="cuda_graphs"):
        EngineConfig(cuda_graphs=value)
