"""Threads and tasks by the dozen on one engine: every answer is the serial one."""

from __future__ import annotations

import asyncio
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from pcr_core import (
    CancelledError,
    Completion,
    Engine,
    EngineClosedError,
    Result,
    SamplingParams,
)
from tests.engine.kit import on_engine_thread

SHARED = [[group] * 70 for group in range(6)]


def work(count: int) -> list[tuple[list[int], SamplingParams]]:
    dice = random.Random(count)
    found = []
    for number in range(count):
        prompt = [*dice.choice(SHARED), *dice.choices(range(250), k=dice.randint(1, 9))]
        params = SamplingParams(
            max_tokens=dice.randint(1, 14),
            temperature=dice.choice([0.0, 1.0]),
            seed=number,
            logprobs=True,
        )
        found.append((prompt, params))
    return found


def told(result: Result) -> Any:
    return result.text, result.token_ids, result.logprobs


class Crowd:
    """Callers of one engine, some of whom change their minds."""

    def __init__(self, engine: Engine, tasks: int, threads: int) -> None:
        self.engine = engine
        self.wanted = work(tasks)
        self.expected = [
            told(engine.submit(prompt, params).result(120))
            for prompt, params in self.wanted
        ]
        self.threads = threads
        self.answered = self.cancelled = 0
        self._lock = threading.Lock()

    def threads_at_once(self, cancel: float) -> None:
        with ThreadPoolExecutor(self.threads) as pool:
            list(pool.map(lambda n: self._one(n, cancel), range(len(self.wanted))))

    def _one(self, number: int, cancel: float) -> None:
        dice = random.Random(number)
        completion = self.engine.submit(
            *self.wanted[number], priority=dice.randint(0, 2)
        )
        if dice.random() < cancel:
            stream = completion.stream()
            if dice.random() < 0.5:
                next(stream, None)
            stream.close()
        self._check(number, completion)

    def _check(self, number: int, completion: Completion) -> None:
        try:
            assert told(completion.result(120)) == self.expected[number]
        except CancelledError:
            assert completion.cancelled
            with self._lock:
                self.cancelled += 1
        else:
            with self._lock:
                self.answered += 1

    async def tasks_at_once(self, cancel: float) -> None:
        await asyncio.gather(*(self._task(n, cancel) for n in range(len(self.wanted))))

    async def _task(self, number: int, cancel: float) -> None:
        dice, changed = random.Random(-number), asyncio.Event()
        loop = asyncio.get_running_loop()
        completion = self.engine.submit(*self.wanted[number])
        completion.subscribe(lambda: loop.call_soon_threadsafe(changed.set))
        if dice.random() < cancel:
            await asyncio.sleep(0)
            completion.cancel()
        while not completion.done:
            await changed.wait()
            changed.clear()
        self._check(number, completion)


def nothing_held(engine: Engine) -> bool:
    def look() -> bool:
        nodes = engine._loop.tiers._tree.nodes()
        rows = engine._parts.prepared.runner._rows._taken
        return not (engine._loop.tiers._leases or rows or any(n.pins for n in nodes))

    return bool(on_engine_thread(engine, look)) and engine._door._waiting == 0


def run(engine: Engine, tasks: int, threads: int) -> None:
    crowd = Crowd(engine, tasks, threads)
    assert engine.stats().decoding == "invariant"
    for cancel in (0.0, 0.5):
        crowd.threads_at_once(cancel)
        asyncio.run(crowd.tasks_at_once(cancel))
    assert crowd.answered >= 2 * tasks
    assert crowd.answered + crowd.cancelled == 4 * tasks
    assert nothing_held(engine)
    assert engine.check().ok
    stats = engine.stats()
    assert stats.running == stats.waiting == stats.failed == 0
    assert stats.working_bytes >= 0


def test_a_small_crowd(make_engine: Any) -> None:
    run(make_engine(order="cache_aware", max_batch_size=5, store_answers=True), 12, 8)


@pytest.mark.stress
@pytest.mark.parametrize("dram", ["150KiB", "4MiB"])
def test_a_large_crowd(make_engine: Any, dram: str) -> None:
    engine = make_engine(
        order="cache_aware",
        dram_bytes=dram,
        store_answers=True,
        max_prefill_tokens=32,
        resident_rows=2,
    )
    run(engine, 200, 64)


def test_a_dead_engine_thread_fails_everybody_with_the_cause(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(max_batch_size=3)
    cause = MemoryError("the tree")

    def broken() -> None:
        raise cause

    completions = [
        engine.submit(prompt, SamplingParams(max_tokens=200)) for prompt, _ in work(6)
    ]
    stream = completions[0].stream()  # kept: one that is let go of cancels
    next(stream)
    monkeypatch.setattr(engine._loop.tiers, "poll", broken)
    for completion in completions:
        with pytest.raises(EngineClosedError, match="the tree") as caught:
            completion.result(60)
        assert caught.value.__cause__ is cause
    monkeypatch.undo()
