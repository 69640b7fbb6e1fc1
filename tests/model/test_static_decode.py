"""Decode steps in slots give what steps in rows give, recorded and replayed as well."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pcr_core import EngineConfig
from pcr_core.model.chunk_io import ChunkIO
from pcr_core.model.decode_slots import DecodeSlots, places_for, rows_for
from pcr_core.model.graphs import CudaGraphs, Graphs, NoGraphs
from pcr_core.model.key_blocks import KEY_BLOCK
from pcr_core.model.loading import LoadedModel, load
from pcr_core.model.rounding import differ_by_rounding
from pcr_core.model.runner import Row, Runner
from pcr_core.model.setup import model_prepared
from pcr_core.model.static_decode import StepInSlots
from tests.model.fake_graphs import FakeCudaGraphs, Recording

KINDS = ("llama", "qwen2", "mistral_sliding", "gemma3")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("static")


class Pair:
    """The same rows twice: in rows' buffers, and in slots.

    Attributes:
        slots: Those of ``tried``.
        step: That of ``tried``.
        last: What it gave last.
    """

    def __init__(self, loaded: LoadedModel, runner: Runner, graphs: Graphs) -> None:
        self.loaded = loaded
        self.plain = runner
        cuts, decoding = runner.cuts, runner.decoding
        self.tried = Runner(loaded, runner.chunk_tokens, cuts, decoding=decoding)
        self.slots = DecodeSlots(
            loaded.shapes, loaded.dtype, loaded.device, 64 * 2**20, graphs.drop
        )
        self.step = StepInSlots(self.tried.call, self.slots, graphs, self.tried.step)
        self.tried.decode_by(self.step)
        self.rows: dict[int, tuple[Row, Row]] = {}
        self.last = torch.empty(0)

    def agree(self, expected: torch.Tensor, found: torch.Tensor) -> bool:
        """Whether both are the same, up to rounding."""
        return differ_by_rounding(expected, found, self.loaded.dtype)

    def join(self, name: int, length: int) -> None:
        prompt = random.Random(f"{name} {length}").choices(range(250), k=length)
        both = []
        for runner in (self.plain, self.tried):
            row = runner.open_row(length + 1)
            io = ChunkIO({}, {}, filled=lambda index: None, between=lambda: None)
            runner.prefill(row, prompt, io)
            both.append(row)
        self.rows[name] = (both[0], both[1])

    def decode(self, names: list[int], tokens: list[int]) -> None:
        """One step of both, compared."""
        rows = [self.rows[name] for name in names]
        for runner, which in ((self.plain, 0), (self.tried, 1)):
            for pair in rows:
                runner.make_room(pair[which], 1500)
        expected = self.plain.decode([pair[0] for pair in rows], tokens)
        found = self.tried.decode([pair[1] for pair in rows], tokens)
        assert not self.step.failure
        assert found.shape == expected.shape
        for one, other in zip(expected, found, strict=True):
            assert self.agree(one, other)
            assert one.argmax() == other.argmax()
        self.last = found

    def leave(self, name: int) -> None:
        """Both rows hold the same KV, and it is given back."""
        plain, tried = self.rows.pop(name)
        self.tried.step.settle(tried.cache)
        length = plain.length
        assert tried.length == length
        self.plain.step.settle(plain.cache)
        for mine, its in zip(
            (*plain.cache.buffer.keys, *plain.cache.buffer.values),
            (*tried.cache.buffer.keys, *tried.cache.buffer.values),
            strict=True,
        ):
            one, other = mine[:, :, :length], its[:, :, :length]
            assert self.agree(one, other)
        assert tried.cache.reach >= length
        self.plain.close_row(plain)
        self.tried.close_row(tried)

    def abandon(self) -> None:
        """Give everything back, whatever it holds."""
        for plain, tried in self.rows.values():
            self.plain.close_row(plain)
            self.tried.close_row(tried)
        self.tried.close()

    def close(self) -> None:
        for name in list(self.rows):
            self.leave(name)
        for part in (*self.slots.keys, *self.slots.values):
            assert not part[:, :, 1:].any(), "only padding wrote, and that at the start"
        self.tried.close()
        assert self.slots.nbytes == 0


@pytest.fixture(scope="module")
def prepared(
    folder: Path, make_tiny_model: Callable[..., Any], tiny_tokenizer: Any
) -> Iterator[Callable[[str], Any]]:
    made: dict[str, Any] = {}

    def get(kind: str) -> Any:
        if kind not in made:
            # torch's kernels are all that a recording sees.
            config = EngineConfig(
                cache_dir=folder, chunk_tokens=16, cpu_kernels="torch"
            )
            loaded = load(config, make_tiny_model(kind), tiny_tokenizer)
            opened = model_prepared(loaded, config)
            made[kind] = (opened, loaded, opened.__enter__().runner)
        return made[kind]

    yield lambda kind: get(kind)[1:]
    for opened, *_ in made.values():
        opened.__exit__(None, None, None)


@contextmanager
def recorded(patch: pytest.MonkeyPatch) -> Iterator[tuple[FakeCudaGraphs, CudaGraphs]]:
    """CUDA's graphs, on a device that there is not."""
    with patch.context() as inner:
        cuda = FakeCudaGraphs()
        cuda.install(inner)
        yield cuda, CudaGraphs(CPU)


# --- the same answers ---

STEPS = [  # rows that go into each step; a row that is new joins, one that ends leaves
    [0],
    [0, 1],
    [0, 1, 2],
    [2, 0, 1],
    [0, 2],
    [0, 2, 3, 4, 5],
    [5, 3],
    [3],
]
LENGTHS = {0: 3, 1: 70, 2: 509, 3: 24, 4: 25, 5: 1021}


@pytest.mark.parametrize("replayed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_come_and_go(
    prepared: Any, monkeypatch: pytest.MonkeyPatch, kind: str, replayed: bool
) -> None:
    with recorded(monkeypatch) as (cuda, graphs):
        pair = Pair(*prepared(kind), graphs if replayed else NoGraphs())
        for number, names in enumerate(STEPS):
            for name in set(names) - set(pair.rows):
                pair.join(name, LENGTHS[name])
            for name in set(pair.rows) - set(names):
                pair.leave(name)
            for repeat in range(2):
                fed = [(name * 31 + number * 7 + repeat) % 250 for name in names]
                pair.decode(names, fed)
        pair.close()
        assert cuda.replayed == (2 * len(STEPS) if replayed else 0)


@given(data=st.data())
@settings(max_examples=10)
def test_any_story(prepared: Any, data: Any) -> None:
    """Steps of any of the rows, some of which rest, move or are copied meanwhile."""
    with pytest.MonkeyPatch.context() as patch, recorded(patch) as (_, graphs):
        pair = Pair(*prepared(data.draw(st.sampled_from(KINDS))), graphs)
        lengths = st.sampled_from([1, 2, 23, 24, 25, 100, 510, 511, 512, 513])
        for name in range(data.draw(st.integers(1, 4))):
            pair.join(name, data.draw(lengths))
        for _ in range(data.draw(st.integers(1, 6))):
            event = data.draw(st.sampled_from(["step", "step", "settle", "give up"]))
            names = data.draw(
                st.lists(st.sampled_from(sorted(pair.rows)), min_size=1, unique=True)
            )
            if event == "settle":
                pair.step.settle(pair.rows[names[0]][1].cache)
            elif event == "give up":
                pair.tried.give_up()
            fed = data.draw(
                st.lists(st.integers(0, 249), min_size=len(names), max_size=len(names))
            )
            pair.decode(names, fed)
        pair.close()


# --- nothing depends on lengths ---


@pytest.mark.parametrize("kind", KINDS)
def test_a_recording_is_the_same_for_all_lengths(
    prepared: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Also: nothing was asked of the device, or the recording would have failed."""
    recordings = []
    for lengths in ((1, 2, 3), (23, 24, 25), (500, 9, 511)):
        with recorded(monkeypatch) as (cuda, graphs):
            pair = Pair(*prepared(kind), graphs)
            for name, length in enumerate(lengths):
                pair.join(name, length)
            pair.decode([0, 1, 2], [4, 5, 6])
            (recording,) = cuda.recorded
            recordings.append(recording.names)
            pair.close()
    assert recordings[0] == recordings[1] == recordings[2]
    assert any("scatter_" in name for name in recordings[0])


@pytest.mark.parametrize(
    "asks",
    [
        lambda logits: logits.sum().item(),
        lambda logits: bool(logits.any()),
        lambda logits: logits.nonzero(),
        lambda logits: torch.tensor([1.0]),
    ],
)
def test_a_step_that_asks_the_device_is_not_recorded(asks: Any) -> None:
    logits = torch.ones(3)
    with pytest.raises(RuntimeError, match="not permitted"), Recording():
        asks(logits)


def test_steps_are_rounded_up() -> None:
    rows = {count: rows_for(count) for count in (1, 2, 3, 4, 5, 8, 9)}
    assert rows == {1: 1, 2: 2, 3: 4, 4: 4, 5: 8, 8: 8, 9: 16}
    places = {tokens: places_for(tokens) for tokens in (1, 512, 513, 1025, 3000)}
    assert places == {1: 512, 512: 512, 513: 1024, 1025: 2048, 3000: 4096}


# --- recordings and their memory ---


def test_one_recording_per_rows_and_places(
    prepared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with recorded(monkeypatch) as (cuda, graphs):
        pair = Pair(*prepared("llama"), graphs)
        pair.join(0, 600)
        pair.join(1, 20)
        pair.join(2, 30)
        pair.decode([0, 1, 2], [1, 2, 3])
        made = len(cuda.graphs)
        for names in ([0], [1], [1, 2], [2, 1], [2], [0, 2], [0, 1, 2], [1, 2], [0]):
            pair.decode(names, names)
        assert len(cuda.graphs) - made == 4, "1 x 1024, 1 x 512, 2 x 512, 2 x 1024"
        assert len(set(map(id, cuda.pools))) == 1
        pair.close()
        assert cuda.recorded == []


def test_it_is_warmed_up_beside_compute_and_waited_for(
    prepared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with recorded(monkeypatch) as (cuda, graphs):
        pair = Pair(*prepared("llama"), graphs)
        pair.join(0, 20)
        pair.decode([0], [1])
        pair.decode([0], [2])
        assert cuda.story == [
            "beside waits for compute",
            "on beside",
            "compute waits for beside",
            "record on beside",
        ]
        assert cuda.replayed == 2
        pair.close()


def test_recordings_go_before_their_memory_does(
    prepared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with recorded(monkeypatch) as (cuda, graphs):
        pair = Pair(*prepared("llama"), graphs)
        pair.join(0, 20)
        pair.decode([0], [1])
        (first,) = cuda.graphs
        pair.join(1, 20)
        pair.decode([0, 1], [1, 2])  # more rows: it grows
        assert first.recording is None
        assert len(cuda.recorded) == 1
        assert pair.tried.give_up()
        assert cuda.recorded == []
        assert pair.tried.buffer_bytes == pair.tried._rows.nbytes
        pair.decode([0, 1], [3, 4])
        assert len(cuda.recorded) == 1
        pair.close()


def test_a_recording_of_memory_that_has_moved_shows(
    prepared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test of the tests: without being dropped, a recording gives wrong answers."""
    with recorded(monkeypatch) as (_, graphs):
        pair = Pair(*prepared("llama"), graphs)
        monkeypatch.setattr(pair.slots, "_moving", lambda: None)
        for name in (0, 1):
            pair.join(name, 300)
        pair.decode([0], [1])
        pair.decode([0, 1], [1, 2])
        with pytest.raises(AssertionError):
            pair.decode([0], [3])
        pair.abandon()


# --- where there is no slot, or it fails ---


def test_rows_without_room_are_decoded_as_ever(prepared: Any) -> None:
    loaded, runner = prepared("llama")
    pair = Pair(loaded, runner, NoGraphs())
    pair.slots._most_bytes = pair.slots._bytes_for(2, KEY_BLOCK)
    for name, length in enumerate((20, 30, 510, 40)):
        pair.join(name, length)
    for names, slots in (
        ([0, 1], True),
        ([0, 1, 3], False),  # too many
        ([1, 2], True),
        ([1, 2], True),
        ([1, 2], False),  # too long
        ([3, 0], True),
    ):
        pair.decode(names, names)
        assert (len(pair.slots._seats) > 0) == slots, names
    pair.close()


def test_memory_that_is_refused_is_done_without(
    prepared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(*prepared("llama"), NoGraphs())

    asked = []

    def refused(*shape: int) -> torch.Tensor:
        asked.append(shape)
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(pair.slots, "_zeros", refused)
    pair.slots._most_bytes = pair.slots._bytes_for(2, KEY_BLOCK)
    pair.join(0, 20)
    for step in range(4):
        pair.decode([0], [step])
    assert len(asked) == 2, "and half as much each time"
    assert pair.slots.nbytes == 0
    pair.close()


def test_after_a_failure_rows_go_on_without_it(
    prepared: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    loaded, runner = prepared("llama")
    pair = Pair(loaded, runner, NoGraphs())
    pair.join(0, 20)
    pair.decode([0], [1])

    def broken(*_: Any) -> None:
        raise RuntimeError("kernel")

    monkeypatch.setattr(pair.step._graphs, "run", broken, raising=False)
    plain, tried = pair.rows[0]
    expected = pair.plain.decode([plain], [7])
    found = pair.tried.decode([tried], [7])
    assert differ_by_rounding(expected, found, loaded.dtype)
    assert pair.step.failure == "kernel"
    assert "recorded no more: kernel" in caplog.text
    assert not pair.step.replays
    assert pair.slots.nbytes == 0
    expected = pair.plain.decode([plain], [8])
    assert differ_by_rounding(expected, pair.tried.decode([tried], [8]), loaded.dtype)
    pair.close()
