"""What the engine's tests share: prompts, answers, and a disk that can be slow."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from pcr_core import Engine, Result, SamplingParams
from pcr_core.index.chunk import ChunkKey, chunk_keys
from pcr_core.tiers.files import Files

GREEDY = SamplingParams(max_tokens=4, logprobs=True)
_PATIENCE = 15.0
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
    return chunk_keys(engine._namespace, tokens, engine.config.chunk_tokens)


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


class Reads:
    """Reads of chunk files that wait for a gate."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = 0
        self._gate = threading.Event()
        self._lock = threading.Lock()
        read = Files.preadv

        def preadv(files: Files, fd: int, buffers: Any, at: int) -> int:
            with self._lock:
                self.begun += 1
            assert self._gate.wait(_PATIENCE), "the gate was never opened"
            return read(files, fd, buffers, at)

        monkeypatch.setattr(Files, "preadv", preadv)

    def open(self) -> None:
        """Let them through, now and later."""
        self._gate.set()

    def close(self) -> None:
        """Hold them again."""
        self._gate.clear()


def gated_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reads]:
    """The body of a fixture."""
    reads = Reads(monkeypatch)
    yield reads
    reads.open()
