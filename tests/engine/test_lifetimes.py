"""Engines end cleanly, however they end, and nobody is left waiting."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from pcr_core import ConfigError, Engine, EngineClosedError, SamplingParams

FEW = SamplingParams(max_tokens=3)
PROMPT = list(range(70))


def test_close_fails_what_waits(make_engine: Any, hold: Any) -> None:
    engine = make_engine()
    with hold(engine):
        waiting = [engine.submit(PROMPT, FEW) for _ in range(3)]
        closer = threading.Thread(target=engine.close)
        closer.start()
        while not engine.closed:
            pass
    closer.join(60)
    assert not closer.is_alive()
    for completion in waiting:
        with pytest.raises(EngineClosedError, match="closed"):
            completion.result(60)


def test_a_closed_engine_says_so(make_engine: Any) -> None:
    engine = make_engine()
    engine.generate(PROMPT, FEW)
    engine.close()
    engine.close()
    assert engine.closed
    for use in (
        lambda: engine.submit(PROMPT, FEW),
        lambda: engine.generate("hello"),
        engine.stats,
        engine.flush,
        engine.check,
    ):
        with pytest.raises(EngineClosedError, match="build a new one"):
            use()
    assert engine.encode("still a tokenizer")


def test_leaving_the_block_closes(make_engine: Any) -> None:
    with make_engine() as engine:
        assert not engine.closed
    assert engine.closed


@pytest.mark.parametrize("error", [SystemExit(3), RuntimeError("broken tier")])
def test_a_dying_thread_fails_every_waiter_with_the_cause(
    make_engine: Any, hold: Any, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    engine = make_engine()

    def die() -> None:
        monkeypatch.undo()
        raise error

    with hold(engine):
        waiting = [engine.submit(PROMPT, FEW) for _ in range(3)]
        monkeypatch.setattr(engine._loop.tiers, "poll", die)
    for completion in waiting:
        with pytest.raises(EngineClosedError, match="thread died") as caught:
            completion.result(60)
        assert caught.value.__cause__ is error
    with pytest.raises(EngineClosedError, match="thread died") as caught:
        engine.submit(PROMPT, FEW)
    assert caught.value.__cause__ is not None
    assert caught.value.__cause__.__cause__ is error
    assert engine.closed
    engine.close()


def test_threads_and_files_are_gone_after_close(
    make_engine: Any, check_thread_leaks: None, check_fd_leaks: None
) -> None:
    engine = make_engine()
    names = {t.name for t in threading.enumerate() if t.name.startswith("pcr-")}
    assert "pcr-engine" in names
    assert len(names) > 1
    engine.generate(PROMPT, FEW)
    engine.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("pcr-")]


def test_threads_of_torch_are_put_back(make_engine: Any) -> None:
    def of_a_new_thread() -> int:
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        return found[0]

    before = of_a_new_thread(), torch.get_num_threads()
    with make_engine(threads=3) as engine:
        assert engine.stats().threads == 3
        assert torch.get_num_threads() == before[1]
    assert (of_a_new_thread(), torch.get_num_threads()) == before
    with pytest.raises(ConfigError):
        make_engine(threads=3, ssd_bytes=5)
    assert of_a_new_thread() == before[0]


def test_a_failed_start_leaves_no_thread(
    make_engine: Any, check_thread_leaks: None, check_fd_leaks: None
) -> None:
    with pytest.raises(ConfigError):
        make_engine(ssd_bytes=5)


def test_a_forgotten_engine_ends(
    make_tiny_model: Any, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    """A notebook that builds a second engine under the first one's name."""
    from pcr_core import EngineConfig

    config = EngineConfig(cache_dir=tmp_path, dram_bytes="1MiB", ssd_bytes=0)
    model = make_tiny_model("llama")
    engine = Engine(config, model=model, tokenizer=tiny_tokenizer)
    thread, gone = engine._thread, weakref.ref(engine)
    completion = engine.submit(PROMPT, FEW)
    del engine
    assert completion.result(60).token_ids, "a request under way keeps its engine"
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()
    assert gone() is None


def test_a_forked_child_is_told(make_engine: Any) -> None:
    engine = make_engine()
    before = engine.generate(PROMPT, FEW).token_ids
    with warnings.catch_warnings():
        # Forking a process with threads is what this is about.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        verdict = 1
        try:
            engine.close()
            engine.submit(PROMPT, FEW)
        except EngineClosedError as error:
            verdict = 0 if "fork" in str(error) else 2
        finally:
            os._exit(verdict)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert engine.generate(PROMPT, FEW).token_ids == before


def test_two_engines_on_one_model(make_engine: Any, tiny_llama: Any) -> None:
    first = make_engine(model=tiny_llama)
    before = first.generate(PROMPT, FEW).token_ids
    with pytest.raises(ConfigError, match="another engine uses this model"):
        make_engine(model=tiny_llama)
    assert first.generate(PROMPT, FEW).token_ids == before
    first.close()
    assert make_engine(model=tiny_llama).generate(PROMPT, FEW).token_ids == before


def test_two_engines_on_one_folder(make_engine: Any) -> None:
    first, second = make_engine(), make_engine()
    before = first.generate(PROMPT, FEW)
    assert first.flush(60)
    after = second.generate(PROMPT, FEW)
    assert after.usage.cached_by_tier == {"ssd": 64}
    assert after.token_ids == before.token_ids


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_model_is_given_back_as_it_was(
    make_engine: Any, make_tiny_model: Any, dtype: torch.dtype
) -> None:
    model, ids = make_tiny_model("qwen2").to(dtype), torch.tensor([PROMPT])
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainable = {name: p.requires_grad for name, p in model.named_parameters()}
    attributes = {name: set(vars(m)) for name, m in model.named_modules()}
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 258}
    with torch.inference_mode():
        logits = model(ids).logits
        answer = model.generate(ids, **options)
    engine = make_engine(model=model)
    engine.generate(PROMPT, FEW)
    engine.close()
    assert {n: p.requires_grad for n, p in model.named_parameters()} == trainable
    for name, parameter in model.named_parameters():
        assert parameter.dtype is dtype
        assert torch.equal(parameter, weights[name]), name
        assert parameter.is_contiguous()
    assert {name: set(vars(m)) for name, m in model.named_modules()} == attributes
    assert model.config._attn_implementation == "sdpa"
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, logits)
        assert torch.equal(model.generate(ids, **options), answer)
    model.save_pretrained(engine.config.cache_path / "saved")


def test_an_open_engine_is_closed_at_exit(tiny_llama_dir: Path, tmp_path: Path) -> None:
    """A script that forgets to close still stores what it computed."""
    script = (
        "from pcr_core import *\n"
        f"config = EngineConfig(model={str(tiny_llama_dir)!r}, threads=1,\n"
        f"    cache_dir={str(tmp_path)!r}, dram_bytes='1MiB', chunk_tokens=32)\n"
        "engine = Engine(config)\n"
        "r = engine.generate(list(range(70)), SamplingParams(max_tokens=1))\n"
        "print(r.usage.cached_tokens)\n"
    )
    for expected in ("0", "64"):
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", script],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == [expected]


def test_memory_is_flat_over_many_requests(make_engine: Any) -> None:
    engine = make_engine(dram_bytes="200KiB", ssd_bytes="600KiB")
    seen = []
    for number in range(200):
        prompt = [number % 7] * 40 + [number % 250] * (number % 90)
        engine.generate(prompt, SamplingParams(max_tokens=1))
        if number >= 150:
            seen.append(engine._door.call(lambda: _held(engine)).result(60))
    assert {held[0] for held in seen} == {0}, "pins"
    assert {held[1] for held in seen} == {0}, "leases"
    assert len({held[3] for held in seen}) == 1, "working memory grew"
    slots = engine._loop.tiers._pool.capacity
    files = 600 * 1024 // engine._loop.tiers._format.file_nbytes
    assert max(held[2] for held in seen) <= slots + files + 4, "nodes"
    report = engine.check()
    assert report.ok, report
    stats = engine.stats().cache
    assert stats.dram_bytes <= stats.dram_budget <= 200 * 1024
    assert stats.ssd_bytes <= 600 * 1024
    assert stats.dram_evictions > 0
    assert stats.ssd_evictions > 0


def _held(engine: Engine) -> tuple[int, int, int, int]:
    """Pins, leases, tree nodes and working bytes; on the engine thread."""
    tiers = engine._loop.tiers
    nodes = list(tiers._tree.nodes())
    pins = sum(node.pins for node in nodes)
    return (
        pins,
        len(tiers._leases),
        len(nodes),
        engine._parts.prepared.runner.buffer_bytes,
    )


def test_a_closed_engine_that_is_still_held_gives_its_memory_back(
    make_engine: Any,
) -> None:
    engine = make_engine()
    engine.generate(PROMPT, FEW)
    pool, runner = engine._loop.tiers._pool, engine._parts.prepared.runner
    slab = weakref.ref(pool._slabs[0][0].bytes.obj)
    buffer = weakref.ref(runner._rows._resting[0].buffer.keys[0])
    engine.close()
    assert buffer() is None
    assert slab() is None
    assert runner.buffer_bytes == 0
    assert pool.allocate() is None
