"""Drawing a token: temperature, top-k, top-p, min-p, then one random number.

What is kept is what transformers' warpers keep, in their order; they sort the whole
vocabulary for it, which takes longer than a small model's forward. Here only the most
likely tokens are sorted, and all of them only where those are not enough.

In NumPy, on the calling thread: torch would split each of these short operations over
its threads, and wait for all of them where other work has the cores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Floats = npt.NDArray[np.floating[Any]]
Ids = npt.NDArray[np.integer[Any]]

_NUCLEUS = 1024
"""Tokens that are sorted first to find the smallest set of mass ``top_p``."""


@dataclass(frozen=True, slots=True)
class Warp:
    """Temperature above 0, and truncations; 1.0, 0 and 0.0 are off."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float


def candidates(scores: Floats, warp: Warp) -> tuple[Ids, Floats]:
    """Tokens that can be drawn and their chances.

    Args:
        scores: ``[vocabulary]``, fp32, at least one above ``-inf``, none ``+inf``.
        warp: What to keep of them.

    Returns:
        Ids in ascending order and their probabilities, fp64, both ``[kept]``.
    """
    with np.errstate(over="ignore"):  # what is far below the best is impossible
        scores = (scores - scores.max()) / scores.dtype.type(warp.temperature)
    ids: Ids = np.arange(scores.size)
    if 0 < warp.top_k < scores.size:
        kth = np.partition(scores, -warp.top_k)[-warp.top_k]
        ids = np.flatnonzero((scores >= kth) & (scores > -math.inf))
        scores = scores[ids]
    if warp.top_p < 1.0:
        kept = _nucleus(scores, warp.top_p)
        ids, scores = ids[kept], scores[kept]
    if warp.min_p > 0.0:
        kept = np.flatnonzero(scores >= math.log(warp.min_p))
        ids, scores = ids[kept], scores[kept]
    chances = np.exp(scores, dtype=np.float64)
    return ids, chances / chances.sum()


def draw(scores: Floats, warp: Warp, random: torch.Generator) -> int:
    """One token, drawn with a single random number. Arguments as for ``candidates``.

    Ids are in ascending order, so that rounding of the scores moves the borders between
    tokens by as little: sorted by chance, two nearly equal tokens would change places.
    """
    ids, chances = candidates(scores, warp)
    reached = chances.cumsum()
    point = float(torch.rand(1, generator=random, dtype=torch.float64)) * reached[-1]
    index = int(reached.searchsorted(point, side="right"))
    return int(ids[min(index, ids.size - 1)])


def log_total(scores: Floats) -> float:
    """Logarithm of the sum of ``exp(scores)``, for ``[vocabulary]`` fp32 scores."""
    best = float(scores.max())
    return best + math.log(float(np.exp(scores - best).sum(dtype=np.float64)))


def best_first(scores: Floats, count: int) -> Ids:
    """Places of the ``count`` largest scores, the largest first."""
    best = np.sort(np.argpartition(scores, -count)[-count:])
    return best[np.argsort(-scores[best], kind="stable")]


def _nucleus(scores: Floats, mass: float) -> Ids:
    """Places of the fewest scores whose chances reach ``mass``, in ascending order.

    A token is kept if the likelier ones do not reach ``mass`` (Holtzman et al., 2020).

    Args:
        scores: The best of them is 0.
        mass: Between 0 and 1.
    """
    total = np.exp(scores).sum(dtype=np.float64)
    count = min(_NUCLEUS, scores.size)
    while True:
        best = best_first(scores, count)
        chances = np.exp(scores[best], dtype=np.float64) / total
        reached = chances.cumsum()
        if count == scores.size or reached[-1] >= mass:
            kept = reached - chances < mass
            kept[0] = True
            return np.sort(best[kept])
        count = scores.size
