"""Everything at once, for long: many threads, engines and tenants on one folder."""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from pcr_core import CancelledError, Document, Engine, SamplingParams
from tests.engine.kit import GREEDY, answer, ask, on_engine_thread, uncached

SECONDS = 60.0
DOCUMENTS = [Document(letter.lower(), letter * 45) for letter in "QZKJ"]


def _prompt(dice: random.Random) -> tuple[str, list[Document]]:
    chosen = dice.sample(DOCUMENTS, dice.randint(0, 3))
    context = "\n".join(document.text for document in chosen)
    ends = ["who?", "where was it, and when, and why there?", ""]
    return f"answer from these.\n{context}\n{dice.choice(ends)}", chosen


class Crowd:
    """Threads that do what they like with some engines until the time is up."""

    def __init__(self, engines: list[Engine], expected: dict[str, Any]) -> None:
        self.engines, self.expected = engines, expected
        self.errors: list[BaseException] = []
        self.done = 0
        self._end = time.monotonic() + SECONDS

    def run(self, threads: int) -> None:
        crowd = [threading.Thread(target=self._one, args=[n]) for n in range(threads)]
        for thread in crowd:
            thread.start()
        for thread in crowd:
            thread.join()
        if self.errors:
            raise self.errors[0]

    def _one(self, number: int) -> None:
        dice = random.Random(number)
        try:
            while time.monotonic() < self._end and not self.errors:
                self._act(dice.choice(self.engines), dice)
                self.done += 1
        except BaseException as error:
            self.errors.append(error)

    def _act(self, engine: Engine, dice: random.Random) -> None:
        prompt, documents = _prompt(dice)
        move = dice.random()
        if move < 0.6:
            completion = engine.submit(prompt, GREEDY, documents=documents)
            if dice.random() < 0.15:
                time.sleep(dice.random() * 0.01)
                completion.cancel()
            try:
                assert answer(completion.result(120)) == self.expected[prompt]
            except CancelledError:
                assert completion.cancelled
        elif move < 0.7:
            engine.prefetch(prompt)
        elif move < 0.8:
            engine.explain(prompt, documents=documents)
        elif move < 0.88:
            engine.forget(dice.choice(DOCUMENTS).id)
        elif move < 0.93:
            engine.stats()
        elif move < 0.97:
            engine.flush(60)
        else:
            assert not engine.check().memory


@pytest.fixture
def expected(make_engine: Any) -> dict[str, Any]:
    engine, dice = uncached(make_engine(ssd_bytes=0)), random.Random(0)
    found = {}
    for _ in range(1500):
        prompt, _ = _prompt(dice)
        if prompt not in found:
            found[prompt] = answer(ask(engine, prompt))
    engine.close()
    return found


@pytest.mark.stress
@pytest.mark.parametrize("prefetch", ["best_effort", "timeout"])
def test_a_crowd(
    make_engine: Any, expected: dict[str, Any], tmp_path: Path, prefetch: str
) -> None:
    budgets = {"dram_bytes": "300KiB", "ssd_bytes": "800KiB"}
    more = {"prefetch": prefetch, "prefetch_timeout": 0.002, **budgets}
    engines = [
        make_engine(**more),
        make_engine(eviction="adaptive", write_policy="second_touch", **more),
        make_engine(
            namespace="one", eviction="pgdsf", namespace_bytes="200KiB", **more
        ),
        make_engine(namespace="one", write_policy="on_evict", **more),
    ]
    crowd = Crowd(engines, expected)
    crowd.run(8)
    assert crowd.done > 100
    for engine in engines:
        assert engine.flush(60)
        report = engine.check()
        assert report.ok, report
        stats = engine.stats().cache
        assert stats.corrupt == stats.write_errors == stats.read_errors == 0
        assert stats.dram_bytes <= stats.dram_budget
        assert on_engine_thread(engine, lambda e=engine: _held(e)) == (0, 0)
    size = sum(p.stat().st_size for p in (tmp_path / "kv" / "chunks").iterdir())
    assert size <= 800 * 1024


def _held(engine: Engine) -> tuple[int, int]:
    tiers = engine._loop.tiers
    return len(tiers._leases), sum(node.pins for node in tiers._tree.nodes())


@pytest.mark.stress
def test_ten_thousand_requests_leave_nothing_behind(make_engine: Any) -> None:
    engine = make_engine(dram_bytes="300KiB", ssd_bytes="800KiB")
    process, dice = psutil.Process(), random.Random(3)
    seen = []
    for number in range(10_000):
        prompt, documents = _prompt(dice)
        prompt = f"{number % 90} {prompt}"
        engine.submit(
            prompt, SamplingParams(max_tokens=1), documents=documents
        ).result()
        if number % 50 == 0:
            engine.forget(dice.choice(DOCUMENTS).id)
        if number % 1000 == 999:
            assert engine.flush(60)  # no file is open for a moment
            gc.collect()
            threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
            seen.append((threads, files, process.memory_info().rss))
    assert len({(threads, files) for threads, files, _ in seen[1:]}) == 1
    growth = seen[-1][2] - seen[4][2]
    assert growth < 12 * 2**20, [rss for *_, rss in seen]
    assert on_engine_thread(engine, lambda: _held(engine)) == (0, 0)
    assert engine.check().ok
