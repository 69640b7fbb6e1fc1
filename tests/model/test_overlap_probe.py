"""Which copies run beside compute: measured once, remembered, and only if it pays."""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pcr_core.config import EngineConfig
from pcr_core.model import overlap, setup
from pcr_core.model.attention import AttentionPlan, KvAttention, attention_installed
from pcr_core.model.loading import LoadedModel, load
from pcr_core.model.overlap import OverlapChoice, choose_overlap
from pcr_core.model.prefill_plan import Cuts, grid, shape_independent
from pcr_core.model.streams import OVERLAPS, Overlap, Span
from pcr_core.model.transfers import Copied

CHUNK = 16
CUTS = shape_independent()


@pytest.fixture
def loaded(tiny_llama: Any, tiny_tokenizer: Any) -> LoadedModel:
    return load(EngineConfig(), tiny_llama, tiny_tokenizer)


class Machine:
    """A machine on which each mode takes as long as declared.

    Attributes:
        runs: The modes that were tried, in order.
        now: Its clock.
    """

    def __init__(self, seconds: Mapping[str, float], copying: float = 0.5) -> None:
        self.runs: list[str] = []
        self.now = 0.0
        self._seconds = seconds
        self._copying = copying

    def workload(self, *_: Any) -> Callable[[Overlap], Any]:
        def run(mode: Overlap) -> Any:
            self.runs.append(mode)
            seconds = self.seconds(mode)
            self.now += seconds
            half = seconds * self._copying / 2
            copied = Copied([Span(0, 0.0, half)], [Span(0, half, 2 * half)], 0.0)
            return seconds, SimpleNamespace(forwards=[SimpleNamespace(copied=copied)])

        return run

    def seconds(self, mode: str) -> float:
        return self._seconds.get(mode, 1.0)


@pytest.fixture
def choose(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Machine], OverlapChoice]:
    def chosen(machine: Machine) -> OverlapChoice:
        monkeypatch.setattr(overlap, "_workload", machine.workload)
        monkeypatch.setattr(
            overlap, "time", SimpleNamespace(perf_counter=lambda: machine.now)
        )
        return choose_overlap(loaded, CHUNK, CUTS, tmp_path)

    return chosen


@pytest.mark.parametrize(
    ("seconds", "mode"),
    [
        ({}, "none"),
        ({"up": 0.8}, "up"),
        ({"down": 0.8}, "down"),
        ({"up": 0.9, "down": 0.9, "both": 0.7}, "both"),
        ({"up": 0.8, "down": 0.9, "both": 0.85}, "up"),
        ({"up": 1.5, "down": 1.5, "both": 2.0}, "none"),
    ],
)
def test_the_fastest_mode(choose: Any, seconds: dict[str, float], mode: str) -> None:
    choice = choose(Machine(seconds))
    assert choice.mode == mode
    assert choice.copying == pytest.approx(0.5)
    assert choice.ratios == pytest.approx(
        {one: seconds.get(one, 1.0) for one in OVERLAPS}
    )


@pytest.mark.parametrize(("ratio", "mode"), [(0.96, "none"), (0.94, "both")])
def test_it_must_pay(choose: Any, ratio: float, mode: str) -> None:
    choice = choose(Machine({"both": ratio}))
    assert choice.mode == mode
    assert choice.ratios["both"] == pytest.approx(ratio), "and it is shown"


def test_one_slow_moment_decides_nothing(choose: Any) -> None:
    """Modes take turns, so that all of them have it."""

    class Slowing(Machine):
        def seconds(self, mode: str) -> float:
            return (0.8 if mode == "up" else 1.0) * (9.0 if len(self.runs) > 8 else 1.0)

    assert choose(Slowing({})).mode == "up"


@pytest.mark.parametrize(
    ("turns", "unit", "mode"),
    [
        ((0.7, 0.7, 1.1, 0.7, 0.7), 0.01, "up"),
        ((0.7, 1.1, 0.7, 1.1, 0.7), 0.01, "none"),
        ((0.7, 0.7, 0.7), 1.0, "up"),
        ((0.7, 1.1, 0.7), 1.0, "none"),  # three rounds say less than five
    ],
)
def test_it_must_pay_nearly_always(
    choose: Any, turns: tuple[float, ...], unit: float, mode: str
) -> None:
    class Unsteady(Machine):
        def seconds(self, mode: str) -> float:
            turn = self.runs.count("up") - 1
            return unit * (turns[turn] if mode == "up" else 1.0)

    choice = choose(Unsteady({}))
    assert choice.ratios["up"] == pytest.approx(0.7)
    assert choice.mode == mode


def test_cheap_copies_are_not_worth_trying(choose: Any) -> None:
    machine = Machine({"up": 0.1}, copying=0.04)
    assert choose(machine) == OverlapChoice("none", {}, pytest.approx(0.04))
    assert machine.runs == ["none", "none"], "the first warms up"


@pytest.mark.parametrize(("seconds", "rounds"), [(0.05, 5), (3.0, 3)])
def test_it_takes_its_time_but_not_more(
    choose: Any, seconds: float, rounds: int
) -> None:
    machine = Machine(dict.fromkeys(OVERLAPS, seconds))
    choose(machine)
    assert machine.runs == ["none", "none", *(OVERLAPS * rounds)]


# --- remembered ---


def test_measured_once(choose: Any, tmp_path: Path) -> None:
    first = choose(Machine({"down": 0.7}))
    again = Machine({"up": 0.1})
    assert choose(again) == first
    assert again.runs == []
    assert len(list(tmp_path.iterdir())) == 1


def test_what_was_not_worth_trying_is_remembered_too(choose: Any) -> None:
    first = choose(Machine({}, copying=0.01))
    again = Machine({"up": 0.1})
    assert choose(again) == first
    assert again.runs == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not json",
        "[]",
        "null",
        "{}",
        '{"mode": "sideways", "ratios": {}, "copying": 0.1}',
        '{"mode": "up"}',
        '{"mode": "up", "ratios": {"up": "fast"}, "copying": 0.1}',
        '{"mode": "up", "ratios": [], "copying": 0.1}',
        '{"mode": ["up"], "ratios": {}, "copying": 0.1}',
        '{"mode": "up", "ratios": {}, "copying": null}',
    ],
)
def test_a_damaged_file_counts_as_none_and_is_replaced(
    choose: Any, tmp_path: Path, text: str
) -> None:
    first = choose(Machine({"down": 0.7}))
    (path,) = tmp_path.iterdir()
    path.write_text(text)
    machine = Machine({"down": 0.7})
    assert choose(machine) == first
    assert machine.runs
    assert json.loads(path.read_text())["mode"] == "down"


def test_a_file_that_is_no_text_counts_as_none(choose: Any, tmp_path: Path) -> None:
    first = choose(Machine({"down": 0.7}))
    (path,) = tmp_path.iterdir()
    path.write_bytes(b"\xff\xfe\x00")
    assert choose(Machine({"down": 0.7})) == first


def test_where_nothing_can_be_written_it_is_said(
    loaded: LoadedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(overlap, "_workload", Machine({"up": 0.5}).workload)
    with caplog.at_level(logging.WARNING):
        choice = choose_overlap(loaded, CHUNK, CUTS, tmp_path / "file" / "probes")
    assert choice.mode == "up"
    assert "cannot be remembered" in caplog.text


def test_the_file_is_named_by_machine_and_model(loaded: LoadedModel) -> None:
    def name(model: LoadedModel = loaded, chunk: int = CHUNK, cuts: Cuts = CUTS) -> str:
        return overlap._name(model, chunk, cuts)

    others = [
        name(chunk=32),
        name(cuts=grid(CHUNK)),
        name(dataclasses.replace(loaded, name="another")),
        name(dataclasses.replace(loaded, dtype=torch.bfloat16)),
        name(dataclasses.replace(loaded, shapes=loaded.shapes[:1])),
    ]
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        others.append(name())
    finally:
        torch.set_num_threads(before)
    assert name() == name()
    assert len({name(), *others}) == len(others) + 1


# --- what is measured ---


@pytest.fixture
def prepared(loaded: LoadedModel) -> Iterator[LoadedModel]:
    with attention_installed(loaded.model, KvAttention(AttentionPlan())):
        yield loaded


@pytest.mark.parametrize("mode", OVERLAPS)
@pytest.mark.parametrize(
    "cuts", [shape_independent(), grid(CHUNK)], ids=lambda c: c.name
)
def test_the_workload_loads_computes_and_stores(
    prepared: LoadedModel, cuts: Cuts, mode: Overlap
) -> None:
    run = overlap._workload(prepared, CHUNK, cuts, 5)
    seconds, prefilled = run(mode)
    assert seconds > 0.0
    assert prefilled.computed[0][0] == 5 * CHUNK, "five chunks are loaded"
    layers = list(range(len(prepared.shapes)))
    first = prefilled.forwards[0].copied
    assert [span.layer for span in first.loads] == layers
    assert [span.layer for span in first.stores] == layers
    assert prefilled.logits.isfinite().all()
    _, again = run("none")
    assert torch.equal(again.logits, prefilled.logits)
    assert not [t for t in threading.enumerate() if t.name.startswith("pcr-copy")]


def test_a_real_choice(prepared: LoadedModel, tmp_path: Path) -> None:
    choice = choose_overlap(prepared, CHUNK, CUTS, tmp_path)
    assert choice.mode in OVERLAPS
    assert 0.0 < choice.copying < 1.0
    assert choice == choose_overlap(prepared, CHUNK, CUTS, tmp_path)


def test_a_context_too_short_for_a_hit(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine({"up": 0.1})
    monkeypatch.setattr(overlap, "_workload", machine.workload)
    short = dataclasses.replace(loaded, context_window=2 * CHUNK)
    assert choose_overlap(short, CHUNK, CUTS, tmp_path) == OverlapChoice("none")
    assert machine.runs == []


@pytest.mark.parametrize("asked", ["auto", "both"])
def test_a_device_without_copy_streams(
    loaded: LoadedModel, tmp_path: Path, asked: str
) -> None:
    elsewhere = dataclasses.replace(loaded, device=torch.device("mps"))
    config = EngineConfig(cache_dir=tmp_path, overlap=asked)
    assert setup._overlap(elsewhere, config, CUTS, CHUNK) == OverlapChoice("none")


def test_a_mode_that_is_asked_for_is_not_measured(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    config = EngineConfig(cache_dir=tmp_path, overlap="down")
    assert setup._overlap(loaded, config, CUTS, CHUNK) == OverlapChoice("down")
    assert not list(tmp_path.iterdir())
