"""Threads that torch keeps for a caller go when the caller hands work over."""

from __future__ import annotations

import os
import subprocess
import sys
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


def threads() -> set[str]:
    """A thread that was joined may be among them for a while."""
    return set(os.listdir("/proc/self/task"))


def work() -> torch.Tensor:
    """Something that torch cuts in pieces for its threads."""
    return torch.arange(4_000_000, dtype=torch.float32).sqrt()


def end(some: set[str]) -> bool:
    """Threads end on their own time."""
    until = time.monotonic() + 30
    while some & threads() and time.monotonic() < until:
        time.sleep(0.01)
    return not some & threads()


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
    before = threads()
    first = elsewhere(work)
    team = threads() - before
    assert team
    assert elsewhere(release_team)
    assert end(team)
    count = elsewhere(torch.get_num_threads)
    before = threads()
    second = elsewhere(work)
    team = threads() - before
    assert team
    assert torch.equal(first, second)
    assert elsewhere(torch.get_num_threads) == count
    assert elsewhere(release_team)
    assert end(team)


def test_without_a_team_nothing_happens(elsewhere) -> None:
    before = threads()
    assert elsewhere(release_team)
    assert elsewhere(release_team)
    assert threads() <= before


@pytest.mark.parametrize(
    "ask",
    [
        lambda engine: engine.submit([5, 6, 7], ONE).result(),
        lambda engine: engine.generate([5, 6, 7], ONE),
        lambda engine: engine.generate([[5, 6, 7], [5, 6, 8]], ONE),
        lambda engine: engine.prefetch([5, 6, 7]),
        lambda engine: engine.cached_tokens([[5, 6, 7]]),
    ],
    ids=["submit", "generate", "a batch", "prefetch", "cached tokens"],
)
def test_whoever_asks_gives_up_its_team(make_engine, elsewhere, ask) -> None:
    engine: Engine = make_engine()
    engine.generate([1, 2, 3], ONE)  # its own threads are there
    engine.flush()
    before = threads()
    elsewhere(work)
    team = threads() - before
    assert team
    elsewhere(lambda: ask(engine))
    assert end(team)


def test_building_an_engine_gives_up_the_builders_team(make_engine, elsewhere) -> None:
    before = threads()
    elsewhere(work)
    team = threads() - before
    assert team
    elsewhere(lambda: make_engine().close())
    assert end(team)


FORKS = """
import faulthandler, os, sys
import torch
torch.set_num_threads(2)
if sys.argv[1] == "imported before":
    from pcr_core.openmp import release_team
torch.arange(4_000_000.0).sqrt()
if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
faulthandler.dump_traceback_later(60, exit=True)
from pcr_core.openmp import release_team
assert release_team() == (sys.argv[1] == "imported before")
if sys.argv[1] == "imported before":
    torch.arange(4_000_000.0).sqrt()
os._exit(0)
"""


@pytest.mark.parametrize("when", ["imported before", "imported in the child"])
def test_a_forked_child_waits_for_no_team_of_its_parents(when) -> None:
    """libgomp's threads are not copied, and it would wait for them forever."""
    done = subprocess.run(
        [sys.executable, "-c", FORKS, when],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


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
