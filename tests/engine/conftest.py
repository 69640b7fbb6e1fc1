"""Real engines on tiny models. What the start-up probe finds is shared by all tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from pcr_core import Engine, EngineConfig
from pcr_core.tiers import ChunkStore

CHUNK = 32
"""Two row tiles: of a last full chunk, only one is run again for the logits."""


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """On a busy machine two threads that wait for each other take 20 times longer."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def probes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engine-probes")


def _share_probes(folder: Path, probes: Path) -> Path:
    if not (folder / "probes").exists():
        (folder / "probes").symlink_to(probes, target_is_directory=True)
    return folder


MakeEngine = Callable[..., Engine]


@contextmanager
def _maker(
    folder: Path, probes: Path, make_tiny_model: Any, tokenizer: Any
) -> Iterator[MakeEngine]:
    made: list[Engine] = []

    def make(*, model: Any = None, cache_dir: Path | None = None, **settings: Any):
        where = cache_dir or _share_probes(folder, probes)
        options = {
            "cache_dir": where,
            "chunk_tokens": CHUNK,
            "dram_bytes": "1MiB",
            "ssd_bytes": "4MiB",
            "resident_rows": 0,
            "store_answers": False,
            **settings,
        }
        objects = {}
        if isinstance(model, Path):
            options["model"] = str(model)
        else:
            loaded = make_tiny_model("llama") if model is None else model
            objects = {"model": loaded, "tokenizer": tokenizer}
        made.append(Engine(EngineConfig(**options), **objects))
        store = made[-1]._loop.tiers._store
        if isinstance(store, ChunkStore):
            store._least_read = 1  # the layers are tiny, but each is to come by itself
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def make_engine(
    tmp_path: Path, probes: Path, make_tiny_model: Any, tiny_tokenizer: Any
) -> Iterator[MakeEngine]:
    """``make_engine(**settings)``: an engine on a tiny Llama, in this test's folder.

    ``model=`` takes another loaded model, or the folder of one. Called twice, both
    engines share the cache folder: close the first for a restart.
    """
    with _maker(tmp_path, probes, make_tiny_model, tiny_tokenizer) as make:
        yield make


@pytest.fixture(scope="module")
def engine(
    tmp_path_factory: pytest.TempPathFactory,
    probes: Path,
    make_tiny_model: Any,
    tiny_tokenizer: Any,
) -> Iterator[Engine]:
    """One engine per module, for tests that leave it as they found it."""
    folder = tmp_path_factory.mktemp("engine")
    with _maker(folder, probes, make_tiny_model, tiny_tokenizer) as make:
        yield make()


class Hold:
    """Keeps an engine's thread from working until the block ends."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._gate = threading.Event()

    def __enter__(self) -> Hold:
        entered = threading.Event()

        def wait() -> None:
            entered.set()
            assert self._gate.wait(60)

        self._future = self._engine._door.call(wait)
        assert entered.wait(60)
        return self

    def release(self) -> None:
        self._gate.set()
        self._future.result(60)

    def __exit__(self, *_: object) -> None:
        self.release()


@pytest.fixture
def hold() -> Callable[[Engine], Hold]:
    """``with hold(engine):`` what is submitted inside starts after the block."""
    return Hold


@pytest.fixture(scope="session")
def chunk() -> int:
    """Tokens per chunk of these engines."""
    return CHUNK
