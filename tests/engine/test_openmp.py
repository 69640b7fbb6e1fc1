"""Threads that torch keeps for a caller go when the caller hands work over."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from pcr_core import Engine, SamplingParams
from pcr_core.openmp import _pause, release_team

pytestmark = [
    pytest.mark.skipif(_pause() is None, reason="torch does not run on libgomp here"),
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores"),
]
ONE = SamplingParams(max_tokens=1)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Two, for once: one thread needs no team."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    release_team()
    torch.set_num_threads(before)


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def work() -> torch.Tensor:
    """Something that torch cuts in pieces for its threads."""
    return torch.arange(4_000_000, dtype=torch.float32).sqrt()


def settles(most: int) -> bool:
    """Threads end on their own time."""
    until = time.monotonic() + 30
    while threads() > most and time.monotonic() < until:
        time.sleep(0.01)
    return threads() <= most


@pytest.fixture
def elsewhere() -> Iterator[Callable[[Callable[[], object]], object]]:
    """Runs functions on one thread that has never used torch."""
    asked, answered = threading.Semaphore(0), threading.Semaphore(0)
    jobs: list[Callable[[], object]] = []
    results: list[object] = []

    def body() -> None:
        while asked.acquire() and jobs:
            results.append(jobs.pop()())
            answered.release()

    def run(job: Callable[[], object]) -> object:
        jobs.append(job)
        asked.release()
        assert answered.acquire(timeout=60)
        return results.pop()

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    yield run
    asked.release()
    thread.join()


def test_a_team_ends_and_the_next_computes_the_same(elsewhere) -> None:
    release_team()
    before = threads()
    first = elsewhere(work)
    grown = threads()
    assert grown > before
    assert elsewhere(release_team)
    assert settles(before)
    count = elsewhere(torch.get_num_threads)
    second = elsewhere(work)
    assert threads() == grown
    assert torch.equal(first, second)  # in pieces, too
    release_team()
    assert elsewhere(torch.get_num_threads) == count
    assert elsewhere(release_team)
    assert settles(before)


def test_without_a_team_nothing_happens(elsewhere) -> None:
    before = threads()
    assert elsewhere(release_team)
    assert elsewhere(release_team)
    assert threads() == before


@pytest.mark.parametrize(
    "ask",
    [
        lambda engine: engine.submit([5, 6, 7], ONE).result(),
        lambda engine: engine.generate([5, 6, 7], ONE),
        lambda engine: engine.generate([[5, 6, 7], [5, 6, 8]], ONE),
        lambda engine: engine.prefetch([5, 6, 7]),
    ],
    ids=["submit", "generate", "a batch", "prefetch"],
)
def test_whoever_asks_gives_up_its_team(make_engine, elsewhere, ask) -> None:
    engine: Engine = make_engine()
    engine.generate([1, 2, 3], ONE)
    release_team()
    engine.flush()
    before = threads()
    elsewhere(work)
    assert threads() > before
    elsewhere(lambda: ask(engine))
    assert settles(before)


def test_building_an_engine_gives_up_the_builders_team(make_engine, elsewhere) -> None:
    release_team()
    before = threads()
    elsewhere(work)
    assert threads() > before
    elsewhere(lambda: make_engine().close())
    assert settles(before)


def test_a_listener_leaves_the_engines_team(make_engine, monkeypatch) -> None:
    engine: Engine = make_engine()
    released = list[str]()
    monkeypatch.setattr(
        "pcr_core.engine.release_team",
        lambda: released.append(threading.current_thread().name),
    )
    asking = list[str]()
    asked = threading.Event()

    def ask_again() -> None:
        if not asked.is_set():
            asking.append(threading.current_thread().name)
            engine.prefetch([5, 6, 8])
            asked.set()

    completion = engine.submit([5, 6, 7], SamplingParams(max_tokens=8, min_tokens=8))
    completion.subscribe(ask_again)
    assert asked.wait(60)
    completion.result()
    assert asking == ["pcr-engine"]
    assert released == [threading.current_thread().name]
