"""What a prefill takes with copies beside it, on a virtual clock, beside the formula.

Of the stages load, compute and offload, those that do not run beside each other are
one stage; a layer goes through the stages one after the other, and the slowest sets the
pace: ``T = sum(stages) + (n - 1) * max(stages)``. For all three that is the formula of
PCR (arXiv 2603.23049). The model is real and so is its cache; the clock is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from pcr_core.config import EngineConfig
from pcr_core.index.chunk import ChunkLayout
from pcr_core.model.attention import AttentionPlan, KvAttention, attention_installed
from pcr_core.model.chunk_io import ChunkIO
from pcr_core.model.cuda_streams import _AHEAD
from pcr_core.model.loading import LoadedModel, load
from pcr_core.model.prefill import Forward
from pcr_core.model.prefill_plan import shape_independent
from pcr_core.model.runner import Runner
from pcr_core.model.simulated_streams import SimulatedCompute, simulated_streams
from pcr_core.model.streams import OVERLAPS, Overlap
from pcr_core.tiers import HostPool, SlabPlan

CHUNK = 16
CHUNKS = 20
RATIOS = (0.0, 0.25, 0.5, 0.75, 0.9, 0.95)


@contextmanager
def declared(model: Any, seconds: float) -> Iterator[SimulatedCompute]:
    """The compute queue of a model whose layers take so long."""
    compute = SimulatedCompute()
    hooks = [
        layer.register_forward_hook(lambda *_: compute.layer_ends(seconds))
        for layer in model.model.layers
    ]
    hooks.append(model.register_forward_hook(lambda *_: compute.forward_ends()))
    try:
        yield compute
    finally:
        for hook in hooks:
            hook.remove()


class Bench:
    """A tiny model of ``layers`` layers, a stored prompt, and room for new chunks."""

    def __init__(self, layers: int, tokenizer: Any) -> None:
        import transformers

        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=264,
                hidden_size=32,
                intermediate_size=32,
                num_hidden_layers=layers,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=16,
            )
        ).eval()
        self.loaded: LoadedModel = load(EngineConfig(), model, tokenizer)
        layout = ChunkLayout(self.loaded.shapes, CHUNK, "F32", 4)
        self.layer_bytes = layout.nbytes // layers
        pool = HostPool(layout, SlabPlan(CHUNKS, layout.nbytes))
        self.slots = {index: pool.allocate() for index in range(CHUNKS)}

    def prefill(
        self,
        mode: Overlap,
        matched: int,
        times: tuple[float, float, float],
        ahead: int = _AHEAD,
    ) -> tuple[float, Forward]:
        """Load some chunks, compute the others; returns virtual seconds.

        Layers are queued ``ahead`` of their need, by default as on a GPU.
        """
        load_time, compute_time, offload_time = times
        with (
            declared(self.loaded.model, compute_time) as compute,
            attention_installed(self.loaded.model, KvAttention(AttentionPlan())),
        ):
            streams = simulated_streams(
                mode,
                compute,
                load=max(matched, 1) * self.layer_bytes / load_time,
                offload=max(CHUNKS - matched, 1) * self.layer_bytes / offload_time,
            )
            if streams.load.ahead:
                streams.load.ahead = ahead
            runner = Runner(self.loaded, CHUNK, shape_independent(), streams)
            tokens = [number % 251 for number in range(CHUNKS * CHUNK + 1)]
            io = ChunkIO(
                {index: self.slots[index] for index in range(matched)},
                {index: self.slots[index] for index in range(matched, CHUNKS)},
                filled=lambda index: None,
                between=lambda: None,
            )
            done = runner.prefill(runner.open_row(len(tokens)), tokens, io)
        (forward,) = done.forwards
        return compute.now, forward


@pytest.fixture(scope="module")
def bench(tiny_tokenizer: Any) -> Callable[[int], Bench]:
    return lru_cache(maxsize=None)(lambda layers: Bench(layers, tiny_tokenizer))


def stages(mode: Overlap, times: tuple[float, float, float]) -> list[float]:
    """What runs one after the other, within a layer."""
    load_time, compute_time, offload_time = times
    return {
        "none": [load_time + compute_time + offload_time],
        "up": [load_time, compute_time + offload_time],
        "down": [load_time + compute_time, offload_time],
        "both": [load_time, compute_time, offload_time],
    }[mode]


def formula(mode: Overlap, layers: int, times: tuple[float, float, float]) -> float:
    parts = stages(mode, times)
    return sum(parts) + (layers - 1) * max(parts)


seconds = st.floats(0.01, 10.0)


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("mode", OVERLAPS)
def test_the_formula(
    bench: Callable[[int], Bench], mode: Overlap, ratio: float
) -> None:
    matched = round(ratio * CHUNKS)

    @settings(max_examples=8)
    @example(4, (1.0, 1.0, 1.0), 1)
    @example(6, (3.0, 0.5, 0.1), 1)  # a slow link
    @example(6, (0.1, 0.5, 3.0), 9)
    @example(6, (0.1, 3.0, 0.1), 2)  # a slow model
    @example(1, (1.0, 2.0, 3.0), 2)
    @given(st.integers(1, 6), st.tuples(seconds, seconds, seconds), st.integers(1, 9))
    def run(layers: int, times: tuple[float, float, float], ahead: int) -> None:
        measured, forward = bench(layers).prefill(mode, matched, times, ahead)
        if not matched:
            times = (0.0, *times[1:])
        expected = formula(mode, layers, times)
        # An offload begins when a layer's KV exists, which is before its attention.
        early = times[1] if mode in ("down", "both") else 0.0
        assert measured <= expected * (1 + 1e-9)
        assert measured >= (expected - early) * (1 - 1e-9)
        check_intervals(forward, layers, times)

    run()


def check_intervals(
    forward: Forward, layers: int, times: tuple[float, float, float]
) -> None:
    """The timeline says the same."""
    for lane, took in zip(("load", "compute", "offload"), times, strict=True):
        found = [one for one in forward.intervals() if one.lane == lane]
        own = [one for one in found if one.layer is not None]
        assert [one.layer for one in own] == list(range(layers if took else 0))
        assert [one.seconds for one in own] == pytest.approx([took] * len(own))


@settings(max_examples=30)
@example(6, 0.75, (1.0, 1.0, 1.0))
@given(
    st.integers(1, 6),
    st.sampled_from(RATIOS),
    st.tuples(seconds, seconds, seconds).map(lambda t: (t[0], max(t), t[2])),
)
def test_at_most_one_layers_transfer_is_exposed(
    bench: Callable[[int], Bench],
    layers: int,
    ratio: float,
    times: tuple[float, float, float],
) -> None:
    """Where copies are no slower than compute, with ``both``."""
    load_time, compute_time, offload_time = times
    measured, _ = bench(layers).prefill("both", round(ratio * CHUNKS), times)
    exposed = measured - layers * compute_time
    assert exposed <= max(load_time, offload_time) * (1 + 1e-9)


@pytest.mark.parametrize("mode", OVERLAPS)
def test_a_mode_never_costs_virtual_time(
    bench: Callable[[int], Bench], mode: Overlap
) -> None:
    times = (1.0, 1.5, 0.5)
    took, _ = bench(4).prefill(mode, CHUNKS // 2, times)
    alone, _ = bench(4).prefill("none", CHUNKS // 2, times)
    assert took <= alone
    assert (took < alone) == (mode != "none")
