"""Reads that end, fail or are given up while a prefill runs change no bit of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given, settings

from pcr_core.errors import CancelledError
from pcr_core.index.chunk import ChunkLayout
from pcr_core.model.chunk_io import ChunkIO
from pcr_core.model.fingerprint import kv_bytes
from pcr_core.model.prefill import Prefilled
from pcr_core.tiers import HostPool, SlabPlan

CHUNK = 16
STATES = ("dram", "reading", "hole", "hole, no room")
ENDS = ("source", "source", "sink", "neither")

cuts = pytest.mark.parametrize("cuts", ["shape-independent", "grid"])


class Reads:
    """The chunks of a prompt; reads under way end when and how ``rng`` says.

    Destinations hold NaN until their read has ended well. A read may end whenever the
    runner calls back, in any order, and at the latest when it is asked to settle.
    """

    def __init__(
        self,
        layout: ChunkLayout,
        whole: list[bytes],
        states: Sequence[str],
        rng: Random,
    ) -> None:
        self._pool = HostPool(layout, SlabPlan(len(whole), layout.nbytes))
        self._whole = whole
        self._rng = rng
        self.sources: dict[int, Any] = {}
        self.sinks: dict[int, Any] = {}
        self.pending: dict[int, Any] = {}
        self.calls: list[str] = []
        for index, state in enumerate(states):
            self.pending[index] = self._empty_slot()
            if state != "reading":
                ends = {"dram": "source", "hole": "sink", "hole, no room": "neither"}
                self.end(index, ends[state])
        self.found = set(self.sources) | set(self.pending)

    def io(self) -> ChunkIO:
        return ChunkIO(
            sources=self.sources,
            sinks=self.sinks,
            filled=self._filled,
            between=self._between,
            pending=self.pending.keys(),
            settle=self._settle,
        )

    def end(self, index: int, outcome: str) -> None:
        slot = self.pending.pop(index)
        if outcome == "source":
            slot.view[:] = self._whole[index]
            self.sources[index] = slot
        elif outcome == "sink":
            self.sinks[index] = slot

    def _filled(self, index: int) -> None:
        self.calls.append("filled")
        assert bytes(self.sinks[index].view) == self._whole[index]
        self._something_ends()

    def _between(self) -> None:
        self.calls.append("between")
        self._something_ends()

    def _settle(self, index: int) -> None:
        self.calls.append("settle")
        assert index in self.pending
        self._something_ends()
        if index in self.pending:
            self.end(index, self._rng.choice(ENDS))

    def _something_ends(self) -> None:
        chance = self._rng.random() / 2
        for index in [i for i in self.pending if self._rng.random() < chance]:
            self.end(index, self._rng.choice(ENDS))

    def _empty_slot(self) -> Any:
        slot = self._pool.allocate()
        assert slot is not None
        slot.view[:] = b"\xff" * len(slot.view)  # NaN in fp32 and bf16
        return slot


class Prompt:
    """A prompt, and what a prefill of it gives with nothing stored."""

    def __init__(self, world: Any, tokens: int) -> None:
        self.world = world
        self.tokens = Random(tokens).choices(range(8), k=tokens)
        self.count = tokens // CHUNK
        # One more than needed, as a pool of none is refused.
        pool = HostPool(world.layout, SlabPlan(self.count + 1, world.layout.nbytes))
        slots = {index: pool.allocate() for index in range(self.count)}
        io = ChunkIO({}, slots, filled=lambda index: None, between=lambda: None)
        self.cold, self.cold_bits = self.prefill(io)
        self.whole = [bytes(slot.view) for slot in slots.values()]

    @property
    def usable(self) -> int:
        return int(self.world.runner.usable_chunks(len(self.tokens)))

    def prefill(self, io: ChunkIO) -> tuple[Prefilled, list[bytes]]:
        row = self.world.runner.open_row(len(self.tokens))
        try:
            done = self.world.runner.prefill(row, self.tokens, io)
            bits = kv_bytes(row.cache, len(self.tokens))
        finally:
            self.world.runner.close_row(row)
        return done, [*bits, done.logits.view(torch.uint8).numpy().tobytes()]

    def reads(self, states: Sequence[str], rng: Random | None = None) -> Reads:
        usable = [*states][: self.usable]
        rest = ["hole"] * (self.count - len(usable))
        return Reads(self.world.layout, self.whole, usable + rest, rng or Random(0))


@pytest.fixture
def prompt(world: Any) -> Callable[..., Prompt]:
    made: dict[tuple[Any, ...], Prompt] = {}

    def get(
        tokens: int, cuts: str, kind: str = "llama", dtype: str = "float32"
    ) -> Prompt:
        name = (tokens, cuts, kind, dtype)
        if name not in made:
            made[name] = Prompt(world(kind, dtype, chunk=CHUNK, cuts=cuts), tokens)
        return made[name]

    return get


@st.composite
def residencies(draw: st.DrawFn) -> tuple[int, list[str]]:
    """A prompt length around a chunk multiple, and where its chunks are."""
    chunks = draw(st.integers(1, 8))
    tokens = chunks * CHUNK + draw(st.sampled_from((0, 1, 7, 15)))
    runs = draw(
        st.lists(st.tuples(st.sampled_from(STATES), st.integers(1, 6)), min_size=1)
    )
    states = [state for state, count in runs for _ in range(count)]
    return tokens, (states * chunks)[:chunks]


@cuts
@pytest.mark.parametrize("kind", ["llama", "mistral_sliding"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_order_of_events(
    prompt: Callable[..., Prompt], cuts: str, kind: str, dtype: str
) -> None:
    seen = dict.fromkeys(("settle", "read", "gone"), 0)

    @settings(max_examples=10)
    @example((33 * CHUNK, ["reading"] * 33), Random(1))  # past a key block
    @example((7 * CHUNK + 1, ["hole"] + ["reading"] * 6), Random(2))
    @example((8 * CHUNK, ["dram", "reading", "reading", "hole"] * 2), Random(3))
    @given(residencies(), st.randoms(use_true_random=False))
    def run(residency: tuple[int, list[str]], rng: Random) -> None:
        tokens, states = residency
        one = prompt(tokens, cuts, kind, dtype)
        reads = one.reads(states, rng)
        waiting = set(reads.pending)
        done, bits = one.prefill(reads.io())
        assert bits == one.cold_bits
        assert reads.calls.count("between") == len(done.forwards)
        for index in range(one.count):
            if index not in reads.found:
                assert done.loaded(index) == 0
            again = done.loaded(index) < CHUNK
            seen["read"] += index in waiting and not again
            seen["gone"] += index in waiting and index not in reads.sources
        seen["settle"] += reads.calls.count("settle")

    run()
    for event, count in seen.items():
        assert count > 0, f"no example had {event}"


@cuts
def test_every_read_that_ends_in_time_is_used(
    prompt: Callable[..., Prompt], cuts: str
) -> None:
    """Nothing behind the front is computed while it is being read."""
    one = prompt(8 * CHUNK + 5, cuts)
    reads = one.reads(["hole"] * 3 + ["reading"] * 5)
    reads._something_ends = lambda: None  # only when asked to settle
    order: list[int] = []

    def settle(index: int) -> None:
        order.append(index)
        for later in range(7, index - 1, -1):
            if later in reads.pending:
                reads.end(later, "source")

    io = ChunkIO(
        reads.sources, reads.sinks, lambda i: None, lambda: None, reads.pending, settle
    )
    done, bits = one.prefill(io)
    assert bits == one.cold_bits
    assert order == [3]
    assert done.computed[-1] == (8 * CHUNK, 8 * CHUNK + 5)
    assert sum(b - a for a, b in done.computed) == 3 * CHUNK + 5


def test_ordinary_prompts_take_one_forward(prompt: Callable[..., Prompt]) -> None:
    one = prompt(8 * CHUNK + 5, "shape-independent")
    assert one.cold.computed == ((0, 8 * CHUNK + 5),)
    reads = one.reads(["dram"] * 8)
    done, bits = one.prefill(reads.io())
    assert bits == one.cold_bits
    assert reads.calls == ["between"]
    assert done.computed == ((8 * CHUNK, 8 * CHUNK + 5),)
    assert done.forwards[0].seconds > 0.0
    assert (done.forwards[0].start, done.forwards[0].stop) == done.computed[0]


def test_a_run_read_while_the_front_is_computed(prompt: Callable[..., Prompt]) -> None:
    """Two forwards: the front, and all the rest once the reads have ended."""
    one = prompt(8 * CHUNK + 5, "shape-independent")
    reads = one.reads(["dram"] * 2 + ["hole"] * 2 + ["reading"] * 4)
    reads._rng = Random(5)

    def between() -> None:
        if reads.calls:
            for index in list(reads.pending):
                reads.end(index, "source")
        reads.calls.append("between")

    io = ChunkIO(
        reads.sources, reads.sinks, lambda i: None, between, reads.pending.keys()
    )
    done, bits = one.prefill(io)
    assert bits == one.cold_bits
    assert done.computed == ((2 * CHUNK, 4 * CHUNK), (8 * CHUNK, 8 * CHUNK + 5))
    assert [done.loaded(index) for index in range(8)] == [16, 16, 0, 0, 16, 16, 16, 16]


def test_settle_may_stop_the_prefill(prompt: Callable[..., Prompt]) -> None:
    one = prompt(8 * CHUNK + 5, "shape-independent")

    def settle(index: int) -> None:
        raise CancelledError("gone")

    io = ChunkIO({}, {}, lambda i: None, lambda: None, {3}, settle)
    with pytest.raises(CancelledError):
        one.prefill(io)
    _, bits = one.prefill(one.reads(["reading"] * 8).io())  # and the runner lives on
    assert bits == one.cold_bits


def test_a_chunk_must_be_settled(prompt: Callable[..., Prompt]) -> None:
    """A mistake in who supplies the chunks ends the request, instead of hanging it."""
    one = prompt(8 * CHUNK + 5, "shape-independent")
    io = ChunkIO({}, {}, lambda i: None, lambda: None, {3}, lambda i: None)
    with pytest.raises(RuntimeError, match="left the chunk pending"):
        one.prefill(io)
    io = ChunkIO({}, {}, lambda i: None, lambda: None, {0})
    with pytest.raises(ValueError, match="nobody said how"):
        one.prefill(io)
