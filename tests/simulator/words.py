"""Traces written as words: each letter is a chunk, each prefix its name."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from pcr_core.index.chunk import ChunkKey
from pcr_core.trace import Trace, TraceRequest

CHUNK_TOKENS = 10


def trace_of(
    words: Sequence[str], arrivals: Sequence[float] = (), tail: int = 1
) -> Trace:
    """Requests of one chunk per letter and ``tail`` tokens; all at once by default."""
    times = arrivals or [0.0] * len(words)
    requests = tuple(
        TraceRequest(time, CHUNK_TOKENS * len(word) + tail, 1, _keys(word))
        for word, time in zip(words, times, strict=True)
    )
    return Trace("words", CHUNK_TOKENS, 0, requests)


def _keys(word: str) -> tuple[ChunkKey, ...]:
    return tuple(ChunkKey(word[:end].encode()) for end in range(1, len(word) + 1))


def words(letters: str, longest: int, most: int) -> st.SearchStrategy[list[str]]:
    """Lists of words for ``trace_of``."""
    word = st.text(alphabet=letters, min_size=1, max_size=longest)
    return st.lists(word, min_size=1, max_size=most)
