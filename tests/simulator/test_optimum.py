"""The offline optimum against every choice there is."""

from __future__ import annotations

from functools import cache
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from pcr_core.simulator.contenders import contenders
from pcr_core.simulator.optimum import infinite_reuse
from pcr_core.simulator.replay import replay
from tests.simulator.words import CHUNK_TOKENS, trace_of, words

Cache = frozenset[str]


def prefixes(word: str) -> list[str]:
    return [word[:end] for end in range(1, len(word) + 1)]


def is_closed(kept: Cache) -> bool:
    """Every chunk has its parent."""
    return all(len(chunk) == 1 or chunk[:-1] in kept for chunk in kept)


def most_hits(drawn: list[str], capacity: int) -> int:
    """Tries every set of chunks that could go, leaf by leaf, for every request."""

    @cache
    def best(index: int, kept: Cache) -> int:
        if index == len(drawn):
            return 0
        path = prefixes(drawn[index])
        missing = [chunk for chunk in path if chunk not in kept]
        others = sorted(kept.difference(path))
        short = max(0, len(kept) + len(missing) - capacity)
        gone = min(short, len(others))
        fits = missing[: len(missing) - (short - gone)]
        return len(path) - len(missing) + max(
            best(index + 1, left | frozenset(fits))
            for victims in combinations(others, gone)
            if is_closed(left := kept.difference(victims))
        )

    return best(0, frozenset())


@given(words("AB", 3, 8), st.integers(1, 5))
def test_no_choice_hits_more(drawn, capacity):
    (optimum,) = contenders(["optimum"])
    outcome = replay(trace_of(drawn), optimum, capacity, rate=10.0)
    assert outcome.hit_tokens // CHUNK_TOKENS == most_hits(drawn, capacity)


def test_the_model_by_hand():
    assert most_hits([*"ABCABC"], 2) == 2
    assert most_hits(["AB", "C", "AB"], 3) == 2
    assert most_hits(["AB", "C", "AB"], 2) == 1


@given(words("ABC", 4, 20))
def test_reuse_without_a_limit_counts_repeated_prefixes(drawn):
    trace = trace_of(drawn, tail=0)
    seen: set[str] = set()
    found = 0
    for word in drawn:
        found += sum(chunk in seen for chunk in prefixes(word)[:-1])
        seen.update(prefixes(word))
    assert infinite_reuse(trace) == found / sum(map(len, drawn))
