"""Several rows decoded in one forward give what each gives alone, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from pcr_core import EngineConfig, ModelError
from pcr_core.errors import DeviceMemoryError
from pcr_core.model import probe
from pcr_core.model.chunk_io import ChunkIO
from pcr_core.model.key_blocks import KEY_BLOCK
from pcr_core.model.loading import load
from pcr_core.model.runner import Row, Runner
from pcr_core.model.setup import model_prepared

LENGTHS = (3, 70, 24, 41, 130, 9, 25, 500)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("batch")


@pytest.fixture
def opened(
    folder: Path, make_tiny_model: Callable[..., Any], tiny_tokenizer: Any
) -> Callable[..., Any]:
    @contextmanager
    def opened(kind: str, dtype: str = "float32", **settings: Any) -> Iterator[Runner]:
        config = EngineConfig(cache_dir=folder, chunk_tokens=16, **settings)
        model = make_tiny_model(kind).to(getattr(torch, dtype))
        with model_prepared(load(config, model, tiny_tokenizer), config) as prepared:
            yield prepared.runner

    return opened


def tokens(length: int) -> list[int]:
    return random.Random(length).choices(range(250), k=length)


def silent() -> ChunkIO:
    return ChunkIO({}, {}, filled=lambda index: None, between=lambda: None)


def filled_row(runner: Runner, length: int) -> Row:
    row = runner.open_row(length + 1)
    runner.prefill(row, tokens(length), silent())
    return row


def decoded(runner: Runner, batches: list[list[int]], steps: int = 4) -> dict[int, Any]:
    """Logits of every step of rows of these lengths, decoded in these batches."""
    found: dict[int, Any] = {}
    for batch in batches:
        rows = [filled_row(runner, length) for length in batch]
        for step in range(steps):
            for row in rows:
                runner.make_room(row, 1000)
            fed = [(length * 7 + step) % 250 for length in batch]
            logits = runner.decode(rows, fed)
            assert logits.shape[0] == len(batch)
            for length, one in zip(batch, logits, strict=True):
                found.setdefault(length, []).append(one)
        for row in rows:
            runner.close_row(row)
    return {length: torch.stack(steps) for length, steps in found.items()}


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("llama", "float32"),
        ("llama", "bfloat16"),
        ("qwen2", "float32"),
        ("mistral_sliding", "float32"),
        ("gemma3", "bfloat16"),
    ],
)
def test_a_row_does_not_see_who_is_beside_it(
    opened: Callable[..., Any], kind: str, dtype: str
) -> None:
    with opened(kind, dtype) as runner:
        assert runner.decoding == "invariant"
        alone = decoded(runner, [[length] for length in LENGTHS])
        assert all(logits.isfinite().all() for logits in alone.values())
        for batches in ([list(LENGTHS)], [[24, 500], [70, 3, 9]]):
            together = decoded(runner, batches)
            for length, logits in together.items():
                assert torch.equal(logits, alone[length]), length


def test_rows_of_one_length_are_one_forward(
    opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened("llama") as runner:
        calls, forward = [], runner.call._model.forward

        def counted(*args: Any, **kwargs: Any) -> Any:
            calls.append(kwargs["input_ids"].shape)
            return forward(*args, **kwargs)

        rows = [filled_row(runner, length) for length in (20, 30, 40)]
        monkeypatch.setattr(runner.call._model, "forward", counted)
        runner.decode(rows, [1, 2, 3])
        assert calls == [(3, 1)]
        assert [row.length for row in rows] == [21, 31, 41]
        runner.step.decoding = "serial"
        runner.decode(rows, [1, 2, 3])
        assert calls[1:] == [(1, 1)] * 3


def test_a_step_that_fails_can_be_repeated(
    opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened("llama") as runner:
        expected = decoded(runner, [[20, 30]], steps=1)
        rows = [filled_row(runner, length) for length in (20, 30)]

        def broken(*_: Any) -> None:
            raise RuntimeError("kernel")

        hook = runner.call._model.model.layers[2].register_forward_pre_hook(broken)
        with pytest.raises(ModelError, match="kernel"):
            runner.decode(rows, [140, 210])
        hook.remove()
        assert [row.length for row in rows] == [20, 30]
        logits = runner.decode(rows, [140, 210])
        assert torch.equal(logits[0], expected[20][0])
        assert torch.equal(logits[1], expected[30][0])


@pytest.mark.parametrize("mixed", ["rows", "error"])
def test_a_model_that_cannot_take_rows_runs_them_in_turns(
    make_tiny_model: Callable[..., Any],
    tiny_tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mixed: str,
) -> None:
    model = make_tiny_model("llama")
    head = model.lm_head.forward

    def spoiled(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 1 and mixed == "error":
            raise ValueError("one row, please")
        logits = head(x)
        if x.shape[0] > 1:
            return logits.flip(0)
        return logits

    monkeypatch.setattr(model.lm_head, "forward", spoiled)
    config = EngineConfig(cache_dir=tmp_path, chunk_tokens=16)
    with model_prepared(load(config, model, tiny_tokenizer), config) as prepared:
        runner = prepared.runner
        assert runner.decoding == "serial"
        assert decoded(runner, [[20, 30]])[30].shape[0] == 4


# --- memory of rows ---


def test_rows_grow_and_keep_what_they_hold(opened: Callable[..., Any]) -> None:
    with opened("llama") as runner:
        runner.give_up()  # the rows made ready are longer
        row, other = filled_row(runner, KEY_BLOCK - 9), filled_row(runner, 20)
        assert row.cache.buffer.capacity == KEY_BLOCK
        beside = runner.open_row(3 * KEY_BLOCK)
        runner.prefill(beside, tokens(KEY_BLOCK - 9), silent())
        for step in range(20):
            runner.make_room(row, 2 * KEY_BLOCK)
            logits = runner.decode([row, other, beside], [step, step, step])
            assert torch.equal(logits[0], logits[2])
        assert row.cache.buffer.capacity == 2 * KEY_BLOCK
        assert row.cache.reach == KEY_BLOCK + 11


def test_rows_stay_within_their_budget(opened: Callable[..., Any]) -> None:
    with opened("llama", row_bytes="1MiB") as runner:
        runner.give_up()  # the rows made ready are longer
        rows = [filled_row(runner, KEY_BLOCK - 1)]
        block = rows[0].cache.buffer.nbytes
        while runner.fits(KEY_BLOCK):
            rows.append(filled_row(runner, KEY_BLOCK - 1))
        assert len(rows) == 2**20 // block
        with pytest.raises(DeviceMemoryError, match="row_bytes"):
            runner.open_row(10)
        runner.make_room(rows[0], 9999)  # there is a position left
        runner.decode(rows[:1], [1])
        with pytest.raises(DeviceMemoryError, match="row_bytes"):
            runner.make_room(rows[0], 9999)
        assert rows[0].length == rows[0].cache.buffer.capacity == KEY_BLOCK
        runner.close_row(rows.pop())
        runner.make_room(rows[0], 9999)
        assert runner._rows.taken_bytes <= 2**20


def test_a_copy_goes_on_like_the_original(opened: Callable[..., Any]) -> None:
    with opened("llama") as runner:
        row = filled_row(runner, 60)
        copy = runner.copy_row(row, 100)
        logits = runner.decode([row, copy], [5, 5])
        assert torch.equal(logits[0], logits[1])
        runner.decode([row], [6])
        again = runner.decode([row, copy], [7, 7])
        assert not torch.equal(again[0], again[1]), "they are two rows"


# --- the verdict ---


def test_the_probe_tells_rounding_from_nonsense(
    folder: Path,
    make_tiny_model: Callable[..., Any],
    tiny_tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decode = Runner.decode
    config = EngineConfig(cache_dir=folder, chunk_tokens=16)
    loaded = load(config, make_tiny_model("llama"), tiny_tokenizer)
    for off, verdict in ((0.0, "invariant"), (1e-6, "close"), (1.0, "serial")):

        def changed(self: Runner, rows: Any, fed: Any, off: float = off) -> Any:
            logits = decode(self, rows, fed)
            return logits + off if len(rows) > 1 else logits

        with model_prepared(loaded, config), monkeypatch.context() as patch:
            patch.setattr(Runner, "decode", changed)
            found = probe.how_rows_decode(loaded, 16)
        assert found == verdict
