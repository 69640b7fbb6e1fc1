"""What the engine's tests share: prompts, answers, and a disk that can be slow."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from pcr_core import Completion, Engine, Result, SamplingParams
from pcr_core.index.chunk import ChunkKey, chunk_keys
from pcr_core.stats import CacheStats
from pcr_core.tiers import ChunkStore

GREEDY = SamplingParams(max_tokens=4, logprobs=True)
_PATIENCE = 60.0
_numbers = itertools.count()


def fresh(length: int) -> list[int]:
    """A prompt that no other test has used."""
    return random.Random(f"kit {next(_numbers)}").choices(range(256), k=length)


def ask(engine: Engine, prompt: Any, **options: Any) -> Result:
    """Generate a few tokens."""
    return engine.submit(prompt, GREEDY, **options).result(_PATIENCE)


def answer(result: Result) -> tuple[list[int], list[float] | None]:
    """What must not depend on the cache."""
    return result.token_ids, result.logprobs


def keys_of(engine: Engine, tokens: Sequence[int]) -> list[ChunkKey]:
    """Chunk keys of a prompt."""
    return chunk_keys(
        engine._parts.prepared.namespace, tokens, engine.config.chunk_tokens
    )


def on_engine_thread(engine: Engine, function: Callable[[], Any]) -> Any:
    """Look inside while nothing else happens there."""
    return engine._door.call(function).result(_PATIENCE)


def states(engine: Engine, tokens: Sequence[int]) -> list[str]:
    """Tier of each full chunk of a prompt."""
    keys = keys_of(engine, tokens)
    found: list[str] = on_engine_thread(engine, lambda: engine._loop.tiers.match(keys))
    return found


def until(condition: Callable[[], bool], what: str = "it") -> None:
    """Poll for something that another thread will do; fail after a minute."""
    deadline = time.monotonic() + _PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"{what} has not happened"
        time.sleep(0.005)


def chunk_files(folder: Path) -> list[Path]:
    """The chunk files of a cache folder."""
    return sorted((folder / "kv" / "chunks").glob("*.safetensors"))


def stored_tokens(folder: Path) -> dict[str, list[int]]:
    """Token ids that each chunk file says it belongs to, by key."""
    found = {}
    for path in chunk_files(folder):
        with safe_open(path, framework="np") as file:
            metadata = file.metadata()
        packed = memoryview(bytes.fromhex(metadata["tokens_u32le"])).cast("I")
        found[path.stem] = list(packed)
    return found


def slots_for(engine: Engine, chunks: int) -> int:
    """DRAM bytes that hold so many chunks."""
    return int(engine._loop.tiers._format.layout.nbytes) * chunks


def uncached(engine: Engine) -> Engine:
    """The same engine, reusing nothing from now on."""
    engine._parts.prepared.runner.usable_chunks = lambda tokens: 0  # type: ignore[method-assign]
    return engine


def cache(engine: Engine) -> CacheStats:
    """Counters as they are now; also while the engine's thread waits for something."""
    return engine._loop.tiers.stats.snapshot()


def is_reading(engine: Engine) -> bool:
    """Whether a read is queued or under way."""
    io = engine._loop.tiers._io
    with io._lock:
        return bool(io._reads or io._running)


@contextmanager
def paused(engine: Engine, running: Callable[[], Completion]) -> Iterator[Completion]:
    """A request whose engine waits after its first token until the block ends.

    Args:
        engine: Is to run it.
        running: Submits it. The listener is there before anything happens: one that
            subscribes to a request under way may come too late to pause anything.
    """
    subscribed, entered, gate = (threading.Event() for _ in range(3))

    def pause() -> None:
        entered.set()
        assert gate.wait(_PATIENCE), "the block has not ended"

    engine._door.call(lambda: subscribed.wait(_PATIENCE))
    completion = running()
    completion.subscribe(pause)
    subscribed.set()
    assert entered.wait(_PATIENCE), "the request has not begun"
    try:
        yield completion
    finally:
        gate.set()


@contextmanager
def busy(engine: Engine, prompts: Sequence[Any] = ()) -> Iterator[list[Completion]]:
    """A request is running, with these behind it, until the block ends."""
    submitted, entered, gate = (threading.Event() for _ in range(3))

    def pause() -> None:
        entered.set()
        assert gate.wait(_PATIENCE), "the block has not ended"

    engine._door.call(lambda: submitted.wait(_PATIENCE))
    running = engine.submit(fresh(5), SamplingParams(max_tokens=1))
    running.subscribe(pause)
    waiting = [engine.submit(prompt, GREEDY) for prompt in prompts]
    submitted.set()
    assert entered.wait(_PATIENCE), "the request has not begun"
    try:
        yield waiting
    finally:
        gate.set()


class Reads:
    """Reads of chunks: counted, and held back while the gate is closed.

    Attributes:
        begun: How many have begun, those layer by layer included.
        seconds: What each takes at least.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = 0
        self.seconds = 0.0
        self._gate = threading.Event()
        self._gate.set()
        self._lock = threading.Lock()
        read, read_layers = ChunkStore.read, ChunkStore.read_layers

        def held_back(store: ChunkStore, job: Any) -> None:
            self._pass(1)
            read(store, job)

        def layers_held_back(store: ChunkStore, jobs: Any) -> Iterator[None]:
            self._pass(len(jobs))
            for job in jobs:
                job.seconds += self.seconds
            yield from read_layers(store, jobs)

        monkeypatch.setattr(ChunkStore, "read", held_back)
        monkeypatch.setattr(ChunkStore, "read_layers", layers_held_back)

    def _pass(self, chunks: int) -> None:
        with self._lock:
            self.begun += chunks
        assert self._gate.wait(60), "the gate was never opened"
        time.sleep(chunks * self.seconds)

    def open(self) -> None:
        """Let them through."""
        self._gate.set()

    def close(self) -> None:
        """Hold them back."""
        self._gate.clear()


def gated_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reads]:
    """The body of a fixture that is to be set up before any engine."""
    reads = Reads(monkeypatch)
    yield reads
    reads.open()
