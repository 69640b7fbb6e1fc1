"""Drawing a token: temperature, top-k, top-p, min-p, then one random number.

What is kept is what transformers' warpers keep, in their order; they sort the whole
vocabulary for it, which takes longer than a small model's forward. Here only the most
likely tokens are sorted, and all of them only where those are not enough.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

_NUCLEUS = 1024
"""Tokens that are sorted first to find the smallest set of mass ``top_p``."""


@dataclass(frozen=True, slots=True)
class Warp:
    """Temperature above 0, and truncations; 1.0, 0 and 0.0 are off."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float


def candidates(scores: torch.Tensor, warp: Warp) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens that can be drawn and their chances.

    Args:
        scores: ``[vocabulary]``, fp32, at least one above ``-inf``, none ``+inf``.
        warp: What to keep of them.

    Returns:
        Ids in ascending order and their probabilities, fp64, both ``[kept]``.
    """
    scores = scores / warp.temperature
    ids: torch.Tensor | None = None
    if 0 < warp.top_k < scores.numel():
        kth = scores.topk(warp.top_k).values[-1]
        ids = ((scores >= kth) & (scores > -math.inf)).nonzero()[:, 0]
        scores = scores[ids]
    if warp.top_p < 1.0:
        kept = _nucleus(scores, warp.top_p)
        ids, scores = kept if ids is None else ids[kept], scores[kept]
    if warp.min_p > 0.0:
        kept = (scores >= scores.max() + math.log(warp.min_p)).nonzero()[:, 0]
        ids, scores = kept if ids is None else ids[kept], scores[kept]
    chances = scores.double().softmax(0)
    if ids is None:
        return torch.arange(scores.numel()), chances
    order = ids.argsort()
    return ids[order], chances[order]


def draw(scores: torch.Tensor, warp: Warp, random: torch.Generator) -> int:
    """One token, drawn with a single random number. Arguments as for ``candidates``.

    Ids are in ascending order, so that rounding of the scores moves the borders between
    tokens by as little: sorted by chance, two nearly equal tokens would change places.
    """
    ids, chances = candidates(scores, warp)
    reached = chances.cumsum(0)
    point = torch.rand(1, generator=random, dtype=torch.float64) * reached[-1]
    index = int(torch.searchsorted(reached, point, right=True))
    return int(ids[min(index, ids.numel() - 1)])


def _nucleus(scores: torch.Tensor, mass: float) -> torch.Tensor:
    """Places of the fewest scores whose probabilities reach ``mass``, likeliest first.

    One is kept if those before it do not reach ``mass`` (Holtzman et al., 2020).
    """
    total = scores.double().logsumexp(0)
    count = min(_NUCLEUS, scores.numel())
    while True:
        top = scores.topk(count)
        chances = (top.values.double() - total).exp()
        reached = chances.cumsum(0)
        if count == scores.numel() or float(reached[-1]) >= mass:
            kept = reached - chances < mass
            kept[0] = True
            return top.indices[kept]
        count = scores.numel()
