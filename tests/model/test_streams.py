"""Every lane keeps the contract; the worker's thread and the simulation their own."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch

from pcr_core.model import streams as streams_module
from pcr_core.model.cuda_streams import CudaLane, cuda_streams
from pcr_core.model.simulated_streams import (
    SimulatedCompute,
    SimulatedInlineLane,
    SimulatedLane,
    simulated_streams,
)
from pcr_core.model.streams import (
    OVERLAPS,
    Copy,
    HostStopwatch,
    InlineLane,
    Lane,
    Overlap,
    WorkerLane,
    inline_streams,
    streams_opened,
)
from tests.model.fake_cuda import FakeCuda

CPU = torch.device("cpu")
LAYERS = 4
CHUNKS, HEADS, TOKENS, DIM = 3, 2, 8, 6
CAPACITY = 5 * TOKENS
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Kind:
    """A kind of lane, and where its row side is."""

    def __init__(self, lane: Lane, device: torch.device = CPU) -> None:
        self.lane = lane
        self.device = device


def _worker(_: pytest.MonkeyPatch) -> Kind:
    return Kind(WorkerLane("pcr-copy-test"))


def _simulated(_: pytest.MonkeyPatch) -> Kind:
    return Kind(SimulatedLane(SimulatedCompute(), 1e6, lambda: 0))


def _simulated_inline(_: pytest.MonkeyPatch) -> Kind:
    return Kind(SimulatedInlineLane(SimulatedCompute(), 1e6))


def _faked(mode: Overlap) -> Callable[[pytest.MonkeyPatch], Kind]:
    def make(patch: pytest.MonkeyPatch) -> Kind:
        FakeCuda(mode, SimulatedCompute(), load=1e6, offload=1e6).install(patch)
        return Kind(cuda_streams(CPU, mode).load)

    return make


def _cuda(mode: Overlap) -> Callable[[pytest.MonkeyPatch], Kind]:
    def make(_: pytest.MonkeyPatch) -> Kind:
        device = torch.device("cuda", torch.cuda.current_device())
        return Kind(cuda_streams(device, mode).load, device)

    return make


KINDS: dict[str, Callable[[pytest.MonkeyPatch], Kind]] = {
    "inline": lambda _: Kind(InlineLane()),
    "worker": _worker,
    "simulated": _simulated,
    "simulated inline": _simulated_inline,
    "cuda, faked": _faked("up"),
    "cuda inline, faked": _faked("none"),
    "cuda": _cuda("up"),
    "cuda inline": _cuda("none"),
}
ON_A_GPU = {"cuda", "cuda inline"}


@pytest.fixture(
    params=[
        pytest.param(name, marks=pytest.mark.gpu if name in ON_A_GPU else ())
        for name in KINDS
    ]
)
def kind(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Kind]:
    made = KINDS[request.param](monkeypatch)
    yield made
    if isinstance(made.lane, WorkerLane):
        made.lane.close()


def chunks(fill: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """As DRAM has them: a slot after the other, each chunk contiguous in it."""
    count = CHUNKS * HEADS * TOKENS * DIM
    numbers = (torch.arange(count) % 251 + fill).to(dtype)
    slots = torch.zeros(CHUNKS, HEADS * TOKENS * DIM + 5, dtype=dtype)
    slots[:, 3:-2] = numbers.view(CHUNKS, -1)
    return slots[:, 3:-2].unflatten(1, (HEADS, TOKENS, DIM))


def row(device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(1, HEADS, CAPACITY, DIM, dtype=dtype, device=device)


def in_row(buffer: torch.Tensor, tokens: int = TOKENS) -> torch.Tensor:
    """The middle of a row, seen as chunks: strided in every dimension."""
    part = buffer[0, :, TOKENS : TOKENS + CHUNKS * tokens]
    return part.view(HEADS, CHUNKS, tokens, DIM).transpose(0, 1)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.cpu(), other.cpu())


# --- what all lanes promise ---


def test_a_layer_is_there_once_waited_for(kind: Kind) -> None:
    rows = [(row(kind.device), row(kind.device)) for _ in range(LAYERS)]
    sources = [(chunks(layer), chunks(-layer)) for layer in range(LAYERS)]
    kind.lane.fence()
    for layer in range(LAYERS):
        pairs = zip(rows[layer], sources[layer], strict=True)
        kind.lane.copy(layer, [Copy(in_row(one), other) for one, other in pairs])
    for layer in range(LAYERS):
        kind.lane.wait(layer)
        for one, other in zip(rows[layer], sources[layer], strict=True):
            assert same(in_row(one), other)
            assert one[0, :, :TOKENS].eq(0).all(), "nothing beside it"
            assert one[0, :, -TOKENS:].eq(0).all()
    kind.lane.drain()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [TOKENS, TOKENS // 2])
def test_all_is_there_once_drained(kind: Kind, dtype: torch.dtype, tokens: int) -> None:
    """Both ways, whole chunks and their first tokens, equal to torch's copies."""
    buffer, source = row(kind.device, dtype), chunks(1.5, dtype)[:, :, :tokens]
    expected = row(CPU, dtype)
    in_row(expected, tokens).copy_(source)
    kind.lane.fence()
    kind.lane.copy(0, [Copy(in_row(buffer, tokens), source)])
    kind.lane.drain()
    assert same(buffer, expected)
    back = chunks(0.0, dtype)[:, :, :tokens]
    kind.lane.fence()
    kind.lane.copy(1, [Copy(back, in_row(buffer, tokens))])
    kind.lane.drain()
    assert same(back, source)


def test_copies_run_in_order(kind: Kind) -> None:
    buffer, first, second = row(kind.device), chunks(1.0), chunks(2.0)
    kind.lane.fence()
    kind.lane.copy(0, [Copy(in_row(buffer), first)])
    kind.lane.copy(0, [Copy(in_row(buffer), second)])
    kind.lane.wait(0)
    assert same(in_row(buffer), second)
    kind.lane.drain()
    assert same(in_row(buffer), second)


def test_a_span_for_each_layer(kind: Kind) -> None:
    buffer, source = row(kind.device), chunks(0.0)
    kind.lane.fence()
    for layer in (0, 1, 2):
        kind.lane.copy(layer, [Copy(in_row(buffer), source)])
    spans = kind.lane.drain()
    assert [span.layer for span in spans] == [0, 1, 2]
    for earlier, later in pairwise(spans):
        assert earlier.start <= earlier.stop <= later.start <= later.stop
    assert kind.lane.drain() == []


def test_waiting_for_nothing(kind: Kind) -> None:
    kind.lane.fence()
    kind.lane.wait(7)
    assert kind.lane.drain() == []


def test_sources_live_until_they_are_copied(kind: Kind) -> None:
    buffer = row(kind.device)
    kind.lane.fence()
    for layer in range(LAYERS):
        kind.lane.copy(layer, [Copy(in_row(buffer), chunks(layer))])
    others = [chunks(99.0) for _ in range(LAYERS)]  # would get the memory
    kind.lane.drain()
    assert same(in_row(buffer), chunks(LAYERS - 1))
    assert len(others) == LAYERS


def test_no_memory_is_held_once_drained(kind: Kind) -> None:
    """Nor by an idle thread."""
    buffer, source = row(kind.device), chunks(0.0)
    held = [
        weakref.ref(buffer.untyped_storage()),
        weakref.ref(source.untyped_storage()),
    ]
    copies = [Copy(in_row(buffer), source)]
    kind.lane.fence()
    kind.lane.copy(0, copies)
    kind.lane.drain()
    del buffer, source, copies
    _until(lambda: all(one() is None for one in held))


def _until(condition: Callable[[], bool]) -> None:
    """Poll for what another thread is about to do."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it has not happened"
        time.sleep(0.001)


# --- the worker ---


@pytest.fixture
def worker() -> Iterator[WorkerLane]:
    lane = WorkerLane("pcr-copy-test")
    yield lane
    lane.close()


Copied = Callable[[Sequence[Copy]], Any]


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch, worker: WorkerLane) -> list[str]:
    """Copies begin only when somebody waits for them; says what happened."""
    happened: list[str] = []
    copied: Copied = streams_module._copied

    def held(copies: Sequence[Copy]) -> Any:
        deadline = time.monotonic() + 5
        while not worker._changed._waiters and time.monotonic() < deadline:
            time.sleep(0)
        result = copied(copies)
        happened.append("copied")
        return result

    monkeypatch.setattr(streams_module, "_copied", held)
    return happened


def test_waiting_blocks(worker: WorkerLane, hold: list[str]) -> None:
    worker.copy(0, [Copy(in_row(row(CPU)), chunks(0.0))])
    worker.wait(0)
    assert hold == ["copied"]


def test_waiting_blocks_for_all_copies_of_a_layer(
    worker: WorkerLane, hold: list[str]
) -> None:
    for _ in range(3):
        worker.copy(0, [Copy(in_row(row(CPU)), chunks(0.0))])
    worker.wait(0)
    assert hold == ["copied"] * 3


def test_draining_blocks(worker: WorkerLane, hold: list[str]) -> None:
    for layer in range(LAYERS):
        worker.copy(layer, [Copy(in_row(row(CPU)), chunks(0.0))])
    worker.drain()
    assert hold == ["copied"] * LAYERS


def test_copies_are_on_the_thread_and_not_by_torch(
    worker: WorkerLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second thread that ran torch would start a second team of OpenMP threads."""
    threads: list[str] = []
    copied: Copied = streams_module._copied

    def noted(copies: Sequence[Copy]) -> Any:
        threads.append(threading.current_thread().name)
        return copied(copies)

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("copied by torch")

    monkeypatch.setattr(streams_module, "_copied", noted)
    monkeypatch.setattr(torch.Tensor, "copy_", refused)
    worker.copy(0, [Copy(in_row(row(CPU)), chunks(0.0))])
    worker.drain()
    assert threads == ["pcr-copy-test"]


def bad_copy() -> Copy:
    return Copy(torch.zeros(2, 3), torch.zeros(2, 4))


def test_an_error_reaches_who_waits(worker: WorkerLane) -> None:
    worker.copy(0, [bad_copy()])
    with pytest.raises(RuntimeError, match="a copy of KV failed"):
        worker.wait(0)
    assert [span.layer for span in worker.drain()] == [0], "it is said once"


def test_an_error_reaches_who_drains_and_nothing_else_suffers(
    worker: WorkerLane,
) -> None:
    buffer, source = row(CPU), chunks(3.0)
    worker.copy(0, [bad_copy()])
    worker.copy(1, [Copy(in_row(buffer), source)])
    with pytest.raises(RuntimeError, match="a copy of KV failed"):
        worker.drain()
    assert same(in_row(buffer), source), "the others are done"
    worker.copy(0, [Copy(in_row(buffer), chunks(4.0))])
    worker.wait(0)
    assert [span.layer for span in worker.drain()] == [0]


def test_an_error_holds_no_memory(worker: WorkerLane) -> None:
    copy = bad_copy()
    held = weakref.ref(copy.source.untyped_storage())
    worker.copy(0, [copy])
    with pytest.raises(RuntimeError) as caught:
        worker.drain()
    del copy, caught
    _until(lambda: held() is None)


def test_closing_finishes_what_is_queued(check_thread_leaks: None) -> None:
    lane = WorkerLane("pcr-copy-test")
    rows = [row(CPU) for _ in range(20)]
    for layer, buffer in enumerate(rows):
        lane.copy(layer, [Copy(in_row(buffer), chunks(layer))])
    lane.close()
    assert not lane._thread.is_alive()
    for layer, buffer in enumerate(rows):
        assert same(in_row(buffer), chunks(layer))


# --- opening them ---


def copy_threads() -> list[str]:
    names = (thread.name for thread in threading.enumerate())
    return sorted(name for name in names if name.startswith("pcr-copy"))


@pytest.mark.parametrize(
    ("mode", "threads"),
    [
        ("none", []),
        ("up", ["pcr-copy-up"]),
        ("down", ["pcr-copy-down"]),
        ("both", ["pcr-copy-down", "pcr-copy-up"]),
    ],
)
def test_a_mode_is_a_choice_of_lanes(mode: Overlap, threads: list[str]) -> None:
    with streams_opened(CPU, mode) as opened:
        assert opened.mode == mode
        assert copy_threads() == threads
        for lane, direction in ((opened.load, "up"), (opened.offload, "down")):
            beside = mode in (direction, "both")
            assert isinstance(lane, WorkerLane if beside else InlineLane)
            assert (lane.ahead > 0) == beside
        watch = opened.stopwatch
        assert watch.seconds(watch.begin()) <= watch.seconds(watch.mark())
    assert copy_threads() == []


def test_threads_end_however_the_block_does() -> None:
    with pytest.raises(KeyError), streams_opened(CPU, "both"):
        raise KeyError
    assert copy_threads() == []


def test_inline_streams_have_no_thread() -> None:
    opened = inline_streams(CPU)
    assert opened.mode == "none"
    assert isinstance(opened.load, InlineLane)
    assert opened.load is not opened.offload
    assert isinstance(opened.stopwatch, HostStopwatch)
    assert copy_threads() == []


# --- the simulation has teeth ---


@pytest.fixture
def compute() -> SimulatedCompute:
    return SimulatedCompute()


@pytest.fixture
def lane(compute: SimulatedCompute) -> SimulatedLane:
    return SimulatedLane(compute, 1000.0, lambda: compute.forwards)


def test_poison_until_waited_for(lane: SimulatedLane) -> None:
    rows = [row(CPU), row(CPU)]
    lane.fence()
    for layer, buffer in enumerate(rows):
        lane.copy(layer, [Copy(in_row(buffer), chunks(1.0))])
        assert in_row(buffer).isnan().all()
    lane.wait(1)
    assert in_row(rows[0]).isnan().all(), "only what was waited for"
    assert same(in_row(rows[1]), chunks(1.0))
    lane.drain()
    assert same(in_row(rows[0]), chunks(1.0))


@pytest.mark.parametrize("fenced", [False, True])
def test_without_order_it_is_never_right(
    lane: SimulatedLane, compute: SimulatedCompute, fenced: bool
) -> None:
    buffer = row(CPU)
    if fenced:
        lane.fence()
        compute.forward_ends()  # and goes on: the fence is an old one
    lane.copy(0, [Copy(in_row(buffer), chunks(1.0))])
    lane.wait(0)
    lane.drain()
    assert in_row(buffer).isnan().all()


def test_copies_are_as_late_as_they_may_be(lane: SimulatedLane) -> None:
    buffer, source = row(CPU), chunks(1.0)
    lane.fence()
    lane.copy(0, [Copy(in_row(buffer), source)])
    source.fill_(7.0)
    lane.drain()
    assert in_row(buffer).eq(7.0).all()


@pytest.mark.parametrize("by", ["drain", "fence"])
def test_a_source_must_stay_until_drained(lane: SimulatedLane, by: str) -> None:
    buffer, source = row(CPU), chunks(1.0)
    lane.fence()
    lane.copy(0, [Copy(in_row(buffer), source)])
    lane.wait(0)
    source.fill_(7.0)
    getattr(lane, by)()
    assert in_row(buffer).isnan().all()


def test_lent_counts_what_is_not_drained(lane: SimulatedLane) -> None:
    lane.fence()
    lane.copy(0, [Copy(in_row(row(CPU)), chunks(1.0))])
    lane.wait(0)
    assert lane.lent == 1
    lane.drain()
    assert lane.lent == 0


def two_layers(lane: Lane) -> float:
    """Queue two layers' copies; returns the bytes of one."""
    lane.fence()
    for layer in range(2):
        lane.copy(layer, [Copy(in_row(row(CPU)), chunks(1.0))])
    return float(chunks(1.0).nbytes)


def test_copies_take_their_time_one_after_the_other(
    lane: SimulatedLane, compute: SimulatedCompute
) -> None:
    compute.layer_ends(5.0)
    took = two_layers(lane) / 1000.0
    assert compute.now == 5.0, "beside compute"
    lane.wait(0)
    assert compute.now == pytest.approx(5.0 + took)
    compute.layer_ends(10 * took)
    lane.wait(1)
    assert compute.now == pytest.approx(5.0 + 11 * took), "it was there by then"
    spans = lane.drain()
    assert [(span.start, span.stop) for span in spans] == [
        pytest.approx((5.0, 5.0 + took)),
        pytest.approx((5.0 + took, 5.0 + 2 * took)),
    ]
    assert compute.layers == 2


def test_inline_copies_keep_compute_waiting(compute: SimulatedCompute) -> None:
    lane = SimulatedInlineLane(compute, 1000.0)
    took = two_layers(lane) / 1000.0
    assert compute.now == pytest.approx(2 * took)
    assert [span.stop for span in lane.drain()] == pytest.approx([took, 2 * took])


def test_nothing_is_copied_before_it_is_queued(
    lane: SimulatedLane, compute: SimulatedCompute
) -> None:
    """A layer that arrives late is copied late, although the lane was idle."""
    lane.fence()
    compute.layer_ends(3.0)
    lane.copy(1, [Copy(in_row(row(CPU)), chunks(1.0))])
    (span,) = lane.drain()
    assert span.start == 3.0


@pytest.mark.parametrize("mode", OVERLAPS)
def test_simulated_modes(compute: SimulatedCompute, mode: Overlap) -> None:
    made = simulated_streams(mode, compute, load=1.0, offload=2.0)
    assert made.mode == mode
    assert made.stopwatch is compute
    for lane, direction in ((made.load, "up"), (made.offload, "down")):
        beside = mode in (direction, "both")
        assert isinstance(lane, SimulatedLane if beside else SimulatedInlineLane)
        assert (lane.ahead > 0) == beside


def test_an_offload_must_be_fenced_in_its_layer(compute: SimulatedCompute) -> None:
    lane = simulated_streams("down", compute, load=1.0, offload=1.0).offload
    target = chunks(0.0)
    lane.fence()
    compute.layer_ends(0.0)
    lane.copy(1, [Copy(target, in_row(row(CPU)))])
    lane.drain()
    assert target.isnan().all()


# --- the streams of a CUDA device, on a fake one ---


@pytest.mark.parametrize("mode", OVERLAPS)
def test_cuda_modes(
    compute: SimulatedCompute, monkeypatch: pytest.MonkeyPatch, mode: Overlap
) -> None:
    FakeCuda(mode, compute, load=1.0, offload=1.0).install(monkeypatch)
    with streams_opened(torch.device("cuda", 0), mode) as opened:
        assert opened.mode == mode
        for lane, direction in ((opened.load, "up"), (opened.offload, "down")):
            assert isinstance(lane, CudaLane)
            assert (lane.ahead > 0) == (mode in (direction, "both"))
    assert copy_threads() == []


def test_a_cuda_lane_holds_what_it_copies(
    compute: SimulatedCompute, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else may: page-locked DRAM is not the allocator's to keep."""
    FakeCuda("up", compute, load=1e6, offload=1e6).install(monkeypatch)
    lane = cuda_streams(CPU, "up").load
    assert isinstance(lane, CudaLane)
    copies = [Copy(in_row(row(CPU)), chunks(1.0))]
    lane.fence()
    lane.copy(0, copies)
    assert lane._lent == [copies]
    lane.wait(0)
    assert lane._lent == [copies]
    lane.drain()
    assert lane._lent == []


def test_copies_before_one_that_fails_are_waited_for(
    compute: SimulatedCompute, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy may run out of device memory, while others of its layer are under way."""
    FakeCuda("up", compute, load=1e6, offload=1e6).install(monkeypatch)
    lane = cuda_streams(CPU, "up").load
    buffer, source = row(CPU), chunks(1.0)
    lane.fence()
    lane.copy(0, [Copy(in_row(buffer), source)])
    bad = Copy(in_row(buffer)[:0], source)
    with pytest.raises(ValueError, match="longer"):
        lane.copy(1, [Copy(in_row(buffer), chunks(2.0)), bad])
    lane.drain()
    assert same(in_row(buffer), chunks(2.0))


def test_cuda_times_are_those_of_the_host(
    compute: SimulatedCompute, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clocks are compared again and again: events tell time in 24 bits."""
    now = 1000.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    FakeCuda("up", compute, load=1e6, offload=1e6).install(monkeypatch)
    watch = cuda_streams(CPU, "up").stopwatch
    first = watch.begin()
    compute.layer_ends(0.5)
    assert watch.seconds(watch.mark()) == pytest.approx(1000.5)
    compute.layer_ends(4.5)
    now = 1005.1  # the device's clock is slow
    second = watch.begin()
    assert watch.seconds(second) == 1005.1
    compute.layer_ends(0.25)
    assert watch.seconds(watch.mark()) == pytest.approx(1005.35)
    assert watch.seconds(first) == 1000.0, "earlier marks are told as before"
