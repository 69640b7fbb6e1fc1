"""On a real GPU: copies beside compute change no bit, however slow; and are beside it.

Slow copies show a wait for them that is missing, and a slow model one for compute.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import pytest
import torch

from pcr_core.config import EngineConfig
from pcr_core.model.attention import AttentionPlan, KvAttention, attention_installed
from pcr_core.model.cuda_streams import CudaLane, cuda_streams
from pcr_core.model.loading import LoadedModel, load
from pcr_core.model.overlap import _workload
from pcr_core.model.prefill import Forward
from pcr_core.model.prefill_plan import grid
from pcr_core.model.row_buffer import RowBuffer
from pcr_core.model.streams import OVERLAPS, Copy, Overlap, Streams
from pcr_core.timeline.interval import Interval
from tests.equivalence.overlap_mutations import Change, mutated
from tests.equivalence.overlap_stories import Stage, Story

pytestmark = pytest.mark.gpu

SLEEP = 2_000_000
"""Cycles: a millisecond or so, and more than the host needs to queue a layer."""
STORIES = 24
CLOCK = 2e-6
"""Seconds: CUDA's events tell time in steps of half a microsecond."""


class SlowLane(CudaLane):
    """Each of its copies begins late."""

    def _queue(self, one: Copy) -> None:
        torch.cuda._sleep(SLEEP)
        super()._queue(one)


def slowed(streams: Streams) -> Streams:
    """The same queues, with slow copies."""
    lanes: Any = {}
    for name in ("load", "offload"):
        lane = getattr(streams, name)
        assert isinstance(lane, CudaLane)
        lanes[name] = SlowLane(lane._device, lane._stream, lane.ahead, lane._stopwatch)
    return dataclasses.replace(streams, **lanes)


@contextmanager
def slow_model(model: Any) -> Iterator[None]:
    """Layers begin late, and so does what is done to rows between requests."""
    hooks = [
        layer.register_forward_pre_hook(lambda *_: torch.cuda._sleep(SLEEP))
        for layer in model.model.layers
    ]
    clear = RowBuffer.clear

    def late(self: RowBuffer, tokens: int) -> None:
        torch.cuda._sleep(4 * SLEEP)
        clear(self, tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RowBuffer, "clear", late)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


@pytest.fixture(scope="module")
def stage(world: Callable[..., Any]) -> Callable[[str], Stage]:
    made: dict[str, Stage] = {}

    def get(dtype: str) -> Stage:
        if dtype not in made:
            made[dtype] = Stage(world("llama", dtype, overlap="none"))
            for tokens in made[dtype].prompts:
                made[dtype].truth(tokens)  # now: later it would wait for compute
        return made[dtype]

    return get


def tell(
    stage: Stage,
    seed: int,
    change: Change = lambda streams: streams,
    *,
    slow: str = "copies",
    pinned: bool = True,
) -> None:
    """One story on the device, with slow copies or a slow model."""
    loaded = stage.world.loaded
    streams = cuda_streams(loaded.device, OVERLAPS[seed % len(OVERLAPS)])
    if slow == "copies":
        Story(stage, change(slowed(streams)), Random(seed), pinned=pinned).tell()
        return
    with slow_model(loaded.model):
        Story(stage, change(streams), Random(seed), pinned=pinned).tell()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("slow", ["copies", "model"])
def test_slowness_changes_no_bit(
    stage: Callable[[str], Stage], dtype: str, slow: str
) -> None:
    one = stage(dtype)
    one.seen.clear()
    for seed in range(STORIES):
        tell(one, seed, slow=slow)
    for event in ("resident", "dram", "arriving", "lost in a forward", "filled"):
        assert one.seen[event] > 0, f"no story had {event}"


def test_memory_that_is_not_pinned_changes_no_bit(
    stage: Callable[[str], Stage],
) -> None:
    for seed in range(STORIES):
        tell(stage("float32"), seed, pinned=False)


@pytest.mark.parametrize(
    ("wait", "slow"),
    [
        ("load.fence", "model"),
        ("load.wait", "copies"),
        ("offload.fence", "model"),
        ("offload.drain", "copies"),
        ("drain, then filled", "copies"),
        ("arrival.wait", "copies"),
        ("wait_stream", "model"),
        ("wait_event", "copies"),
        ("synchronize", "copies"),
        ("event before the copies", "copies"),
        ("event behind the first copy", "copies"),
    ],
)
def test_no_wait_can_be_removed(
    stage: Callable[[str], Stage],
    monkeypatch: pytest.MonkeyPatch,
    wait: str,
    slow: str,
) -> None:
    """Those that time decides; ``tests/equivalence/test_overlap`` has them all."""
    one = stage("float32")
    change = mutated(wait, monkeypatch)

    def run() -> None:
        for seed in range(4 * STORIES):
            tell(one, seed, change, slow=slow)

    with pytest.raises(AssertionError):
        run()
    torch.cuda.synchronize()


# --- they are beside compute ---


@pytest.fixture(scope="module")
def larger(tiny_tokenizer: Any) -> Iterator[LoadedModel]:
    """A model whose layers take longer than it takes to launch them."""
    import transformers

    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=264,
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=8,
            num_attention_heads=16,
            num_key_value_heads=8,
            max_position_embeddings=4096,
        )
    )
    loaded = load(EngineConfig(), model.half().cuda().eval(), tiny_tokenizer)
    with attention_installed(loaded.model, KvAttention(AttentionPlan())):
        yield loaded


def prefilled(loaded: LoadedModel, mode: Overlap, patch: pytest.MonkeyPatch) -> Forward:
    """The first forward of a prefill that loads 1,024 tokens and stores 256, slowly."""
    from pcr_core.model import cuda_streams as module

    patch.setattr(module, "CudaLane", SlowLane)
    run = _workload(loaded, 256, grid(256), 4)
    run(mode)
    _, done = run(mode)
    return done.forwards[0]


def overlap(one: Interval, other: Interval) -> float:
    """Seconds for which both are under way."""
    return min(one.stop, other.stop) - max(one.start, other.start)


@pytest.mark.parametrize("mode", OVERLAPS)
def test_copies_run_beside_compute(
    larger: LoadedModel, monkeypatch: pytest.MonkeyPatch, mode: Overlap
) -> None:
    forward = prefilled(larger, mode, monkeypatch)
    lanes: dict[str, list[Interval]] = {"load": [], "compute": [], "offload": []}
    for interval in forward.intervals():
        assert interval.start <= interval.stop
        lanes[interval.lane].append(interval)
    layers = list(range(8))
    assert [one.layer for one in lanes["load"]] == layers
    assert [one.layer for one in lanes["offload"]] == layers
    assert [one.layer for one in lanes["compute"]] == [None, *layers]
    for direction, lane in (("up", "load"), ("down", "offload")):
        beside = any(
            overlap(copy, compute) > CLOCK
            for copy in lanes[lane]
            for compute in lanes["compute"]
        )
        assert beside == (mode in (direction, "both"))


@pytest.mark.parametrize("mode", OVERLAPS)
def test_a_layer_is_computed_after_its_load_and_kept_after_its_kv(
    larger: LoadedModel, monkeypatch: pytest.MonkeyPatch, mode: Overlap
) -> None:
    """What the events say, on the device's own clock."""
    intervals = prefilled(larger, mode, monkeypatch).intervals()
    by = {(one.lane, one.layer): one for one in intervals}
    for layer in range(8):
        compute = by["compute", layer]
        assert by["load", layer].stop <= compute.start + CLOCK
        before = by["compute", layer - 1 if layer else None]
        assert by["offload", layer].start >= before.stop - CLOCK
