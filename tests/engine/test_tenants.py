"""Namespaces separate tenants end to end, and their quotas hold in real bytes."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from pcr_core import ConfigError, Engine
from tests.engine.kit import (
    answer,
    ask,
    chunk_files,
    fresh,
    keys_of,
    slots_for,
    states,
)

FILES = 4


@pytest.fixture(scope="module")
def file_bytes(engine: Engine) -> int:
    """Size of one chunk file."""
    return int(engine._loop.tiers._format.file_nbytes)


def stored_bytes(folder: Path, engine: Engine) -> int:
    """Real bytes of the chunk files of an engine's namespace."""
    total = 0
    for path in chunk_files(folder):
        with safe_open(path, framework="np") as file:
            owner = file.metadata()["namespace"]
        total += path.stat().st_size * (
            owner == engine._parts.prepared.namespace.root.hex()
        )
    return total


def put(engine: Engine, chunks: int) -> list[int]:
    prompt = fresh(chunks * 32 + 1)
    ask(engine, prompt)
    assert engine.flush(60)
    return prompt


def test_equal_prompts_share_nothing(make_engine: Any, tmp_path: Path) -> None:
    one, two = make_engine(namespace="one"), make_engine(namespace="two")
    prompt = put(one, 5)
    assert states(two, prompt) == ["none"] * 5
    two.prefetch(prompt)
    assert two.stats().cache.prefetch_issued == 0
    result = ask(two, prompt)
    assert result.usage.cached_tokens == 0
    assert answer(result) == answer(ask(one, prompt))
    assert two.flush(60)
    assert len(chunk_files(tmp_path)) == 10
    assert set(keys_of(one, prompt)).isdisjoint(keys_of(two, prompt))
    assert one.check().ok
    assert two.check().ok


def test_the_same_namespace_shares(make_engine: Any) -> None:
    one, two = make_engine(namespace="one"), make_engine(namespace="one")
    prompt = put(one, 5)
    assert ask(two, prompt).usage.cached_by_tier == {"ssd": 160}


def test_no_name_is_another_namespace_than_any_name(make_engine: Any) -> None:
    nobody = make_engine()
    prompt = put(nobody, 3)
    for name in ("a", " ", "tenant", "é", "0"):
        assert states(make_engine(namespace=name), prompt) == ["none"] * 3


def test_a_quota_holds_while_others_keep_theirs(
    make_engine: Any, file_bytes: int, tmp_path: Path
) -> None:
    small = make_engine(namespace="small", namespace_bytes=FILES * file_bytes + 100)
    other = make_engine(namespace="other", ssd_bytes="40MiB")
    kept = put(other, 6)
    for _ in range(6):
        put(small, 3)
        assert 0 < stored_bytes(tmp_path, small) <= FILES * file_bytes
    newest = put(small, FILES)
    assert states(small, newest) == ["dram"] * FILES
    assert stored_bytes(tmp_path, small) == FILES * file_bytes
    assert stored_bytes(tmp_path, other) == 6 * file_bytes
    assert small.stats().cache.ssd_evictions > 0
    assert small.check().ok
    other.close()
    with make_engine(namespace="other") as again:
        assert ask(again, kept).usage.cached_by_tier == {"ssd": 6 * 32}


def test_a_quota_holds_at_every_moment(
    make_engine: Any, file_bytes: int, tmp_path: Path
) -> None:
    quota = FILES * file_bytes
    engine = make_engine(namespace="small", namespace_bytes=quota)
    over: list[int] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            sizes = []
            for path in (tmp_path / "kv" / "chunks").iterdir():
                try:
                    sizes.append(path.stat().st_size)
                except FileNotFoundError:
                    continue
            if sum(sizes) > quota:
                over.append(sum(sizes))

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(15):
        ask(engine, fresh(100))
    assert engine.flush(60)
    done.set()
    watcher.join()
    assert not over
    assert 0 < stored_bytes(tmp_path, engine) <= quota


def test_two_engines_of_a_tenant_share_its_quota(
    make_engine: Any, file_bytes: int, tmp_path: Path
) -> None:
    settings = {"namespace": "small", "namespace_bytes": FILES * file_bytes}
    engines = [make_engine(**settings) for _ in range(2)]
    for number in range(8):
        ask(engines[number % 2], fresh(100))
    for engine in engines:
        assert engine.flush(60)
        assert engine.check().ok
    assert 0 < stored_bytes(tmp_path, engines[0]) <= FILES * file_bytes


def test_a_quota_survives_a_restart_and_can_shrink(
    make_engine: Any, file_bytes: int, tmp_path: Path
) -> None:
    with make_engine(namespace="small", namespace_bytes=6 * file_bytes) as first:
        prompt = put(first, 6)
        assert stored_bytes(tmp_path, first) == 6 * file_bytes
    with make_engine(namespace="small", namespace_bytes=3 * file_bytes) as second:
        assert stored_bytes(tmp_path, second) == 3 * file_bytes
        assert states(second, prompt) == ["ssd"] * 3 + ["none"] * 3, "leaves went"
        put(second, 3)
        assert stored_bytes(tmp_path, second) == 3 * file_bytes
        assert second.check().ok


def test_the_folder_is_shared_by_all_tenants(
    make_engine: Any, file_bytes: int, tmp_path: Path
) -> None:
    budget = 8 * file_bytes
    one = make_engine(namespace="one", ssd_bytes=budget)
    two = make_engine(namespace="two", ssd_bytes=budget)
    put(one, 6)
    put(two, 6)
    assert stored_bytes(tmp_path, two) == 6 * file_bytes, "the newest stay"
    assert stored_bytes(tmp_path, one) == 2 * file_bytes
    assert one.check().ok
    assert two.check().ok


def test_a_quota_below_one_chunk(make_engine: Any, file_bytes: int) -> None:
    with pytest.raises(ConfigError, match=rf"namespace_bytes.*at least {file_bytes}"):
        make_engine(namespace="small", namespace_bytes=file_bytes - 1)
    engine = make_engine(namespace="small", namespace_bytes=file_bytes)
    prompt = put(engine, 3)
    engine.close()
    again = make_engine(namespace="small", namespace_bytes=file_bytes)
    assert ask(again, prompt).usage.cached_by_tier == {"ssd": 32}


def test_a_quota_of_no_name(make_engine: Any, file_bytes: int, tmp_path: Path) -> None:
    with make_engine(namespace="other") as other:
        put(other, 4)
    engine = make_engine(namespace_bytes=2 * file_bytes)
    put(engine, 5)
    assert stored_bytes(tmp_path, engine) == 2 * file_bytes
    assert stored_bytes(tmp_path, other) == 4 * file_bytes


def test_dram_is_of_one_tenant_only(make_engine: Any) -> None:
    """One engine has one namespace: nothing of another's is ever brought to DRAM."""
    with make_engine(namespace="one") as one:
        prompt = put(one, 5)
    two = make_engine(namespace="two")
    two = make_engine(namespace="two", dram_bytes=slots_for(two, 6))
    ask(two, prompt)
    held = set(two._loop.tiers._dram.slots)
    assert held == set(keys_of(two, prompt))
