"""Which engine a wrapper gets, and what importing it costs."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from pcr_core import ConfigError, EngineConfig, ModelError
from pcr_integrations._engines import EngineRegistry, check_settings, engine_for


class Stub:
    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.closed = False

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def registry() -> EngineRegistry:
    return EngineRegistry(build=Stub)  # type: ignore[arg-type]


def test_equal_configurations_share_one_engine(registry: EngineRegistry) -> None:
    first = registry.get(EngineConfig(model="a", dram_bytes="1GiB"))
    again = registry.get(EngineConfig(model="a", dram_bytes=1024**3))
    assert first is again


def test_a_tilde_is_the_folder_it_stands_for(registry: EngineRegistry) -> None:
    home = os.path.expanduser("~")
    assert registry.get(EngineConfig(cache_dir="~/c")) is registry.get(
        EngineConfig(cache_dir=f"{home}/c")
    )


@pytest.mark.parametrize(
    "other", [{"model": "b"}, {"namespace": "x"}, {"cache_dir": "elsewhere"}]
)
def test_different_configurations_do_not_share(
    registry: EngineRegistry, other: dict[str, Any]
) -> None:
    assert registry.get(EngineConfig(model="a")) is not registry.get(
        EngineConfig(**{"model": "a", **other})
    )


def test_a_closed_engine_is_rebuilt(registry: EngineRegistry) -> None:
    first = registry.get(EngineConfig())
    first.close()
    second = registry.get(EngineConfig())
    assert second is not first
    assert not second.closed


def test_closing_the_registry_closes_every_engine(registry: EngineRegistry) -> None:
    engines = [registry.get(EngineConfig(model=name)) for name in "ab"]
    registry.close()
    assert all(engine.closed for engine in engines)


def test_a_failed_build_is_tried_again() -> None:
    tries: list[EngineConfig] = []

    def build(config: EngineConfig) -> Any:
        tries.append(config)
        if len(tries) == 1:
            raise ModelError("no such model")
        return Stub(config)

    registry = EngineRegistry(build=build)
    with pytest.raises(ModelError, match="no such model"):
        registry.get(EngineConfig())
    assert registry.get(EngineConfig()).config == EngineConfig()


def test_many_threads_build_one_engine() -> None:
    all_here = threading.Barrier(8)
    built: list[Stub] = []

    def build(config: EngineConfig) -> Any:
        built.append(Stub(config))
        return built[-1]

    registry = EngineRegistry(build=build)

    def ask() -> None:
        all_here.wait()
        registry.get(EngineConfig())

    _in_threads([ask] * 8)
    assert len(built) == 1


def test_a_slow_build_does_not_hold_up_another_model() -> None:
    quick_is_built = threading.Event()

    def build(config: EngineConfig) -> Any:
        if config.model == "slow":
            assert quick_is_built.wait(30), "the quick model waited for the slow one"
        else:
            quick_is_built.set()
        return Stub(config)

    registry = EngineRegistry(build=build)
    _in_threads(
        [
            lambda name=name: registry.get(EngineConfig(model=name))  # type: ignore[misc]
            for name in ("slow", "quick")
        ]
    )
    assert quick_is_built.is_set()


def _in_threads(jobs: list[Callable[[], object]]) -> None:
    failures: list[BaseException] = []

    def guarded(job: Callable[[], object]) -> None:
        try:
            job()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_after_fork_the_child_starts_empty(registry: EngineRegistry) -> None:
    parents = registry.get(EngineConfig())
    registry.forget_parent()
    assert registry.get(EngineConfig()) is not parents
    assert not parents.closed


def test_an_explicit_engine_wins() -> None:
    engine: Any = Stub(EngineConfig())
    assert engine_for(engine, {}) is engine


def test_an_explicit_engine_beside_settings_is_refused() -> None:
    engine: Any = Stub(EngineConfig())
    with pytest.raises(ConfigError, match=r"engine= .* cache_dir, model"):
        engine_for(engine, {"model": "a", "cache_dir": "x"})


LIGHT = """
import sys
import {module}
{construct}
heavy = [name for name in ("torch", "transformers", "lmdb") if name in sys.modules]
assert not heavy, heavy
"""


@pytest.mark.parametrize(
    ("module", "construct"),
    [
        ("pcr_integrations", ""),
        (
            "pcr_integrations.langchain as lc",
            "lc.ChatPCR(model='m', stop='x'); lc.PCRLLM(model='m')",
        ),
        (
            "pcr_integrations.llama_index as li",
            "li.PCRLLM(model_name='m', max_new_tokens=3)",
        ),
        ("pcr_integrations.retrieval as staged", "staged.StagedFaissIndex"),
    ],
)
def test_importing_and_constructing_loads_no_torch(module: str, construct: str) -> None:
    _run(LIGHT.format(module=module, construct=construct))


MISSING = """
import sys
sys.modules["{package}"] = None
try:
    import {module}
except ImportError as error:
    assert 'pip install "pcr-rag[{extra}]"' in str(error), error
else:
    raise AssertionError("imported without {package}")
"""


@pytest.mark.parametrize(
    ("module", "package", "extra"),
    [
        ("pcr_integrations.langchain", "langchain_core", "langchain"),
        ("pcr_integrations.llama_index", "llama_index.core", "llama-index"),
        ("pcr_integrations.retrieval", "faiss", "retrieval"),
    ],
)
def test_a_missing_extra_is_named(module: str, package: str, extra: str) -> None:
    _run(MISSING.format(module=module, package=package, extra=extra))


def _run(script: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("wrong", ["x", 3, EngineConfig()])
def test_something_else_as_engine_is_refused_at_once(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="engine= takes an Engine, not"):
        check_settings(wrong, {})
