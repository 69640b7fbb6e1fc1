"""Cut a prompt into stored chunks and forwards. Pure functions, no tensors.

A chunk's KV depends on the tokens before it, not on whether their KV was stored, so a
missing chunk in the middle costs its own forward and the later ones are still used.
The cut is made one forward at a time, because reads end while the forwards run.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from types import MappingProxyType

ROW_UNIT = 16
"""Forwards start, and rows are padded, at multiples of this."""


_NONE: Mapping[int, int] = MappingProxyType({})


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


def must_compute(tokens: int, chunk_tokens: int, cuts: Cuts) -> int:
    """Tokens at a prompt's end that are computed though every chunk can be read."""
    read = usable_chunks(tokens, chunk_tokens, cuts) * chunk_tokens
    return tokens - min(read, (tokens - 1) // cuts.align * cuts.align)


def front_chunk(position: int, chunk_tokens: int, sources: Container[int]) -> int:
    """The chunk at which computation would go on from ``position``.

    Args:
        position: Tokens whose KV is in place.
        chunk_tokens: Tokens per chunk.
        sources: Indices of chunks that can be loaded.

    Returns:
        The first chunk that is not complete and cannot be loaded; it may lie behind
        the end of the prompt.
    """
    index = position // chunk_tokens
    if position % chunk_tokens == 0:  # a chunk that was begun is computed to its end
        while index in sources:
            index += 1
    return index


def _cut(position: int, cuts: Cuts) -> int:
    """Where a prefill may be cut, at or before ``position``."""
    return position // cuts.align * cuts.align


def next_segment(
    position: int,
    tokens: int,
    chunk_tokens: int,
    sources: Container[int],
    pending: Container[int],
    cuts: Cuts,
    heads: Mapping[int, int] = _NONE,
    most: int | None = None,
) -> Segment:
    """The next forward of a prefill whose first ``position`` tokens are in place.

    It loads the chunks that can be loaded from there on, computes up to the next chunk
    that is stored or may still turn out to be, and so leaves that chunk to a later
    call. Asking again after each forward until ``stop`` is ``tokens`` leaves KV for
    all of them, the last one computed.

    Args:
        position: Tokens whose KV is in place, less than ``tokens``.
        tokens: Prompt length.
        chunk_tokens: Tokens per chunk.
        sources: Indices of chunks that can be loaded, all below ``usable_chunks``.
        pending: Indices of chunks whose reads are under way, ``front_chunk`` not
            among them.
        cuts: Where forwards may start and how long they may be.
        heads: How many leading tokens of a chunk that is not stored can be loaded all
            the same; they end where a forward may start.
        most: Longest forward in tokens, a multiple of ``cuts.align``; ``None`` for no
            limit but that of ``cuts``.
    """
    front = front_chunk(position, chunk_tokens, sources)
    loads = range(position // chunk_tokens, front)
    last = (tokens - 1) // cuts.align * cuts.align
    reached = front * chunk_tokens + heads.get(front, 0)
    start = min(reached, last) if reached > position else position
    stop = tokens if most is None else min(tokens, _cut(start + most, cuts))
    if cuts.step is not None:
        stop = min(stop, (start // cuts.step + 1) * cuts.step)
    for index in range(start // chunk_tokens + 1, -(-stop // chunk_tokens)):
        if index in sources or index in pending:
            stop = index * chunk_tokens
            break
    stores = range(front, stop // chunk_tokens)
    return Segment(tuple(loads), start, stop, tuple(stores))
