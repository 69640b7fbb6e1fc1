"""Rows at rest: which one is taken, what it holds, and what all of them may hold.

In these rows the KV of a position is a number that stands for all tokens up to there.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pcr_core.errors import DeviceMemoryError
from pcr_core.index.chunk import LayerShape
from pcr_core.model.attention import KEY_BLOCK
from pcr_core.model.row_buffer import RowBuffer
from pcr_core.model.rows import RowPool

Prompt = tuple[int, ...]
BLOCK_BYTES = KEY_BLOCK * 2 * 8
"""Of a row of ``KEY_BLOCK`` positions: one key and one value of 8 bytes each."""

_meanings: dict[Prompt, int] = {}


def meaning(tokens: Sequence[int]) -> int:
    """The number that stands for some tokens; none of them is 0."""
    return _meanings.setdefault(tuple(tokens), len(_meanings) + 1)


def make_buffer() -> RowBuffer:
    return RowBuffer([LayerShape(1, 1, 1)], torch.int64, torch.device("cpu"))


def compute(buffer: RowBuffer, tokens: Sequence[int], start: int = 0) -> None:
    numbers = torch.tensor(expected(tokens, len(tokens))[start:])
    for side in (buffer.keys[0], buffer.values[0]):
        side[0, 0, start : len(tokens), 0] = numbers


def held(buffer: RowBuffer, count: int) -> list[int]:
    assert torch.equal(buffer.keys[0], buffer.values[0])
    numbers: list[int] = buffer.keys[0][0, 0, :count, 0].tolist()
    return numbers


def expected(tokens: Sequence[int], count: int) -> list[int]:
    return [meaning(tokens[: at + 1]) for at in range(count)]


def pool(most: int = 2, **options: Any) -> RowPool:
    return RowPool(make_buffer, most, **options)


def serve(rows: RowPool, tokens: Sequence[int], room: int = 0) -> tuple[RowBuffer, int]:
    """A request from beginning to end; returns its row and what that held of it."""
    buffer, resident = rows.take(tokens, max(len(tokens), room))
    assert held(buffer, resident) == expected(tokens, resident)
    compute(buffer, tokens, resident)
    rows.give_back(buffer, tokens, len(tokens))
    return buffer, resident


def prompt(number: int, length: int) -> Prompt:
    return tuple(random.Random(number).choices(range(1, 9), k=length))


# --- which row ---


def test_a_continued_prompt_takes_its_row_over() -> None:
    rows, talk = pool(), prompt(1, 60)
    first, resident = serve(rows, talk[:20])
    assert resident == 0
    assert serve(rows, talk[:40]) == (first, 20)
    assert serve(rows, talk) == (first, 40)
    assert rows.resident((*talk, 1, 2)) == 60
    assert rows.resident(talk) == 59, "the last token is always computed"
    assert rows.resident(()) == 0


def test_only_whole_tiles_are_taken_over() -> None:
    rows, talk = pool(align=16), prompt(1, 100)
    serve(rows, talk[:41])
    assert serve(rows, talk)[1] == 32


def test_a_long_row_is_not_thrown_away_for_a_short_beginning() -> None:
    rows = pool()
    long = prompt(1, 400)
    kept, _ = serve(rows, long)
    other, resident = serve(rows, (*long[:16], *prompt(2, 50)))
    assert other is not kept
    assert resident == 0
    assert serve(rows, (*long, 1))[0] is kept
    # With both in use the one that is longest at rest goes.
    assert serve(rows, prompt(3, 30))[0] is other
    assert serve(rows, prompt(4, 30))[0] is kept


def test_the_only_row_is_overwritten_but_not_its_beginning() -> None:
    rows, long = pool(most=1), prompt(1, 400)
    row, _ = serve(rows, long)
    again, resident = serve(rows, (*long[:50], *prompt(2, 50)))
    assert again is row
    assert resident >= 50


def test_two_conversations_keep_their_rows() -> None:
    rows, a, b = pool(), prompt(1, 90), prompt(2, 90)
    for length in range(10, 90, 10):
        assert serve(rows, a[:length])[1] == length - 10
        assert serve(rows, b[:length])[1] == length - 10


def test_the_row_that_holds_most_is_taken_and_of_equals_the_shortest() -> None:
    rows, talk = pool(most=4), prompt(1, 50)
    taken = [rows.take((), 100)[0] for _ in range(4)]
    kept = [(*talk[:30], 9, 9), (*talk[:40], 9, 9), (*talk[:40], 9)]
    for buffer, tokens in zip(taken, [*kept, prompt(5, 30)], strict=True):
        compute(buffer, tokens)
        rows.give_back(buffer, tokens, len(tokens))
    assert rows.take(talk, 50) == (taken[2], 40)
    assert rows.take(talk, 50) == (taken[1], 40)
    assert rows.take(talk, 50) == (taken[0], 30)


def test_rows_in_use_count_among_those_there_may_be() -> None:
    rows = pool(most=2)
    serve(rows, prompt(1, 30))
    rows.take(prompt(2, 30), 30)
    rows.take(prompt(3, 30), 30)
    assert rows.nbytes == 2 * BLOCK_BYTES


def test_an_empty_row_that_fits_is_preferred() -> None:
    rows = pool(most=3)
    taken = [
        rows.take((), size)[0] for size in (3 * KEY_BLOCK, KEY_BLOCK, 2 * KEY_BLOCK)
    ]
    for buffer in taken:
        rows.give_back(buffer, (), 0)
    large, small, middle = taken
    assert rows.take((), KEY_BLOCK + 1)[0] is middle
    assert rows.take((), 9 * KEY_BLOCK)[0] is large, "the one that lacks least"
    assert rows.take((), 1)[0] is small


def test_without_resident_rows_memory_is_kept_and_nothing_else() -> None:
    rows = pool(most=0)
    row, _ = serve(rows, prompt(1, 30))
    assert held(row, row.capacity) == [0] * row.capacity
    assert serve(rows, prompt(1, 30)) == (row, 0)


# --- what must not be kept ---


def test_a_failed_request_leaves_nothing() -> None:
    rows, talk = pool(), prompt(1, 40)
    serve(rows, talk[:20])
    buffer, resident = rows.take(talk, 40)
    assert resident == 20
    buffer.keys[0][0, 0, 20:36] = buffer.values[0][0, 0, 20:36] = -1  # it breaks here
    rows.give_back(buffer, (), 36)
    assert held(buffer, 40) == [0] * 40
    assert rows.resident(talk) == 0


def test_forgetting_reaches_rows_at_rest_and_in_use() -> None:
    rows, talk, other = pool(), prompt(1, 40), prompt(2, 40)
    at_rest, _ = serve(rows, talk)
    in_use, _ = rows.take(other[:10], 40)
    compute(in_use, other)
    rows.forget()
    assert held(at_rest, at_rest.capacity) == [0] * at_rest.capacity
    assert rows.resident(talk) == 0
    rows.give_back(in_use, other[:10], 10)
    assert held(in_use, in_use.capacity) == [0] * in_use.capacity, "all of it"
    assert rows.resident(other) == 0
    assert serve(rows, other)[1] == 0
    assert rows.resident(other) == 39, "what comes later may be kept"


# --- memory ---


def test_all_rows_at_rest_have_a_limit() -> None:
    rows = pool(most=4, most_bytes=3 * BLOCK_BYTES)
    for number in range(4):
        serve(rows, prompt(number, 30))
    assert rows.resting_bytes == 3 * BLOCK_BYTES
    assert rows.resident(prompt(0, 30)) == 0, "the one longest at rest has gone"
    assert rows.resident(prompt(1, 30)) == 29


def test_a_row_beyond_the_limit_does_not_stay_and_drives_nobody_out() -> None:
    rows = pool(most_bytes=3 * BLOCK_BYTES)
    serve(rows, prompt(1, 30))
    serve(rows, prompt(2, 30), room=4 * KEY_BLOCK)
    assert rows.nbytes == BLOCK_BYTES
    assert rows.resident(prompt(1, 30)) == 29
    assert rows.resident(prompt(2, 30)) == 0


def test_a_conversation_grows_by_leaps() -> None:
    rows, talk = pool(), prompt(1, 40 * KEY_BLOCK)
    capacities = set()
    for turn in range(1, 41):
        end = turn * KEY_BLOCK
        buffer, resident = rows.take(talk[:end], end)
        assert resident == max(0, end - KEY_BLOCK)
        capacities.add(buffer.capacity)
        rows.give_back(buffer, talk[:end], end)
    assert len(capacities) <= 11


def test_growing_by_leaps_ends_at_the_limit() -> None:
    rows, talk = pool(most_bytes=5 * BLOCK_BYTES), prompt(1, 8 * KEY_BLOCK)
    residents = []
    for turn in range(1, 8):
        end = turn * KEY_BLOCK
        buffer, resident = rows.take(talk[:end], end)
        residents.append(resident // KEY_BLOCK)
        rows.give_back(buffer, talk[:end], end)
    assert residents == [0, 1, 2, 3, 4, 5, 0]


class Machine:
    """``torch.zeros`` where there is memory for so many blocks, all of it for rows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.blocks = 0
        self._made: list[RowBuffer] = []
        self._zeros = torch.zeros
        monkeypatch.setattr(torch, "zeros", self.zeros)

    def pool(self, most: int) -> RowPool:
        return RowPool(self._make, most)

    def zeros(self, shape: tuple[int, ...], **options: Any) -> torch.Tensor:
        used = sum(buffer.nbytes for buffer in self._made)
        if used + 8 * math.prod(shape) > self.blocks * BLOCK_BYTES:
            raise torch.OutOfMemoryError("CUDA out of memory.\nSee the manual.")
        return self._zeros(shape, **options)

    def _make(self) -> RowBuffer:
        self._made.append(make_buffer())
        return self._made[-1]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_rows_at_rest_give_way_to_a_row(machine: Machine) -> None:
    machine.blocks, rows = 4, machine.pool(3)
    serve(rows, prompt(1, 30))
    serve(rows, prompt(2, 30))
    buffer, resident = rows.take(prompt(3, 30), 4 * KEY_BLOCK)
    assert resident == 0
    assert rows.nbytes == buffer.nbytes == 4 * BLOCK_BYTES
    assert rows.resident(prompt(1, 30)) == 0


def test_a_row_that_cannot_grow_is_made_anew(machine: Machine) -> None:
    machine.blocks, rows, talk = 4, machine.pool(2), prompt(1, 40)
    serve(rows, prompt(2, 30), room=2 * KEY_BLOCK)
    serve(rows, talk)
    buffer, resident = rows.take((*talk, 1), 3 * KEY_BLOCK)
    assert buffer.capacity == 3 * KEY_BLOCK
    assert resident == 0, "its contents went with the memory"


def test_no_memory_at_all(machine: Machine) -> None:
    machine.blocks, rows = 2, machine.pool(2)
    serve(rows, prompt(1, 30))
    with pytest.raises(
        DeviceMemoryError, match=r"KV of 1536 tokens \(CUDA out of memory\.\); use a"
    ):
        rows.take(prompt(2, 30), 3 * KEY_BLOCK)
    assert rows.nbytes == 0
    assert serve(rows, prompt(2, 30))[1] == 0, "the next one is served"


# --- everything in any order, against a plain model ---


@dataclass(eq=False)
class InUse:
    """A row that a request has.

    Attributes:
        resident: What it held of the prompt.
        forgotten: Whether something was forgotten since.
    """

    buffer: RowBuffer
    tokens: Prompt
    resident: int
    forgotten: bool = False


class RowMachine(RuleBasedStateMachine):
    """The model knows of every buffer which tokens it may be gone on from."""

    def __init__(self) -> None:
        super().__init__()
        self.contents: dict[RowBuffer, Prompt] = {}
        self.in_use: list[InUse] = []
        self.forgotten: set[int] = set()
        self.numbers = itertools.count()

    @initialize(
        most=st.integers(0, 4),
        blocks=st.sampled_from([1, 2, 4, 8, 1000]),
        align=st.sampled_from([1, 4]),
    )
    def start(self, most: int, blocks: int, align: int) -> None:
        self.most, self.limit, self.align = most, blocks * BLOCK_BYTES, align
        self.rows = RowPool(make_buffer, most, self.limit, align)

    def any_prompt(self, draw: random.Random) -> Prompt:
        known = [tokens for tokens in self.contents.values() if tokens]
        start: Prompt = ()
        if known and draw.random() < 0.8:
            one = draw.choice(known)
            start = one[: draw.choice([len(one), draw.randint(0, len(one))])]
        # What is new is new: a forgotten number does not come back by chance.
        new = tuple(1000 + next(self.numbers) for _ in range(draw.randint(0, 12)))
        return (*start, *new) or (1000 + next(self.numbers),)

    @rule(seed=st.integers(0, 2**32))
    def take(self, seed: int) -> None:
        draw = random.Random(seed)
        tokens = self.any_prompt(draw)
        room = len(tokens) + draw.choice([0, 0, KEY_BLOCK, 3 * KEY_BLOCK])
        promised, there = self.rows.resident(tokens), len(self.contents)
        buffer, resident = self.rows.take(tokens, room)
        assert buffer.capacity >= room
        assert all(buffer is not one.buffer for one in self.in_use)
        assert resident == promised or room > KEY_BLOCK
        assert resident % self.align == 0
        assert resident < len(tokens)
        before = self.contents.pop(buffer, ())
        assert before[:resident] == tokens[:resident]
        assert held(buffer, resident) == expected(tokens, resident)
        self.nothing_better(before, tokens, resident, there)
        self.in_use.append(InUse(buffer, tokens, resident))

    def nothing_better(
        self, before: Prompt, tokens: Prompt, resident: int, there: int
    ) -> None:
        """More was saved than lost, unless there was no other row to be had."""
        free = there + len(self.in_use) < self.most
        lost = len(before) - resident
        if any(not one for one in self.contents.values()) or free:
            assert lost <= resident
        for other in self.contents.values():
            saved = 0
            while saved < min(len(other), len(tokens) - 1) and (
                other[saved] == tokens[saved]
            ):
                saved += 1
            saved -= saved % self.align
            assert saved <= resident or len(other) > 2 * saved

    @precondition(lambda self: self.in_use)
    @rule(seed=st.integers(0, 2**32), ends=st.sampled_from(["well", "well", "badly"]))
    def give_back(self, seed: int, ends: str) -> None:
        draw = random.Random(seed)
        one = draw.choice(self.in_use)
        self.in_use.remove(one)
        compute(one.buffer, one.tokens, one.resident)
        kept = one.tokens if ends == "well" else ()
        self.rows.give_back(one.buffer, kept, len(one.tokens))
        if one.forgotten or not self.most:
            kept = ()
        self.contents[one.buffer] = kept
        at_rest = {row.buffer for row in self.rows._resting}
        assert one.buffer in at_rest or self.is_scarce(one.buffer)
        self.contents = {b: t for b, t in self.contents.items() if b in at_rest}

    def is_scarce(self, buffer: RowBuffer) -> bool:
        """Whether a row that came back may have been let go."""
        full = len(self.rows._resting) == max(1, self.most)
        return full or buffer.nbytes == 0

    @rule()
    def forget(self) -> None:
        self.rows.forget()
        for one in self.in_use:
            one.forgotten = True
        for tokens in (*self.contents.values(), *(one.tokens for one in self.in_use)):
            self.forgotten.update(expected(tokens, len(tokens)))
        self.contents = dict.fromkeys(self.contents, ())

    @rule()
    def run_out_of_memory(self) -> None:
        assert self.rows.give_up() == bool(self.contents)
        self.contents = {}

    @invariant()
    def it_adds_up(self) -> None:
        if not hasattr(self, "rows"):
            return
        at_rest = self.rows._resting
        assert {row.buffer: tuple(row.tokens) for row in at_rest} == self.contents
        assert len(at_rest) <= max(1, self.most)
        assert self.rows.resting_bytes <= self.limit
        used = sum(one.buffer.nbytes for one in self.in_use)
        assert self.rows.nbytes == self.rows.resting_bytes + used

    @invariant()
    def what_is_kept_is_right_and_what_was_forgotten_is_gone(self) -> None:
        for buffer, tokens in self.contents.items():
            assert held(buffer, len(tokens)) == expected(tokens, len(tokens))
            assert self.forgotten.isdisjoint(held(buffer, buffer.capacity))


def test_machine() -> None:
    run_state_machine_as_test(
        RowMachine, settings=settings(max_examples=60, stateful_step_count=30)
    )


@pytest.mark.parametrize("most", range(4))
def test_rows_in_use_stay_within_their_limit(most: int) -> None:
    """Conversations that grow, side by side, and take rows at rest over."""
    dice = random.Random(most)
    for blocks in (1, 2, 3, 5, 7, 10) * 10:
        limit = blocks * BLOCK_BYTES
        rows = RowPool(make_buffer, most, most_taken_bytes=limit)
        taken: list[tuple[RowBuffer, list[int]]] = []
        for _ in range(12):
            kind = dice.choice(["take", "take", "grow", "give back"])
            if kind == "take":
                tokens = [dice.choice([0, 0, 0, 1])] * dice.randint(1, 600 * blocks)
                if rows.fits(len(tokens)):
                    taken.append((rows.take(tokens, len(tokens))[0], tokens))
                else:
                    with pytest.raises(DeviceMemoryError, match="row_bytes"):
                        rows.take(tokens, len(tokens))
            elif taken:
                buffer, tokens = taken.pop(dice.randrange(len(taken)))
                if kind == "grow":
                    room = buffer.capacity + dice.randint(1, 2 * KEY_BLOCK)
                    with contextlib.suppress(DeviceMemoryError):
                        rows.grow(buffer, room, len(tokens))
                    taken.append((buffer, tokens))
                else:
                    rows.give_back(buffer, tokens, len(tokens))
            assert rows.taken_bytes <= limit
            assert rows.taken_bytes == sum(one.nbytes for one, _ in taken)
