"""Decode steps are recorded only where that changes nothing and is faster."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pcr_core.config import EngineConfig
from pcr_core.model import graphs_probe
from pcr_core.model.graphs import NoGraphs
from pcr_core.model.graphs_probe import GraphsChoice, choose_graphs
from pcr_core.model.loading import LoadedModel, load
from pcr_core.model.prefill_plan import free
from pcr_core.model.runner import Runner
from pcr_core.model.setup import model_prepared
from pcr_core.model.static_decode import StepInSlots

ROOM = 64 * 2**20


@pytest.fixture(scope="module")
def loaded(
    tmp_path_factory: pytest.TempPathFactory,
    make_tiny_model: Callable[..., Any],
    tiny_tokenizer: Any,
) -> Iterator[LoadedModel]:
    config = EngineConfig(cache_dir=tmp_path_factory.mktemp("probe"), chunk_tokens=16)
    found = load(config, make_tiny_model("llama"), tiny_tokenizer)
    with model_prepared(found, config):
        yield found


class Device(NoGraphs):
    """Records nothing, and takes as long as declared.

    Attributes:
        now: Its clock.
        moved: How often the memory was about to move.
    """

    def __init__(self, seconds: float, off: float = 0.0) -> None:
        self.now = 0.0
        self.moved = 0
        self._seconds, self._off = seconds, off

    def run(self, name: Hashable, step: Callable[[], torch.Tensor]) -> torch.Tensor:
        self.now += self._seconds
        return super().run(name, step) + self._off

    def drop(self) -> None:
        self.moved += 1


@pytest.fixture
def choose(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[GraphsChoice, Runner]]:
    """An ordinary step takes a second on that device's clock."""

    def chosen(
        device: Device, *, rows: int = 8, room: float = ROOM, **settings: Any
    ) -> tuple[GraphsChoice, Runner]:
        options = {"decoding": "close", "resident_rows": 2, **settings}
        runner = Runner(loaded, 16, options.pop("cuts", free()), **options)
        ordinary = runner.step.logits

        def slow(*arguments: Any) -> torch.Tensor:
            device.now += 1.0
            return ordinary(*arguments)

        monkeypatch.setattr(runner.step, "logits", slow)
        clock = SimpleNamespace(perf_counter=lambda: device.now)
        monkeypatch.setattr(graphs_probe, "time", clock)
        choice = choose_graphs(loaded, runner, device, rows, room)
        assert not runner._rows.taken_bytes
        assert not any(len(row.tokens) for row in runner._rows._resting)
        assert runner.step.replays == choice.on
        assert runner.step.nbytes == 0
        return choice, runner

    return chosen


def test_faster_and_close_enough(choose: Any) -> None:
    device = Device(0.4)
    choice, runner = choose(device)
    assert choice == GraphsChoice(True, {1: pytest.approx(0.4), 8: pytest.approx(0.4)})
    assert isinstance(runner.step, StepInSlots)
    assert device.moved > 0, "its memory was given back"


def test_one_row_at_most(choose: Any) -> None:
    choice, _ = choose(Device(0.4), rows=1)
    assert list(choice.ratios) == [1]


@pytest.mark.parametrize("seconds", [0.96, 1.0, 3.0])
def test_not_faster(choose: Any, seconds: float) -> None:
    choice, _ = choose(Device(seconds))
    assert (choice.on, choice.reason) == (False, "it is not faster")
    assert choice.ratios[8] == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("off", "reason"),
    [(1e-6, ""), (1.0, "more than rounding"), (float("nan"), "more than rounding")],
)
def test_results_that_differ(choose: Any, off: float, reason: str) -> None:
    choice, _ = choose(Device(0.4, off))
    assert choice.on == (not reason)
    assert reason in choice.reason


@pytest.mark.parametrize("promise", ["exact", "invariant"])
def test_a_promise_is_kept_to_the_bit(choose: Any, promise: str) -> None:
    settings: dict[str, Any] = {"decoding": "invariant"}
    if promise == "exact":
        settings = {"cuts": dataclasses.replace(free(), exact=True)}
    choice, _ = choose(Device(0.4, 1e-6), **settings)
    assert (choice.on, choice.reason) == (False, "bits differ, and they must not")


def test_code_that_cannot_be_recorded(choose: Any, caplog: Any) -> None:
    class Refusing(Device):
        def run(self, name: Hashable, step: Callable[[], torch.Tensor]) -> torch.Tensor:
            raise RuntimeError("operation not permitted when stream is capturing")

    choice, _ = choose(Refusing(0.4))
    assert not choice.on
    assert "not permitted" in choice.reason


def test_no_memory(choose: Any) -> None:
    choice, _ = choose(Device(0.4), room=1000)
    assert choice == GraphsChoice(reason="there is no memory for it")
    choice, _ = choose(Device(0.4), row_bytes=1000)
    assert not choice.on
    assert "row_bytes" in choice.reason


def test_rows_in_turns(choose: Any) -> None:
    choice, _ = choose(Device(0.4), decoding="serial")
    assert choice == GraphsChoice(reason="this model's code takes one row at a time")
