"""Linear layers' products, piece by piece as they are computed.

A product in row tiles is in pieces anyway. Whoever goes on with each piece, instead of
having all copied together first, saves that pass over memory and finds the piece in
cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import nn

_TILED = "_pcr_tiled"


class Tiled(Protocol):
    """How a layer computes in tiles."""

    def room(self, count: int, *, few: bool) -> int:
        """Rows of all tiles together that ``count`` rows take."""
        ...

    def pieces(
        self, rows: torch.Tensor, count: int, *, few: bool
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """See ``pieces``."""
        ...


def keep_tiled(layer: nn.Linear, tiled: Tiled | None) -> None:
    """Say how a layer computes in tiles; ``None``: it does not any more."""
    if tiled is None:
        layer.__dict__.pop(_TILED, None)
    else:
        layer.__dict__[_TILED] = tiled


def room(layer: nn.Linear, count: int, *, few: bool) -> int:
    """How many rows ``pieces`` wants to be given for ``count``, not to copy any."""
    tiled: Tiled | None = layer.__dict__.get(_TILED)
    return count if tiled is None else tiled.room(count, few=few)


def pieces(
    layer: nn.Linear, rows: torch.Tensor, count: int, *, few: bool
) -> Iterator[tuple[int, torch.Tensor]]:
    """A linear layer's product.

    Args:
        layer: See above.
        rows: ``[at least count, in_features]``; what is in further rows is ignored, but
            must be finite.
        count: How many rows are wanted.
        few: Whether these are one token of each of several rows.

    Returns:
        The first row of each piece, and the piece ``[some rows, out_features]``, in
        memory that is the caller's.
    """
    tiled: Tiled | None = layer.__dict__.get(_TILED)
    if tiled is None:
        return iter([(0, layer(rows[:count]))])
    return tiled.pieces(rows, count, few=few)
