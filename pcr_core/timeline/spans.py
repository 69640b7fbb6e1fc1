"""Arithmetic on sets of moments, each a list of spans ``(start, stop)`` in seconds.

A *set* here is sorted, its spans are disjoint and longer than nothing. Knows nothing
about requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

Span = tuple[float, float]


def union(spans: Iterable[Span]) -> list[Span]:
    """The set of moments that lie in any of ``spans``, which may overlap."""
    found: list[Span] = []
    for start, stop in sorted(spans):
        if start >= stop:
            continue
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return found


def without(spans: Sequence[Span], holes: Sequence[Span]) -> list[Span]:
    """The set ``spans`` less the set ``holes``."""
    left: list[Span] = []
    first = 0
    for start, stop in spans:
        while first < len(holes) and holes[first][1] <= start:
            first += 1
        index = first  # a hole may reach into the next span, too
        while index < len(holes) and holes[index][0] < stop:
            if start < holes[index][0]:
                left.append((start, holes[index][0]))
            start = holes[index][1]
            index += 1
        if start < stop:
            left.append((start, stop))
    return left


def within(spans: Sequence[Span], start: float, stop: float) -> list[Span]:
    """What of the set ``spans`` lies between ``start`` and ``stop``."""
    cut = ((max(a, start), min(b, stop)) for a, b in spans)
    return [(a, b) for a, b in cut if a < b]


def length(spans: Sequence[Span]) -> float:
    """Seconds in the set ``spans``."""
    return math.fsum(stop - start for start, stop in spans)
