"""Storage trouble costs time, never an answer; it is counted, and logged once."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pcr_core import ConfigError, Engine, Result, SamplingParams
from pcr_core.tiers.store.files import Files

PARAMS = SamplingParams(max_tokens=4, logprobs=True)
PROMPT = [number % 251 for number in range(200)]  # 6 chunks and 8 tokens


def ask(engine: Engine) -> Result:
    return engine.generate(PROMPT, PARAMS)


def same(a: Result, b: Result) -> bool:
    return (a.token_ids, a.logprobs) == (b.token_ids, b.logprobs)


def chunk_files(folder: Path) -> list[Path]:
    return sorted((folder / "kv" / "chunks").glob("*.safetensors"))


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-100] ^= 1
    path.write_bytes(raw)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 10)


@pytest.mark.parametrize(
    ("damage", "counter"),
    [(flip, "corrupt"), (truncate, "corrupt"), (Path.unlink, "missing")],
)
def test_a_file_damaged_while_running(
    make_engine: Any,
    tmp_path: Path,
    damage: Callable[[Path], None],
    counter: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = make_engine()
    before = ask(first)
    first.close()
    engine = make_engine()
    for path in chunk_files(tmp_path)[1:4]:
        damage(path)
    with caplog.at_level(logging.WARNING):
        after = ask(engine)
    assert same(before, after)
    assert after.usage.cached_by_tier == {"ssd": 32 * 3}
    assert after.usage.computed_tokens == 200 - 32 * 3
    assert getattr(engine.stats().cache, counter) == 3
    assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == 1
    assert engine.flush(60)
    assert engine.check().ok, "what was lost has been stored again"
    engine.close()
    assert ask(make_engine()).usage.cached_by_tier == {"ssd": 192}


@pytest.mark.parametrize("damage", [flip, truncate, Path.unlink])
def test_a_file_damaged_between_two_runs(
    make_engine: Any, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    first = make_engine()
    before = ask(first)
    first.close()
    damage(chunk_files(tmp_path)[2])
    engine = make_engine()
    after = ask(engine)
    assert same(before, after)
    assert after.usage.cached_by_tier == {"ssd": 32 * 5}
    assert engine.check().ok


def _full(self: Files, fd: int, buffers: Any) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk(
    make_engine: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = make_engine()
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(Files, "writev", _full)
        before = ask(engine)
        assert engine.flush(60)
        stats = engine.stats().cache
        assert stats.write_errors > 0
        assert stats.ssd_chunks == 0
        again = ask(engine)
    assert same(before, again)
    assert again.usage.cached_by_tier == {"dram": 192}
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1
    assert "storage trouble" in str(engine.stats())
    assert engine.check().ok


def test_a_disk_that_cannot_be_read(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make_engine()
    before = ask(first)
    first.close()
    engine = make_engine()

    def broken(self: Files, fd: int, buffers: Any, at: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(Files, "preadv", broken)
        after = ask(engine)
    assert same(before, after)
    assert after.usage.cached_tokens == 0
    assert engine.stats().cache.read_errors == 6


def test_the_folder_is_deleted_while_running(
    make_engine: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(dram_bytes="100KiB")
    before = ask(engine)
    assert engine.flush(60)
    shutil.rmtree(tmp_path / "kv")
    other = [7] * 300
    with caplog.at_level(logging.WARNING):
        engine.generate(other, PARAMS)  # pushes the first prompt out of DRAM
        after = ask(engine)
    assert same(before, after)
    assert engine.flush(60)
    stats = engine.stats().cache
    assert stats.missing + stats.write_errors + stats.read_errors > 0
    assert len(caplog.records) <= 3, "once per kind of trouble"
    engine.close()
    fresh = make_engine()
    assert same(ask(fresh), before)
    assert fresh.check().ok


def test_no_room_on_ssd_for_the_whole_prompt(make_engine: Any) -> None:
    engine = make_engine(ssd_bytes="90KiB")
    before = ask(engine)
    assert engine.flush(60)
    assert 0 < engine.stats().cache.ssd_chunks < 6
    engine.close()
    again = make_engine(ssd_bytes="90KiB")
    after = ask(again)
    assert same(before, after)
    assert 0 < after.usage.cached_tokens < 192


def test_no_room_in_dram_for_the_whole_prompt(make_engine: Any) -> None:
    engine = make_engine(dram_bytes="60KiB", ssd_bytes=0)
    before, after = ask(engine), ask(engine)
    assert same(before, after)
    assert 0 < after.usage.cached_tokens < 192
    assert engine.stats().cache.bypassed_inserts > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ssd_bytes": "1KiB"}, "ssd_bytes"),
        ({"namespace": "me", "namespace_bytes": "1KiB"}, "namespace_bytes"),
        ({"ssd_bytes": "16KiB", "trace": "/nonexistent/trace"}, "trace"),
        ({"ssd_bytes": "16KiB", "dram_bytes": 16}, "dram_bytes"),
    ],
)
def test_a_refused_configuration_removes_nothing(
    make_engine, tmp_path, settings, message
):
    """Opening a folder with a smaller budget trims it; being refused does not."""
    with make_engine() as engine:
        ask(engine)
        engine.flush()
    stored = chunk_files(tmp_path)
    assert len(stored) == 6
    with pytest.raises(ConfigError, match=message):
        make_engine(**settings)
    assert chunk_files(tmp_path) == stored
