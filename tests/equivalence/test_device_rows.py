"""A prompt that goes on from a row gives the same bits, wherever the row ends."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pcr_core.index.chunk import chunk_keys
from pcr_core.index.prefix_tree import Event, Host
from pcr_core.model.chunk_io import ChunkIO
from pcr_core.model.fingerprint import kv_bytes
from pcr_core.model.prefill import Prefilled
from pcr_core.tiers import HostPool, SlabPlan
from tests.equivalence.conftest import raw_bytes

CHUNK = 32
KINDS = ("llama", "mistral_sliding")
Prompt = list[int]

both = pytest.mark.parametrize("kind", KINDS)
dtypes = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
pairs = pytest.mark.parametrize(
    ("kind", "dtype"), [("llama", "bfloat16"), ("mistral_sliding", "float32")]
)


def family(number: int, length: int) -> Prompt:
    """A stream of tokens from a vocabulary of eight."""
    return random.Random(number).choices(range(8), k=length)


def lose_dram(world: Any, tokens: Sequence[int], *indices: int) -> None:
    """Have DRAM lose chunks of a prompt; there is no SSD tier."""
    nodes = world.tiers._tree.match(chunk_keys(world.namespace, tokens, world.chunk))
    for index, node in enumerate(nodes):
        if node is None or node.host is not Host.READY:
            continue
        if index in indices or not indices:
            world.tiers._dram.free(node, Event.EVICT)


def slots(world: Any, tokens: Sequence[int]) -> list[bytes | None]:
    """What DRAM holds of each chunk of a prompt."""
    nodes = world.tiers._tree.match(chunk_keys(world.namespace, tokens, world.chunk))
    return [
        bytes(world.tiers._dram.view(node))
        if node is not None and node.host is Host.READY
        else None
        for node in nodes
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@both
@dtypes
@pytest.mark.parametrize("dram", ["kept", "lost"])
def test_every_length_that_a_row_may_hold(
    world: Any, folder: Path, kind: str, dtype: str, dram: str
) -> None:
    one = world(kind, dtype, chunk=CHUNK, rows=1)
    prompt = family(1, 3 * CHUNK + 5)
    one.open(folder, slots=40, files=0)
    whole = range(CHUNK - 1, 2 * CHUNK + 2)  # every remainder, both sides of borders
    for length in (1, 15, 16, 17, *whole, 3 * CHUNK, len(prompt) - 1, len(prompt)):
        one.runner.forget()
        other = family(2, 20)
        other[0] = 7 - prompt[length] if length < len(prompt) else 0
        one.ask([*prompt[:length], *other])
        if dram == "lost":
            lose_dram(one, prompt)
        answer = one.ask(prompt)
        assert answer == one.reference(prompt), length
        held = min(length, len(prompt) - 1) // 16 * 16
        found = answer.usage.cached_by_tier
        if dram == "lost":
            assert found == ({"device": held} if held else {}), length
        elif held % CHUNK == 0 or held > 3 * CHUNK:
            assert found.get("device", 0) == held, length
        else:  # the chunk was computed by a request before, and is read whole
            assert found.get("device", 0) in (held, held // CHUNK * CHUNK), length
    one.shut()


@pairs
@pytest.mark.parametrize("cuts", ["shape-independent", "grid"])
def test_what_requests_do_with_rows(
    world: Any, folder: Path, kind: str, dtype: str, cuts: str
) -> None:
    """Conversations, other questions, prompts in turn, shorter ones, the same again."""
    one = world(kind, dtype, chunk=CHUNK, cuts=cuts, rows=2)
    one.open(folder, slots=40, files=0)
    grain = CHUNK if cuts == "grid" else 16

    def ask(prompt: Prompt, held: int) -> None:
        answer = one.ask(prompt)
        assert answer == one.reference(prompt)
        expected = min(held, len(prompt) - 1) // grain * grain
        assert answer.usage.cached_by_tier.get("device", 0) == expected

    talk = family(1, 40)
    ask(talk, 0)
    for turn in range(2, 6):  # each turn begins with all that went before
        lose_dram(one, talk)
        before, talk = talk, [*talk, *family(turn, 9 + 7 * turn)]
        ask(talk, len(before))
    ask(talk, len(talk))
    system, documents = family(7, 20), family(8, 3 * CHUNK)
    first, second = family(9, 11), family(10, 40)
    one.runner.forget()
    lose_dram(one, [*system, *documents])
    ask([*system, *documents, *first], 0)
    lose_dram(one, [*system, *documents])
    ask([*system, *documents, *second], len(system) + len(documents))
    lose_dram(one, [*system, *documents])
    ask([*system, *documents, *second][:100], 100)
    condense, answer = family(11, 50), family(12, 90)
    one.runner.forget()
    ask(condense, 0)
    ask(answer, 0)
    for turn in range(3):
        lose_dram(one, condense)
        lose_dram(one, answer)
        condense += family(20 + turn, 30)
        answer += family(30 + turn, 30)
        ask(condense, len(condense) - 30)
        ask(answer, len(answer) - 30)
    one.shut()


@pairs
@pytest.mark.parametrize("cuts", ["shape-independent", "grid"])
def test_chunks_that_dram_has_lost_come_back_from_the_row(
    world: Any, folder: Path, kind: str, dtype: str, cuts: str
) -> None:
    one = world(kind, dtype, chunk=CHUNK, cuts=cuts, rows=2)
    one.open(folder, slots=40, files=0)
    prompt = family(3, 5 * CHUNK + 20)
    one.ask(prompt)
    before = slots(one, prompt)
    assert None not in before
    lose_dram(one, prompt, 1, 2, 4)
    answer = one.ask([*prompt, 1, 2])
    assert answer.usage.cached_by_tier["device"] >= 5 * CHUNK
    assert slots(one, prompt) == before
    one.runner.forget()
    again = one.ask(prompt)
    assert again.usage.cached_by_tier == {"dram": 5 * CHUNK}
    assert again == one.reference(prompt)
    one.shut()


def test_a_wrong_row_would_show(world: Any, folder: Path) -> None:
    """The comparison has teeth: one changed number in a row changes the answer."""
    one = world("llama", "float32", chunk=CHUNK, rows=2)
    one.open(folder, slots=40, files=0)
    prompt = family(4, 70)
    one.ask(prompt)
    row = next(row for row in one.runner._rows._resting if len(row.tokens))
    row.buffer.keys[0][0, 0, 3, 5] *= 1.5
    lose_dram(one, prompt)
    changed = one.ask(prompt)
    assert changed.usage.cached_by_tier == {"device": 64}
    assert changed != one.reference(prompt)
    one.shut()


class Stored:
    """The chunks of a prompt in slots, and a row that holds some of its tokens."""

    def __init__(self, world: Any, tokens: Prompt, resident: int) -> None:
        self.world, self.tokens, self.resident = world, tokens, resident
        count = len(tokens) // CHUNK
        pool = HostPool(world.layout, SlabPlan(count + 1, world.layout.nbytes))
        self.slots = {index: pool.allocate() for index in range(count)}
        world.runner.forget()
        self.cold = self.prefill(sinks=self.slots)[1]
        self.asked: list[int] = []

    def prefill(self, **chunks: Any) -> tuple[Prefilled, list[bytes]]:
        """Run the prompt on the row, which is made first; returns its bits, too."""
        runner = self.world.runner
        runner.forget()
        row = runner.open_row(len(self.tokens))
        if self.resident:
            runner.prefill(row, self.tokens[: self.resident], _io())
        runner.close_row(row)
        row = runner.open_row(len(self.tokens), self.tokens)
        assert row.resident == self.resident
        done = runner.prefill(row, self.tokens, _io(**chunks))
        bits = kv_bytes(row.cache, len(self.tokens))
        row.tokens = []
        runner.close_row(row)
        return done, [*bits, raw_bytes(done.logits)]


def _io(**chunks: Any) -> ChunkIO:
    options = {"sources": {}, "sinks": {}, **chunks}
    return ChunkIO(filled=lambda index: None, between=lambda: None, **options)


@pytest.mark.parametrize("ends", ["source", "hole"])
@pytest.mark.parametrize(("resident", "pending"), [(48, 1), (48, 2), (64, 2)])
def test_reads_where_the_row_ends(
    world: Any, resident: int, pending: int, ends: str
) -> None:
    """The chunk that a row holds in part, or the one behind it, is being read."""
    one = world("llama", "float32", chunk=CHUNK, rows=1)
    stored = Stored(one, family(5, 3 * CHUNK + 5), resident)
    sources = {i: slot for i, slot in stored.slots.items() if i != pending}
    waiting = {pending}

    def settle(index: int) -> None:
        waiting.remove(index)
        if ends == "source":
            sources[index] = stored.slots[index]

    done, bits = stored.prefill(sources=sources, pending=waiting, settle=settle)
    assert bits == stored.cold
    assert not waiting
    whole = resident // CHUNK * CHUNK
    assert done.resident == (resident if pending == 1 and ends == "hole" else whole)
    computed = [(3 * CHUNK, len(stored.tokens))]
    if ends == "hole":
        front = max(resident, pending * CHUNK) if pending == 1 else pending * CHUNK
        computed.insert(0, (front, (pending + 1) * CHUNK))
    if ends == "hole" and pending == 2:
        computed = [(2 * CHUNK, len(stored.tokens))]
    assert list(done.computed) == computed
