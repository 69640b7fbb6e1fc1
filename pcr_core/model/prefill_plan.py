"""Cut a prompt into stored chunks and forwards. Pure functions, no tensors.

A chunk's KV depends on the tokens before it, not on whether their KV was stored, so a
missing chunk in the middle costs its own forward and the later ones are still used.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise

ROW_UNIT = 16
"""Forwards start, and rows are padded, at multiples of this."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """Where a prefill may be cut without changing a bit.

    Attributes:
        name: ``"shape-independent"``, ``"grid"`` or ``"free"``, for the statistics.
        align: Forwards start at multiples of this many tokens.
        pad: Row counts are padded to a multiple of this.
        step: Longest forward in tokens, ``None`` for no limit. On the grid it is the
            chunk, cold and warm alike, which makes both the same forwards.
        exact: Whether reuse is promised to change no bit.
    """

    name: str
    align: int
    pad: int
    step: int | None
    exact: bool = True


def shape_independent() -> Cuts:
    """Exact where kernels are: any cut at a multiple of ``ROW_UNIT`` tokens."""
    return Cuts("shape-independent", align=ROW_UNIT, pad=ROW_UNIT, step=None)


def grid(chunk_tokens: int) -> Cuts:
    """Exact anywhere: the same chunk-sized forwards, cold and warm."""
    return Cuts("grid", align=chunk_tokens, pad=1, step=chunk_tokens)


def free() -> Cuts:
    """Not exact: cut anywhere, pad nothing."""
    return Cuts("free", align=1, pad=1, step=None, exact=False)


@dataclass(frozen=True, slots=True)
class Segment:
    """One forward: load chunks, then compute tokens ``start..stop``, filling chunks.

    Attributes:
        loads: Indices of the chunks to load first.
        start, stop: Token range to compute.
        stores: Indices of the chunks it completes.
    """

    loads: tuple[int, ...]
    start: int
    stop: int
    stores: tuple[int, ...]


def usable_chunks(tokens: int, chunk_tokens: int, cuts: Cuts) -> int:
    """Leading chunks that may be read: at least the last token must be computed.

    Cuts finer than a chunk allow the last full chunk even when the prompt ends with
    it; then only its last ``align`` tokens run again, for the logits.
    """
    if cuts.align < chunk_tokens:
        return tokens // chunk_tokens
    return (tokens - 1) // chunk_tokens


def plan_prefill(
    tokens: int, chunk_tokens: int, stored: Collection[int], cuts: Cuts
) -> list[Segment]:
    """Segments, in order, that leave KV for all ``tokens`` tokens and run the last one.

    Args:
        tokens: Prompt length.
        chunk_tokens: Tokens per chunk.
        stored: Indices of chunks that can be loaded, all below ``usable_chunks``.
        cuts: Where forwards may start and how long they may be.
    """
    last = (tokens - 1) // cuts.align * cuts.align
    segments: list[Segment] = []
    loads: list[int] = []
    for start, stop in _ranges(tokens, chunk_tokens, stored, last):
        first = start // chunk_tokens
        loads += [i for i in _between(segments, first, chunk_tokens) if i in stored]
        if start % chunk_tokens and first in stored:
            loads.append(first)
        for a, b in _steps(start, stop, cuts.step):
            stores = range(-(-a // chunk_tokens), b // chunk_tokens)
            segments.append(Segment(tuple(loads), a, b, tuple(stores)))
            loads = []
    return segments


def _ranges(
    tokens: int, chunk_tokens: int, stored: Collection[int], last: int
) -> list[tuple[int, int]]:
    """Maximal token ranges that must be computed."""
    ranges: list[tuple[int, int]] = []
    for start in range(0, tokens, chunk_tokens):
        stop = min(start + chunk_tokens, tokens)
        if start // chunk_tokens in stored:
            start = max(start, last)
        if start >= stop or (start // chunk_tokens in stored and stop < tokens):
            continue
        if ranges and ranges[-1][1] == start:
            ranges[-1] = (ranges[-1][0], stop)
        else:
            ranges.append((start, stop))
    return ranges


def _between(segments: list[Segment], first: int, chunk_tokens: int) -> range:
    """Chunks after the last computed range and before chunk ``first``."""
    done = -(-segments[-1].stop // chunk_tokens) if segments else 0
    return range(done, first)


def _steps(start: int, stop: int, step: int | None) -> list[tuple[int, int]]:
    """Cut a range where the grid says."""
    if step is None:
        return [(start, stop)]
    edges = [start, *range((start // step + 1) * step, stop, step), stop]
    return list(pairwise(edges))
