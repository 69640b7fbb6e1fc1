"""What listeners, queued requests and odd models must not break."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import pytest
import torch

from pcr_core import (
    CancelledError,
    PromptTooLongError,
    SamplingParams,
    UnsupportedModelError,
)
from pcr_core.index.chunk import LayerShape
from pcr_core.model.row_buffer import RowBuffer

FEW = SamplingParams(max_tokens=3)
LONG = SamplingParams(max_tokens=400, min_tokens=400)
PROMPT = list(range(70))


def two_steps(engine: Any) -> None:
    """Wait until a step has ended that began after this call."""
    engine.stats()
    engine.stats()


def test_a_raising_listener_harms_nobody(make_engine: Any) -> None:
    engine = make_engine()
    expected = engine.generate(PROMPT, FEW).token_ids

    def broken() -> None:
        raise RuntimeError("Event loop is closed")

    completion = engine.submit(PROMPT, FEW)
    completion.subscribe(broken)
    assert completion.result(60).token_ids == expected
    assert engine.generate(PROMPT, FEW).token_ids == expected


def test_a_listener_may_ask_the_engine(make_engine: Any) -> None:
    engine = make_engine()
    seen: list[Any] = []
    done = threading.Event()
    completion = engine.submit(PROMPT, FEW)

    def ask() -> None:
        if completion.done:
            seen.extend([engine.stats().finished, engine.flush(), engine.check().ok])
            seen.append(engine.explain(PROMPT).hit_tokens)
            engine.prefetch(PROMPT)
            seen.append(engine.forget("nothing").keys)
            done.set()

    completion.subscribe(ask)
    completion.result(60)
    assert done.wait(60)
    assert seen[1:] == [True, True, 64, ()]


def test_a_listener_may_close_while_another_thread_closes(make_engine: Any) -> None:
    engine = make_engine()
    completion = engine.submit(PROMPT, LONG)
    completion.subscribe(lambda: engine.close() if completion.done else None)
    closer = threading.Thread(target=engine.close)
    closer.start()
    closer.join(60)
    assert not closer.is_alive()


def test_a_cancelled_request_leaves_the_queue_before_its_turn(make_engine: Any) -> None:
    engine = make_engine(max_queue=1)
    running = engine.submit(PROMPT, LONG)
    two_steps(engine)  # it has left the queue
    waiting = engine.submit(PROMPT, FEW)
    waiting.cancel()
    with pytest.raises(CancelledError):
        waiting.result(60)
    assert not running.done
    two_steps(engine)
    assert engine.submit(PROMPT, FEW) is not None  # there is room again
    running.cancel()


def test_a_failed_allocation_leaves_an_empty_buffer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    buffer = RowBuffer([LayerShape(1, 4, 4)] * 2, torch.float32, torch.device("cpu"))
    zeros = torch.zeros

    def fails(*args: Any, **options: Any) -> torch.Tensor:
        if buffer.keys:
            raise RuntimeError("not enough memory")
        return zeros(*args, **options)

    monkeypatch.setattr(torch, "zeros", fails)
    with pytest.raises(RuntimeError, match="not enough memory"):
        buffer.reserve(10)
    monkeypatch.undo()
    buffer.reserve(10)
    assert len(buffer.keys) == len(buffer.values) == 2
    assert buffer.keys[0].shape[2] == buffer.capacity == 512


def test_training_mode_comes_back(make_engine: Any, make_tiny_model: Any) -> None:
    model = make_tiny_model("llama").train()
    with make_engine(model=model):
        assert not model.training
    assert model.training


def test_experts_are_not_claimed_to_be_shape_independent(make_engine: Any) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=264,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        max_position_embeddings=2048,
        sliding_window=None,
    )
    model = MixtralForCausalLM(config)
    with make_engine(model=model) as engine:
        assert not engine.stats().exact
    with make_engine(model=model, exact=True, dram_bytes="8MiB") as engine:
        assert engine.stats().prefill_cuts == "grid"
        noise = torch.Generator().manual_seed(3)
        prompt = torch.randint(0, 256, (300,), generator=noise).tolist()
        params = SamplingParams(max_tokens=8, logprobs=True)
        cold = engine.generate(prompt, params)
        warm = engine.generate(prompt, params)
    assert warm.usage.cached_tokens > 0
    assert (warm.token_ids, warm.logprobs) == (cold.token_ids, cold.logprobs)


def test_attention_of_another_kind_is_refused_by_name(make_engine: Any) -> None:
    from transformers import BloomConfig, BloomForCausalLM

    model = BloomForCausalLM(
        BloomConfig(vocab_size=264, hidden_size=64, n_layer=2, n_head=4)
    )
    with pytest.raises(UnsupportedModelError, match="Bloom"):
        make_engine(model=model)


def test_an_error_with_two_numbers_travels_between_processes() -> None:
    error = pickle.loads(pickle.dumps(PromptTooLongError(9, 5)))
    assert (error.prompt_tokens, error.context_window) == (9, 5)
