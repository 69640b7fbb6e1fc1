"""Where a prompt leaves a stored chunk in its middle, what both begin with is used.

Not exact: the bits of what is copied are the same, those of what is computed behind it
differ by rounding.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings

from pcr_core.index.chunk import chunk_keys, token_bytes
from pcr_core.model.prefill_plan import ROW_UNIT

CHUNK = 64
Prompt = list[int]


def family(number: int, length: int) -> Prompt:
    """A stream of tokens from a vocabulary of eight."""
    return random.Random(number).choices(range(8), k=length)


@pytest.fixture(params=["llama", "mistral_sliding"])
def free(request: pytest.FixtureRequest, world: Any, tmp_path: Path) -> Any:
    one = world(request.param, "float32", chunk=CHUNK, cuts="free")
    one.open(tmp_path / "kv", slots=40, files=0)
    yield one
    one.shut()


def leaving(prompt: Prompt, at: int, length: int) -> Prompt:
    """A prompt that differs from another from one token on."""
    rest = family(at + 1000, length)
    return [*prompt[:at], 7 - prompt[at], *rest]


def head_of(world: Any, prompt: Prompt, index: int, count: int) -> list[torch.Tensor]:
    """The first tokens of a stored chunk, copied: K and V of each layer."""
    key = chunk_keys(world.namespace, prompt, CHUNK)[index]
    slot = world.tiers._dram.slots[key]
    layers = range(len(world.layout.layers))
    return [side[:, :count].clone() for i in layers for side in slot.layer(i)]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def close(answer: Any, reference: Any) -> bool:
    """Whether the first token's logits agree, but for rounding."""
    one, other = (np.frombuffer(a.logits[0], np.float32) for a in (answer, reference))
    return bool(np.abs(one - other).max() < 1e-3 * np.abs(other).max())


def test_a_prompt_that_leaves_a_chunk_in_its_middle(free: Any) -> None:
    first = family(1, 3 * CHUNK)
    free.ask(first)
    second = leaving(first, CHUNK + 40, 2 * CHUNK)
    answer = free.ask(second)
    assert answer.usage.cached_by_tier == {"dram": CHUNK + 40}
    assert close(answer, free.reference(second))
    heads = [head_of(free, one, 1, 40) for one in (first, second)]
    assert same(*heads), "what was copied is the same to the last bit"
    third = leaving(second, CHUNK + 50, 20)  # in the chunk that began as another's
    answer = free.ask(third)
    assert answer.usage.cached_by_tier == {"dram": CHUNK + 50}
    assert close(answer, free.reference(third))


def test_a_prompt_that_ends_in_a_chunk(free: Any) -> None:
    whole = family(2, 2 * CHUNK)
    free.ask(whole)
    for length in (CHUNK + ROW_UNIT, CHUNK + ROW_UNIT + 1, 2 * CHUNK - 1, 40, 17):
        answer = free.ask(whole[:length])
        cached = length - 1 if (length - 1) % CHUNK >= ROW_UNIT else CHUNK
        assert answer.usage.cached_by_tier == {"dram": cached}, length
        assert close(answer, free.reference(whole[:length])), length


def test_the_chunk_that_has_most_in_common(free: Any) -> None:
    first = family(3, CHUNK)
    prompts = [leaving(first, at, CHUNK) for at in (20, 50, 35)]
    for prompt in prompts:
        free.ask(prompt)
    answer = free.ask([*first[:45], *family(4, 60)])
    assert answer.usage.cached_by_tier["dram"] >= 45


def test_too_short_a_head_is_not_worth_it(free: Any) -> None:
    first = family(5, 2 * CHUNK)
    free.ask(first)
    for at in (1, ROW_UNIT - 1):
        answer = free.ask(leaving(first, CHUNK + at, 30))
        assert answer.usage.cached_by_tier == {"dram": CHUNK}, at


def test_a_row_and_a_head(world: Any, tmp_path: Path) -> None:
    """Of one chunk the device holds some tokens, and DRAM some more."""
    one = world("llama", "float32", chunk=CHUNK, cuts="free", rows=1)
    one.open(tmp_path / "kv", slots=40, files=0)
    first = family(6, 2 * CHUNK)
    one.ask(first)
    one.runner.forget()
    short = [*first[: CHUNK + 20], 7 - first[CHUNK + 20]]
    one.ask(short)  # leaves a row, and no second chunk
    second = leaving(first, CHUNK + 50, 30)
    answer = one.ask(second)
    assert answer.usage.cached_by_tier == {"device": CHUNK + 20, "dram": 30}
    assert close(answer, one.reference(second))
    one.shut()


@pytest.mark.parametrize("cuts", ["shape-independent", "grid"])
def test_exact_mode_uses_no_heads(world: Any, tmp_path: Path, cuts: str) -> None:
    one = world("llama", "float32", chunk=CHUNK, cuts=cuts)
    one.open(tmp_path / "kv", slots=40, files=0)
    first = family(7, 2 * CHUNK)
    one.ask(first)
    for prompt in (leaving(first, CHUNK + 40, 30), first[: CHUNK + 40]):
        answer = one.ask(prompt)
        assert answer.usage.cached_by_tier == {"dram": CHUNK}
        assert answer == one.reference(prompt)
        keys = chunk_keys(one.namespace, prompt, CHUNK)
        assert one.tiers.heads(keys, prompt, len(keys)) == {}
    one.shut()


prompts = st.builds(
    lambda a, b, shared, length: [*family(a, shared), *family(b, length)],
    st.integers(0, 1),
    st.integers(2, 4),
    st.integers(0, 3 * CHUNK),
    st.integers(1, 2 * CHUNK),
)


@settings(
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@example(asked=[[*family(0, 150), 1], [*family(0, 120), 2, 3], family(0, 100)])
@given(asked=st.lists(prompts, min_size=2, max_size=5))
def test_any_prompts(world: Any, tmp_path: Path, asked: list[Prompt]) -> None:
    """As many tokens are reused as any earlier prompt shares; answers stay close."""
    one = world("llama", "float32", chunk=CHUNK, cuts="free")
    one.open(tmp_path / "kv", slots=100, files=0)
    before: list[Prompt] = []
    for prompt in asked:
        keys = chunk_keys(one.namespace, prompt, CHUNK)
        for index, head in one.tiers._heads.find(keys, prompt, len(keys)).items():
            place = one.tiers._dram.siblings._places[head.node]
            wanted = prompt[index * CHUNK :][: head.tokens]
            assert len(wanted) == head.tokens
            assert place[1].startswith(token_bytes(wanted))
            assert place[0] == (keys[index - 1] if index else one.namespace.root)
        answer = one.ask(prompt)
        assert answer.usage.cached_tokens == most_shared(prompt, before)
        assert close(answer, one.reference(prompt))
        before.append(prompt)
    one.shut()


def most_shared(prompt: Prompt, before: list[Prompt]) -> int:
    """What the best of the earlier prompts gives: whole chunks, and perhaps a head."""
    best = 0
    for other in before:
        stored = other[: len(other) // CHUNK * CHUNK]
        limit = min(len(stored), len(prompt) - 1)
        shared = next((i for i in range(limit) if stored[i] != prompt[i]), limit)
        if shared % CHUNK < ROW_UNIT:
            shared -= shared % CHUNK
        best = max(best, shared)
    return best
