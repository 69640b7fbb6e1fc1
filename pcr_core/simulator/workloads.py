"""Generated traces with the repetition of the PCR paper's workloads.

Each prompt is ``[document 1][document 2][query]``. A document's length is fixed, its
popularity follows Zipf's law, and each has two fixed partners of which the first is
taken twice as often; so prefixes repeat as whole pairs, as first documents, or not at
all. With more documents per prompt each is followed by a partner of its own. Workloads
1 and 2 of PCR (arXiv 2603.23049) have 40 % and 35 % of reuse; the other figures are
ours.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from pcr_core.errors import ConfigError
from pcr_core.index.chunk import ChunkKey
from pcr_core.trace import HASH_BYTES, Trace, TraceRequest

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_RECENT = 30


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a stream of requests is drawn.

    Requests come at random (Poisson), one a second on average.

    Attributes:
        requests: Requests in the stream.
        documents: Documents in the corpus.
        document_tokens: Mean of their lognormal length, in tokens.
        spread: Standard deviation of that length, as a share of the mean.
        zipf: Exponent of their popularity.
        query_tokens: Tokens of the query, never repeated and never cached.
        output_tokens: Tokens generated.
        chunk_tokens: Tokens per chunk. The chunk that contains the end of the last
            document would be unique to the request, and is not cached.
        repeat: Share of requests that repeat the documents of one of the last 30.
        phases: Equal parts of the stream; each draws popularity and partners anew.
        burst: Mean length of the times when requests come, in seconds.
        silence: Mean length of the times between them when none does, in seconds.
        per_prompt: Documents in a prompt.
    """

    requests: int
    documents: int
    document_tokens: float = 3380.0
    spread: float = 0.35
    zipf: float = 0.6
    query_tokens: int = 20
    output_tokens: int = 16
    chunk_tokens: int = 256
    repeat: float = 0.0
    phases: int = 1
    burst: float = 60.0
    silence: float = 0.0
    per_prompt: int = 2


RECIPES = {
    "W1": Recipe(requests=1000, documents=1000),
    "W2": Recipe(requests=2000, documents=2500),
    "W1-mini": Recipe(
        requests=100, documents=85, document_tokens=211.0, chunk_tokens=16
    ),
    "W2-mini": Recipe(
        requests=200, documents=230, document_tokens=211.0, chunk_tokens=16
    ),
    # Repeats add to the reuse; four times the documents bring it back to 42 %.
    "locality": Recipe(requests=1000, documents=4000, repeat=1 / 3),
    "drift": Recipe(requests=1000, documents=1000, phases=2),
    "burst": Recipe(requests=1000, documents=1000, burst=60.0, silence=120.0),
    # RAGCache's MMLU (arXiv 2404.12457): documents of 3,718 tokens, of which 3 % serve
    # 60 % of the requests, two to a prompt, answers of one token.
    "ragcache": Recipe(
        requests=1000,
        documents=1000,
        document_tokens=3718.0,
        zipf=1.08,
        output_tokens=1,
    ),
}
"""Recipes by name."""

STREAMS = ("W1", "W2", "locality", "drift", "burst")
"""The five streams on which policies are compared."""


def generate(recipe: Recipe | str, seed: int = 0) -> Trace:
    """Draw a trace; equal arguments give equal traces.

    Args:
        recipe: A recipe, or the name of one in ``RECIPES``.
        seed: Seed of everything random.

    Raises:
        ConfigError: If there is no recipe of that name, or it has fewer than 3
            documents, fewer than a prompt needs, or no request.
    """
    name = recipe if isinstance(recipe, str) else "recipe"
    recipe = _named(recipe) if isinstance(recipe, str) else recipe
    names: dict[tuple[int, ...], ChunkKey] = {}
    requests = []
    for visit in draw(recipe, seed):
        chunks = tuple(
            names.setdefault(place, _key(len(names)))
            for place in _places(visit, recipe.chunk_tokens)
        )
        tokens = sum(visit.lengths) + recipe.query_tokens
        requests.append(
            TraceRequest(visit.arrival, tokens, recipe.output_tokens, chunks)
        )
    return Trace(f"{name}, seed {seed}", recipe.chunk_tokens, 0, tuple(requests))


@dataclass(frozen=True, slots=True)
class Visit:
    """One request of a stream, before anything is made of it.

    Attributes:
        arrival: Seconds, one request a second on average.
        documents: Numbers of its documents, in the order of the prompt.
        lengths: Their lengths in tokens.
    """

    arrival: float
    documents: tuple[int, ...]
    lengths: tuple[int, ...]


def draw(recipe: Recipe | str, seed: int = 0) -> list[Visit]:
    """Who asks when about which documents; equal arguments draw the same.

    Args:
        recipe: A recipe, or the name of one in ``RECIPES``.
        seed: Seed of everything random.

    Raises:
        ConfigError: If there is no recipe of that name, or it has fewer than 3
            documents, fewer than a prompt needs, or no request.
    """
    recipe = _named(recipe) if isinstance(recipe, str) else recipe
    _check(recipe)
    rng = np.random.default_rng(seed)
    lengths = _lengths(recipe, rng)
    prompts = _repeat_some(recipe, _prompts(recipe, rng), rng)
    arrivals = _arrivals(recipe, rng)
    return [
        Visit(arrival, tuple(documents), tuple(lengths[documents].tolist()))
        for documents, arrival in zip(prompts.tolist(), arrivals.tolist(), strict=True)
    ]


def _check(recipe: Recipe) -> None:
    if recipe.documents < 3 or recipe.requests < 1:
        raise ConfigError("a recipe needs at least 3 documents and 1 request")
    if not 1 <= recipe.per_prompt <= recipe.documents:
        raise ConfigError(
            f"a prompt cannot have {recipe.per_prompt} of {recipe.documents} "
            "documents; it needs at least 1 and no document twice"
        )


def _named(name: str) -> Recipe:
    found = RECIPES.get(name)
    if found is None:
        raise ConfigError(f"no workload {name!r}; there are: {', '.join(RECIPES)}")
    return found


def _key(number: int) -> ChunkKey:
    """A digest, as all keys are: policies may sample by its first bytes."""
    data = number.to_bytes(8, "big")
    return ChunkKey(hashlib.blake2b(data, digest_size=HASH_BYTES).digest())


def _lengths(recipe: Recipe, rng: np.random.Generator) -> Ints:
    variance = np.log1p(recipe.spread**2)
    mean = np.log(recipe.document_tokens) - variance / 2
    drawn = rng.lognormal(mean, np.sqrt(variance), recipe.documents)
    return np.maximum(1, np.rint(drawn)).astype(np.int64)


def _prompts(recipe: Recipe, rng: np.random.Generator) -> Ints:
    """Documents of each request, ``[requests, per_prompt]``."""
    weights = np.arange(1, recipe.documents + 1, dtype=np.float64) ** -recipe.zipf
    weights /= weights.sum()
    parts = []
    for part in np.array_split(np.arange(recipe.requests), recipe.phases):
        partners = _partners(recipe.documents, rng)
        popularity = rng.permutation(weights)
        prompts = rng.choice(recipe.documents, size=(len(part), 1), p=popularity)
        while prompts.shape[1] < recipe.per_prompt:
            rarer = (rng.random(len(part)) < 1 / 3).astype(np.int64)
            following = _unless_there(prompts, partners[prompts[:, -1], rarer], recipe)
            prompts = np.concatenate([prompts, following[:, None]], axis=1)
        parts.append(prompts)
    return np.concatenate(parts)


def _unless_there(prompts: Ints, following: Ints, recipe: Recipe) -> Ints:
    """The documents that follow, or the next one that the prompt does not have yet."""
    while (there := (prompts == following[:, None]).any(axis=1)).any():
        following = np.where(there, (following + 1) % recipe.documents, following)
    return following


def _partners(documents: int, rng: np.random.Generator) -> Ints:
    """Two different other documents for each, ``[documents, 2]``."""
    one = rng.integers(1, documents, documents)
    other = rng.integers(1, documents - 1, documents)
    other += other >= one
    steps = np.stack([one, other], axis=1)
    return (np.arange(documents)[:, None] + steps) % documents


def _repeat_some(recipe: Recipe, prompts: Ints, rng: np.random.Generator) -> Ints:
    repeats = rng.random(recipe.requests) < recipe.repeat
    back = rng.integers(1, _RECENT + 1, recipe.requests)
    prompts = prompts.copy()
    for index in np.flatnonzero(repeats).tolist():
        if index > 0:
            ago = 1 + (back[index] - 1) % min(index, _RECENT)
            prompts[index] = prompts[index - ago]
    return prompts


def _arrivals(recipe: Recipe, rng: np.random.Generator) -> Floats:
    """Seconds, rising: random within bursts, with silences put between them."""
    share = recipe.burst / (recipe.burst + recipe.silence)
    busy = np.cumsum(rng.exponential(share, recipe.requests))
    count = int(busy[-1] / recipe.burst * 2) + 20
    ends = np.cumsum(rng.exponential(recipe.burst, count))
    silences = np.cumsum(rng.exponential(recipe.silence, count))
    passed = np.searchsorted(ends, busy)
    before = np.concatenate([np.zeros(1), silences])
    arrivals: Floats = busy + before[passed]
    return arrivals


def _places(visit: Visit, chunk_tokens: int) -> Iterator[tuple[int, ...]]:
    """What makes a chunk the chunk it is: the documents up to its end, and where."""
    ends = list(accumulate(visit.lengths))
    begun = 0
    for index in range(ends[-1] // chunk_tokens):
        while (index + 1) * chunk_tokens > ends[begun]:
            begun += 1
        yield (*visit.documents[: begun + 1], index)
