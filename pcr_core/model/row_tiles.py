"""Which row counts of a matrix product give the same bits, and how to use only those.

A row of ``X @ W`` should not depend on how many other rows ``X`` has, but it does: BLAS
and oneDNN choose kernels, blockings and even a split of the reduction by shape. On an
AMX machine a 1536-to-576 bf16 layer rounds a row differently at 32, 64 and 300 rows.

So we measure. Candidate row counts ("tiles") are compared on real weights; those that
agree bit for bit, at every position inside the tile, form a class. Any number of rows
is then computed as a sum of tiles of one class, the last one padded: shape-independent
by construction, at the price of a little padding. Knows nothing about torch.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

TIMED_SIZES = (16, 32, 64, 96, 128, 192, 256, 512, 1024)
"""Candidate tiles that are timed, in rows."""
SIZES = (*range(16, 256, 16), *range(256, 2049, 64))
"""All candidate tiles; the others' cost is interpolated."""

COARSE_SIZES = (16, 32, 64, 128, 256, 512, 1024, 2048)
"""The candidates for layers on which comparing all of them would take too long."""

FEW_SIZES = (1, 2, 4, 8, 16, 32)
"""Candidate tiles for decode steps, where each row has one token."""

FEW_JUDGED = (1, 4, 8)
"""Numbers of rows their classes are judged by."""

JUDGED = (32, 128, 1088)
"""Row counts a class is judged by: two questions after a hit, and a cold prefill."""


@dataclass(frozen=True)
class RowTiles:
    """A class of tiles with one bit pattern, and what each costs.

    Attributes:
        costs: Seconds per call by tile size in rows.
    """

    costs: Mapping[int, float]
    _plans: dict[int, tuple[int, ...]] = field(default_factory=dict, compare=False)

    def plan(self, rows: int) -> tuple[int, ...]:
        """Tiles that cover ``rows`` rows at the least measured cost, largest first."""
        plan = self._plans.get(rows)
        if plan is None:
            plan = self._plans[rows] = self._cheapest(rows)
        return plan

    def seconds(self, rows: int) -> float:
        """Predicted time for ``rows`` rows."""
        return sum(self.costs[size] for size in self.plan(rows))

    def _cheapest(self, rows: int) -> tuple[int, ...]:
        """Shortest path over units of rows; what exceeds two largest tiles is bulk."""
        unit, largest = math.gcd(*self.costs), max(self.costs)
        bulk = max(0, rows // largest - 1)
        units = -(-(rows - bulk * largest) // unit)
        best: list[tuple[float, int]] = [(0.0, 0)]
        for covered in range(1, units + 1):
            best.append(
                min(
                    (best[max(0, covered - size // unit)][0] + cost, size)
                    for size, cost in self.costs.items()
                )
            )
        tiles = [largest] * bulk
        while units > 0:
            size = best[units][1]
            tiles.append(size)
            units -= size // unit
        return tuple(sorted(tiles, reverse=True))


def interpolate(timed: Mapping[int, float], size: int) -> float:
    """Seconds for a tile that was not timed: on the line between its neighbours."""
    known = sorted(timed)
    right = min(max(bisect_left(known, size), 1), len(known) - 1)
    a, b = known[right - 1], known[right]
    return timed[a] + (timed[b] - timed[a]) * (size - a) / (b - a)


def best_class(
    groups: Sequence[Mapping[int, float]], judged: Sequence[int] = JUDGED
) -> RowTiles:
    """Choose among classes (tile size -> seconds) the one that costs least overall.

    Judged at a few row counts, each relative to the best class there, so that neither
    a cold prefill nor a hit is sacrificed for the other.

    Args:
        groups: See above.
        judged: The row counts.
    """
    classes = [RowTiles(group) for group in groups]
    least = {rows: min(c.seconds(rows) for c in classes) for rows in judged}
    return min(
        classes, key=lambda c: sum(c.seconds(rows) / least[rows] for rows in judged)
    )
