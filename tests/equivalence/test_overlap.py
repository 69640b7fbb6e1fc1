"""Copies beside compute change no bit: a thousand requests, and every wait removed.

On simulated streams copies run as late as the waits in the code allow, and a fake CUDA
device runs ``cuda_streams`` itself so. Each of these waits is removed, one at a time,
and the requests must find every one:

- ``load.fence``: loads come after what still uses the row;
- ``load.wait``: a layer's attention comes after its loads;
- ``load.drain``: a slot is given back after it has been copied from;
- ``offload.fence``: copies out come after the layer's new KV;
- ``offload.drain``: a chunk is readable after it has been copied to;
- ``drain, then filled``: and is said to be filled after that;
- ``arrival.wait``: a layer is copied in after it has been read;
- ``arrival.layers``: nor is it copied ahead before;
- ``a broken forward is drained``: its copies touch nothing later;
- ``a forward that cannot begin is drained``: nor do the copies of such a one;
- of a CUDA lane: ``wait_stream``, ``wait_event``, ``synchronize``, the event recorded
  behind the copies, and that behind the last of several.

That the worker's ``wait`` and ``drain`` block is held by ``tests/model/test_streams``,
and the waits of a real device by ``tests/gpu``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from random import Random
from typing import Any

import pytest
import torch

from pcr_core.model.cuda_streams import CudaLane, cuda_streams
from pcr_core.model.simulated_streams import (
    SimulatedCompute,
    SimulatedLane,
    simulated_streams,
)
from pcr_core.model.streams import OVERLAPS, Streams, WorkerLane, streams_opened
from tests.equivalence.overlap_mutations import (
    ANYWHERE,
    OF_CUDA_LANES,
    Change,
    mutated,
)
from tests.equivalence.overlap_stories import REQUESTS, Stage, Story
from tests.model.fake_cuda import FakeCuda

CASES = 1000
MODELS = (
    ("float32", "shape-independent", 32),
    ("float32", "grid", 16),
    ("bfloat16", "shape-independent", 16),
)
DEVICES = ("simulated", "cuda, faked", "worker")


@pytest.fixture(scope="module")
def stage(world: Any) -> Callable[..., Stage]:
    made: dict[tuple[Any, ...], Stage] = {}

    def get(dtype: str, cuts: str, chunk: int) -> Stage:
        name = (dtype, cuts, chunk)
        if name not in made:
            made[name] = Stage(world("llama", dtype, chunk=chunk, cuts=cuts))
        return made[name]

    return get


@contextmanager
def computing(model: Any) -> Iterator[SimulatedCompute]:
    """The compute queue, told of every layer and forward of a model."""
    compute = SimulatedCompute()
    hooks = [
        layer.register_forward_hook(lambda *_: compute.layer_ends(1.0))
        for layer in model.model.layers
    ]
    hooks.append(model.register_forward_hook(lambda *_: compute.forward_ends()))
    try:
        yield compute
    finally:
        for hook in hooks:
            hook.remove()


def tell(stage: Stage, seed: int, device: str, change: Change | None = None) -> None:
    """One story; ``change`` does something to its streams."""
    rng = Random(seed)
    mode = OVERLAPS[seed % len(OVERLAPS)]
    speeds = {"load": 10 ** rng.uniform(2, 6), "offload": 10 ** rng.uniform(2, 6)}
    cpu = torch.device("cpu")
    with ExitStack() as stack:
        compute = stack.enter_context(computing(stage.world.loaded.model))
        if device == "simulated":
            streams = simulated_streams(mode, compute, **speeds)
        elif device == "worker":
            streams = stack.enter_context(streams_opened(cpu, mode))
        else:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            FakeCuda(mode, compute, **speeds).install(patch)
            streams = cuda_streams(cpu, mode)
        stage.seen[mode] += REQUESTS
        if change is None:
            Story(stage, streams, rng).tell(lambda: nothing_is_lent(streams))
        else:
            Story(stage, change(streams), rng).tell()


def nothing_is_lent(streams: Streams) -> None:
    for lane in (streams.load, streams.offload):
        if isinstance(lane, SimulatedLane):
            assert lane.lent == 0
        elif isinstance(lane, CudaLane):
            assert not lane._lent
        elif isinstance(lane, WorkerLane):
            assert not lane._undone


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_a_thousand_requests(
    stage: Callable[..., Stage], model: tuple[str, str, int]
) -> None:
    one = stage(*model)
    one.seen.clear()
    for seed in range(-(-CASES // (REQUESTS * len(MODELS)))):
        tell(one, seed, DEVICES[seed // len(OVERLAPS) % len(DEVICES)])
    check_that_all_was_seen(one)


def check_that_all_was_seen(stage: Stage) -> None:
    expected = [*OVERLAPS, "resident", "dram", "arriving", "lost in a forward"]
    expected += ["reading", "hole", "filled", "broken", "no room for a copy"]
    if stage.world.runner.cuts.align < stage.chunk:
        expected.append("head")
    for event in expected:
        assert stage.seen[event] > 2, f"there was hardly any {event}: {stage.seen}"


@pytest.mark.parametrize(
    ("device", "mutation"),
    [
        *(("simulated", name) for name in ANYWHERE),
        *(("cuda, faked", name) for name in (*ANYWHERE, *OF_CUDA_LANES)),
    ],
)
def test_no_wait_can_be_removed(
    stage: Callable[..., Stage],
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    mutation: str,
) -> None:
    one = stage(*MODELS[0])
    change = mutated(mutation, monkeypatch)

    def run() -> None:
        for seed in range(CASES // REQUESTS):
            tell(one, seed, device, change)

    with pytest.raises(AssertionError):
        run()
