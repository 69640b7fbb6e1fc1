"""The engine loop driven by hand, one step at a time: no thread, no waiting."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pcr_core import (
    CancelledError,
    EngineClosedError,
    EngineConfig,
    ModelError,
)
from pcr_core.model import probe, setup
from tests.engine.loop_bench import CHUNK, PROMPT, Bench, opened_bench


@pytest.fixture(params=["shape-independent", "grid"])
def bench(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    probes: Path,
    make_tiny_model: Callable[..., Any],
    tiny_tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Bench]:
    (tmp_path / "probes").symlink_to(probes, target_is_directory=True)
    if request.param == "grid":
        monkeypatch.setattr(
            setup, "choose_cuts", lambda config, **_: setup.grid(config.chunk_tokens)
        )
    with opened_bench(tmp_path, make_tiny_model("llama"), tiny_tokenizer) as bench:
        assert bench.runner.cuts.name == request.param
        yield bench


def test_one_step_is_a_prefill_or_one_token(bench: Bench) -> None:
    request = bench.request()
    assert bench.loop.busy
    assert bench.loop.step() == 1
    pieces = [request.completion.take()]
    while bench.loop.busy:
        assert bench.loop.step() == 0
        pieces.append(request.completion.take())
    assert len(pieces) == 4
    assert request.completion.done
    assert bench.loop.step() == 0
    assert (bench.loop.finished, bench.loop.cancelled, bench.loop.failed) == (1, 0, 0)


def test_a_cancelled_request_is_gone_after_one_step(bench: Bench) -> None:
    running, waiting = bench.request(max_tokens=100), bench.request(max_tokens=100)
    bench.loop.step()
    bench.loop.step()
    running.completion.cancel()
    waiting.completion.cancel()
    bench.loop.step()
    assert running.completion.done
    bench.loop.step()
    assert waiting.completion.done
    assert not bench.loop.busy
    assert bench.loop.cancelled == 2
    for request in (running, waiting):
        with pytest.raises(CancelledError):
            request.completion.result(0)
    assert bench.nothing_held()
    assert bench.states() == ["dram"] * 6


def test_a_cancelled_prefill_keeps_the_chunks_it_finished(bench: Bench) -> None:
    bench.runner.cuts = setup.grid(CHUNK)  # one forward has nothing between chunks
    request = bench.request()
    calls = 0
    forward = bench.model.forward

    def cancel_at_the_third(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            request.completion.cancel()
        return forward(*args, **kwargs)

    bench.model.forward = cancel_at_the_third
    bench.loop.step()
    del bench.model.forward
    assert calls == 3
    with pytest.raises(CancelledError):
        request.completion.result(0)
    assert bench.states() == ["dram"] * 3 + ["none"] * 3
    assert bench.nothing_held()
    again = bench.finish(bench.request())
    assert again.usage.cached_by_tier == {"dram": 48}


def _poison(module: torch.nn.Module, _: Any, output: torch.Tensor) -> torch.Tensor:
    return output * float("nan")


def test_nan_logits_fail_that_request_and_leave_nothing(bench: Bench) -> None:
    before = bench.finish(bench.request())
    other = [9, *PROMPT]
    hook = bench.model.model.layers[0].register_forward_hook(
        lambda module, inputs, output: output * float("nan")
    )
    failed = bench.request(other)
    following = bench.request(PROMPT)
    bench.loop.step()
    hook.remove()
    with pytest.raises(ModelError, match=r"NaN.*float32"):
        failed.completion.result(0)
    assert bench.states(other) == ["none"] * 6, "KV of a failed forward was kept"
    after = bench.finish(following)
    assert after.token_ids == before.token_ids
    assert bench.finish(bench.request(other)).usage.cached_tokens == 0
    assert bench.loop.failed == 1
    assert bench.nothing_held()


def test_nothing_of_a_nan_prefill_is_seen_by_a_later_request(bench: Bench) -> None:
    """The row buffer is reused: NaN in it would come through every mask."""
    short = [7] * 530  # its last key block is one that the failed one has written
    expected = bench.finish(bench.request(short, logprobs=True))
    hook = bench.model.model.layers[1].register_forward_hook(
        lambda module, inputs, output: output * float("inf")
    )
    failed = bench.request([5] * 700)
    bench.loop.step()
    hook.remove()
    with pytest.raises(ModelError):
        failed.completion.result(0)
    again = bench.finish(bench.request(short, logprobs=True))
    assert again.token_ids == expected.token_ids
    assert again.logprobs == expected.logprobs


def test_a_forward_that_breaks_midway_leaves_no_nan(bench: Bench) -> None:
    short = [7] * 530  # its last key block is one that the failed one has written
    expected = bench.finish(bench.request(short, logprobs=True))

    def out_of_memory(*_: Any) -> None:
        raise RuntimeError("out of memory")

    layers = bench.model.model.layers
    hooks = [
        layers[0].register_forward_hook(lambda m, i, output: output * float("nan")),
        layers[2].register_forward_pre_hook(out_of_memory),
    ]
    failed = bench.request([5] * 700)
    bench.loop.step()
    for hook in hooks:
        hook.remove()
    with pytest.raises(ModelError, match="out of memory"):
        failed.completion.result(0)
    again = bench.finish(bench.request(short, logprobs=True))
    assert again.logprobs == expected.logprobs
    assert bench.nothing_held()


@pytest.mark.parametrize("error", [RuntimeError("kernel"), TypeError("model code")])
def test_any_error_of_the_model_is_that_requests(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise error

    failed, fine = bench.request([1] * 40), bench.request()
    with monkeypatch.context() as patch:
        patch.setattr(bench.model, "forward", broken)
        bench.loop.step()
    with pytest.raises(ModelError, match=str(error)) as caught:
        failed.completion.result(0)
    assert caught.value.__cause__ is error
    assert len(bench.finish(fine).token_ids) == 4
    assert bench.states([1] * 40) == ["none"] * 2


def test_an_error_while_decoding_keeps_the_prompt(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = bench.request()
    bench.loop.step()

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("kernel")

    with monkeypatch.context() as patch:
        patch.setattr(bench.model, "forward", broken)
        bench.loop.step()
    with pytest.raises(ModelError, match="kernel"):
        request.completion.result(0)
    assert not bench.loop.busy
    assert bench.states() == ["dram"] * 6


def test_abandon_fails_running_and_waiting(bench: Bench) -> None:
    running, waiting = bench.request(max_tokens=50), bench.request()
    bench.loop.step()
    bench.loop.abandon(EngineClosedError("over"))
    for request in (running, waiting):
        with pytest.raises(EngineClosedError, match="over"):
            request.completion.result(0)
    assert not bench.loop.busy


def test_a_listener_that_cancels_stops_the_next_step(bench: Bench) -> None:
    letters = dict.fromkeys(range(64, 90), 500.0)
    request = bench.request(max_tokens=100, logit_bias=letters)
    request.completion.subscribe(request.completion.cancel)
    bench.loop.step()
    assert bench.loop.busy
    bench.loop.step()
    assert not bench.loop.busy
    with pytest.raises(CancelledError):
        request.completion.result(0)


def test_the_verdict_decides_the_cuts(tmp_path: Path) -> None:
    for exact, free, name in (
        (None, True, "shape-independent"),
        (True, True, "shape-independent"),
        (False, True, "free"),
        (None, False, "free"),
        (True, False, "grid"),
    ):
        config = EngineConfig(exact=exact, chunk_tokens=CHUNK)
        assert setup.choose_cuts(config, exact_is_free=free).name == name
    assert probe.read_verdict(tmp_path / "none.json") is None
