"""Promise one: reuse never changes a bit, whatever was stored, lost or restarted."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, example, given, settings

KINDS = ("llama", "mistral_sliding")
DTYPES = ("float32", "bfloat16")
LOSSES = ("evict", "delete", "truncate", "flip")
HOLES = ({0}, {3}, {0, 1, 5}, {2, 7}, {1, 2, 3, 4})

both = pytest.mark.parametrize("kind", KINDS)
dtypes = pytest.mark.parametrize("dtype", DTYPES)


def family(number: int, length: int) -> list[int]:
    """A stream of tokens from a vocabulary of eight."""
    return random.Random(number).choices(range(8), k=length)


@st.composite
def lengths(draw: st.DrawFn, chunk: int = 16) -> int:
    """Mostly N - 1, N or N + 1 tokens around a chunk multiple; some cross 512."""
    chunks = draw(st.one_of(st.integers(1, 9), st.sampled_from((31, 32, 33, 41))))
    return max(1, chunks * chunk + draw(st.sampled_from((-1, 0, 1, 7))))


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, ...]:
    """Members of three families: a shared beginning, then one's own end."""
    length = draw(lengths())
    shared = draw(st.integers(0, length))
    first, second = draw(st.integers(0, 2)), draw(st.integers(3, 5))
    return (*family(first, shared), *family(second, length - shared))


asks = st.tuples(st.just("ask"), prompts(), st.booleans())
losses = st.tuples(
    st.just("lose"),
    st.sets(st.integers(0, 10), min_size=1, max_size=5),
    st.sampled_from(LOSSES),
)
restarts = st.tuples(st.just("restart"))
taken = st.tuples(st.just("taken"))
stories = st.lists(
    st.one_of(asks, asks, losses, taken, restarts), min_size=3, max_size=8
)
budgets = st.tuples(st.integers(1, 60), st.integers(1, 80))


def tell(world: Any, story: list[tuple[Any, ...]], budget: tuple[int, int]) -> None:
    """Act out a story in a fresh folder, checking every answer."""
    slots, files = budget
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "kv"
        world.open(folder, slots=slots, files=files)
        asked: list[tuple[int, ...]] = []
        for step in story:
            if step[0] == "ask":
                prompt = asked[-1] if step[2] and asked else step[1]
                asked.append(prompt)
                answer = world.ask(prompt)
                assert answer == world.reference(prompt)
                usage = answer.usage
                assert usage.cached_tokens + usage.computed_tokens == len(prompt)
                assert usage.computed_tokens > 0
            elif step[0] == "lose":
                for prompt in asked[-1:]:
                    world.lose(folder, prompt, step[1], step[2])
            elif step[0] == "taken":  # the device's rows, by somebody else
                world.runner.forget()
            else:
                world.open(folder, slots=slots, files=files)
        assert not world.tiers.check(fix=True).memory
        world.shut()


LONG = (*family(0, 700), *family(3, 601))
STORY = [
    ("ask", LONG, False),
    ("ask", LONG, False),
    ("taken",),
    ("ask", LONG, False),
    ("restart",),
    ("lose", {0, 1, 5}, "flip"),
    ("ask", LONG, False),
    ("taken",),
    ("lose", {2, 7}, "evict"),
    ("ask", LONG[:1295], False),
    ("taken",),
    ("lose", {3, 40}, "delete"),
    ("ask", LONG[:1295], False),
    ("lose", {3, 40, 80}, "delete"),
    ("restart",),
    ("ask", LONG[:1040], False),
    ("ask", tuple(family(1, 300)), False),
]


def run_stories(world: Any, examples: int) -> None:
    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @example(story=STORY, budget=(100, 100))
    @example(story=STORY, budget=(30, 100))
    @example(story=STORY, budget=(1, 1))
    @given(story=stories, budget=budgets)
    def run(story: list[tuple[Any, ...]], budget: tuple[int, int]) -> None:
        tell(world, story, budget)

    world.seen.clear()
    run()
    # The stories above alone reach all of this; without it nothing would be shown.
    for kind in ("device", "dram", "ssd", "holes", "corrupt", "missing", "evicted"):
        assert world.seen[kind] > 0, f"no story had {kind}"


@both
@dtypes
def test_random_stories(world: Any, kind: str, dtype: str) -> None:
    run_stories(world(kind, dtype, rows=2), 20)


@both
@dtypes
def test_random_stories_on_the_grid(world: Any, kind: str, dtype: str) -> None:
    # Chunks of 32: on the grid every chunk is a forward.
    run_stories(world(kind, dtype, chunk=32, cuts="grid", rows=1), 6)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture(params=["shape-independent", "grid"])
def cuts(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@both
@dtypes
@pytest.mark.parametrize("holes", HOLES, ids=str)
def test_holes(
    world: Any, folder: Path, cuts: str, kind: str, dtype: str, holes: set[int]
) -> None:
    """A lost chunk costs itself and the tail, nothing else."""
    one = world(kind, dtype, cuts=cuts)
    prompt = family(1, 9 * 16 + 5)
    one.open(folder, slots=20, files=20)
    one.ask(prompt)
    one.lose(folder, prompt, holes, "delete")
    answer = one.ask(prompt)
    one.shut()
    assert answer == one.reference(prompt)
    assert answer.usage.computed_tokens == 16 * len(holes) + 5
    assert answer.usage.cached_by_tier == {"dram": 16 * (9 - len(holes))}


@both
@dtypes
def test_around_every_chunk_multiple(
    world: Any, folder: Path, cuts: str, kind: str, dtype: str
) -> None:
    """N - 1, N and N + 1 tokens, each asked twice, and again after a restart."""
    one = world(kind, dtype, cuts=cuts)
    sizes = [k * 16 + d for k in (1, 2, 3, 32, 33, 64) for d in (-1, 0, 1)]
    one.open(folder, slots=80, files=80)
    stream = family(2, max(sizes))
    for size in (*sizes, *sizes):
        assert one.ask(stream[:size]) == one.reference(stream[:size]), size
    one.open(folder, slots=80, files=80)
    for size in reversed(sizes):
        answer = one.ask(stream[:size])
        assert answer == one.reference(stream[:size]), size
        assert answer.usage.cached_tokens >= size - 16
    one.shut()


@dtypes
@pytest.mark.parametrize("kind", ["gemma3", "qwen2"])
@pytest.mark.parametrize("chunk", [32, 128])
def test_other_models_and_chunks(
    world: Any, folder: Path, kind: str, dtype: str, chunk: int
) -> None:
    """Two rotary bases, biases, larger chunks, partial last chunks."""
    one = world(kind, dtype, chunk=chunk)
    stream = family(4, 1200)
    for holes in ({0}, {1, 3}, {2}):
        one.open(folder, slots=12, files=12)
        for size in (1200, 900, 1200 // chunk * chunk):
            assert one.ask(stream[:size]) == one.reference(stream[:size])
            one.lose(folder, stream, holes, "truncate")
    one.shut()


def test_a_wrong_chunk_would_show(world: Any, folder: Path) -> None:
    """The comparison has teeth: one changed bit in DRAM changes the answer's bits."""
    one = world("llama", "float32")
    prompt = family(5, 70)
    one.open(folder, slots=20, files=20)
    one.ask(prompt)
    node = one.tiers._tree.match(one_keys(one, prompt))[1]
    keys, _ = one.tiers._dram.slot(node).layer(0)
    keys[0, 3, 5] *= 1.5
    changed = one.ask(prompt)
    one.shut()
    assert changed != one.reference(prompt)


def one_keys(world: Any, prompt: list[int]) -> list[Any]:
    from pcr_core.index.chunk import chunk_keys

    return chunk_keys(world.namespace, prompt, world.chunk)


@pytest.fixture(autouse=True, scope="module")
def _no_other_randomness() -> Iterator[None]:
    before = random.getstate()
    yield
    assert random.getstate() == before, "a test drew from the global generator"
