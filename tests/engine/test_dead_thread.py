"""Whatever ends the engine thread, nobody is left waiting."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from pcr_core import EngineClosedError
from pcr_core.loop import Batching
from pcr_core.model import generation
from pcr_core.model.key_blocks import KEY_BLOCK
from pcr_core.request import Request
from pcr_core.service import Door, _run
from tests.engine.loop_bench import CHUNK, Bench, opened_bench


@pytest.fixture
def crowded(
    tmp_path: Path,
    probes: Path,
    make_tiny_model: Any,
    tiny_tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[tuple[Bench, list[Request]]]:
    """A loop with requests that run, are prefilled, were put back, and wait."""
    monkeypatch.setattr(generation, "_FIRST_ROOM", 1)
    (tmp_path / "probes").symlink_to(probes, target_is_directory=True)
    model = make_tiny_model("llama")
    batching = Batching(rows=3, prefill_tokens=CHUNK, store_answers=True)
    with opened_bench(
        tmp_path, model, tiny_tokenizer, batching, slots=60, resident_rows=0
    ) as bench:
        block = bench.runner._rows._make().bytes_for(KEY_BLOCK)
        bench.runner._rows._most_taken = 3 * block
        requests = [
            bench.request([n] * (KEY_BLOCK - 10), max_tokens=60) for n in range(3)
        ]
        while not bench.loop.preempted:
            bench.loop.step()
        requests += [bench.request([9] * 200), bench.request([8] * 20)]
        bench.loop._running[0].request.completion.cancel()
        bench.loop.step()
        requests = [one for one in requests if not one.completion.done]
        while bench.loop._prefilling is None:
            bench.loop.step()
        assert bench.loop._running
        assert bench.loop._scheduler.waiting()
        yield bench, requests


class Died(BaseException):
    """What nobody expects."""


def broken(*_: Any, **__: Any) -> Any:
    raise Died


def raising(*_: Any, **__: Any) -> Any:
    raise RuntimeError("and again")


def outside(bench: Bench, door: Door) -> tuple[list[Request], list[Future[Any]]]:
    """Requests and calls that came in just now."""
    dice = random.Random(5)
    made = [bench.made(dice.choices(range(250), k=40)) for _ in range(3)]
    door.put(made)
    return made, [door.call(lambda: None) for _ in range(2)]


@pytest.mark.parametrize("where", ["step", "add", "call", "catch_up"])
@pytest.mark.parametrize("freeing", ["works", "fails"])
def test_everybody_fails_with_the_cause(
    crowded: tuple[Bench, list[Request]],
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    freeing: str,
) -> None:
    bench, requests = crowded
    door = Door(100)
    calls: list[Future[Any]] = [door.call(broken)] if where == "call" else []
    made, more = outside(bench, door)
    calls += more
    if where == "step":
        monkeypatch.setattr(bench.loop, "step", broken)
    elif where == "add":
        monkeypatch.setattr(bench.loop._ledger, "admit", broken)
    elif where == "catch_up":
        monkeypatch.setattr(bench.loop._ledger, "catch_up", broken)
    if freeing == "fails":
        monkeypatch.setattr(bench.runner, "close_row", raising)
        monkeypatch.setattr(bench.loop._answers, "close", raising)
    _run(door, bench.loop)
    for request in [*requests, *made]:
        with pytest.raises(EngineClosedError, match="Died") as caught:
            request.completion.result(0)
        assert isinstance(caught.value.__cause__, Died)
    assert all(call.done() for call in calls)
    if where == "add":
        for call in calls:
            assert isinstance(call.exception(0), EngineClosedError)
    assert not bench.loop._suspended
    if freeing == "works":
        assert bench.nothing_held()


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, Died, ValueError])
def test_what_a_listener_raises_ends_nobody(
    crowded: tuple[Bench, list[Request]], error: type[BaseException]
) -> None:
    bench, requests = crowded

    def listener() -> None:
        raise error

    for request in requests:
        request.completion.subscribe(listener)
    while bench.loop.busy:
        bench.loop.step()
    for request in requests:
        assert request.completion.result(0).token_ids
    assert bench.nothing_held()
