"""Start-up probe of the attention kernels: which give equal bits, and which is faster.

What is compared on noise here is compared on sums that cancel in ``product_probe``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from pcr_core.index.chunk import LayerShape
from pcr_core.model.attention import AttentionPlan
from pcr_core.model.attention_kernels import (
    AttentionKernel,
    FusedAttention,
    KeyPortions,
    OneQueryAttention,
    UnfusedAttention,
    grouped_attention,
)
from pcr_core.model.key_blocks import KEY_BLOCK
from pcr_core.model.masks import LazyMask
from pcr_core.model.product_probe import finest_portions, noise_of

_TAIL_STEP = 32
_GRAINS = (64, 128, 256)
_TRIALS = 3
_RACED_KEYS = 1024 + KEY_BLOCK
_JUDGED = ((32, _RACED_KEYS - 32), (512, 0))  # (queries, first): a hit, a prompt
_ROUNDS = 5
_UNFUSED_MARGIN = 0.95  # what rounds scores to bf16 must win by this much


def plan_attention(
    heads: int, shapes: Sequence[LayerShape], dtype: torch.dtype, window: int
) -> AttentionPlan:
    """Compare the CPU kernels bit for bit, for every head shape, and time them.

    Args:
        heads: Query heads.
        shapes: Of the layers.
        dtype: Of queries, keys and values.
        window: Longest sequence, in tokens.
    """
    race = _Race(heads, max(shapes, key=lambda s: s.kv_heads * s.k_dim), dtype)
    portions = finest_portions(heads, shapes, dtype, window)
    decode = race.best_for_decode(portions)
    if portions is not None and race.unfused_wins(portions):
        return AttentionPlan(unfused=portions, decode=decode)
    return AttentionPlan(*fused_plan(heads, shapes, dtype), decode=decode)


def fused_plan(
    heads: int, shapes: Sequence[LayerShape], dtype: torch.dtype
) -> tuple[tuple[int, ...], int]:
    """Causal tails and key grain of SDPA.

    Tails: the causal kernel shortens its last key block to the last query, and some
    lengths make the matrix product in it round differently. Multiples of 32 are
    compared, in the first and in a later key block. Odd multiples of 16 are left out
    untested: with AMX they differ in a few outputs of a million, too rarely in bf16 to
    be sure of catching it.

    Grain: likewise a shorter last key block may change nothing under a mask; if so,
    a hit need not be padded to the whole block.
    """
    tails = set(range(_TAIL_STEP, KEY_BLOCK, _TAIL_STEP))
    grains = set(_GRAINS)
    for shape in set(shapes):
        for trial in range(_TRIALS):
            kernels = _Kernels(heads, shape, dtype, trial)
            tails = {tail for tail in tails if kernels.tail_agrees(tail)}
            grains = {grain for grain in grains if kernels.grain_agrees(grain)}
    return tuple(sorted(tails)), min(grains, default=KEY_BLOCK)


class _Kernels:
    """SDPA on noise over two key blocks, beside what it should give."""

    def __init__(
        self, heads: int, shape: LayerShape, dtype: torch.dtype, seed: int
    ) -> None:
        from transformers.masking_utils import causal_mask_function

        noise = torch.Generator().manual_seed(seed)
        length = 2 * KEY_BLOCK

        def random(count: int, dim: int) -> torch.Tensor:
            return torch.randn(1, count, length, dim, generator=noise).to(dtype)

        self._q = random(heads, shape.k_dim)
        self._k = random(shape.kv_heads, shape.k_dim)
        self._v = random(shape.kv_heads, shape.v_dim)
        self._mask = LazyMask(causal_mask_function, 0, length, length)
        blocks = ((0, KEY_BLOCK), (KEY_BLOCK, length))
        parts = [self._masked(start, stop, stop) for start, stop in blocks]
        self._expected = torch.cat(parts, dim=2)

    def tail_agrees(self, tail: int) -> bool:
        """Whether the causal kernel is right for this many queries into a block."""
        return self._causal_is_right(tail) and self._causal_is_right(KEY_BLOCK + tail)

    def grain_agrees(self, grain: int) -> bool:
        """Whether the masked kernel is right with a last key block cut at ``grain``."""
        for stop in range(grain, 2 * KEY_BLOCK, grain):
            for count in (16, 48, grain):
                start = max(stop - count, stop // KEY_BLOCK * KEY_BLOCK)
                expected = self._expected[:, :, start:stop]
                if not torch.equal(self._masked(start, stop, stop), expected):
                    return False
        return True

    def _causal_is_right(self, count: int) -> bool:
        q, k, v = self._q[:, :, :count], self._k[:, :, :count], self._v[:, :, :count]
        result = grouped_attention(q, k, v, None, None)
        return torch.equal(result, self._expected[:, :, :count])

    def _masked(self, start: int, stop: int, keys: int) -> torch.Tensor:
        mask = self._mask.block(start, stop, keys, self._q)
        q = self._q[:, :, start:stop]
        return grouped_attention(
            q, self._k[:, :, :keys], self._v[:, :, :keys], mask, None
        )


class _Race:
    """Kernels on noise, against the clock."""

    def __init__(self, heads: int, shape: LayerShape, dtype: torch.dtype) -> None:
        random = noise_of(2, dtype)
        self._heads, self._dim, self._random = heads, shape.k_dim, random
        self._k = random(1, shape.kv_heads, _RACED_KEYS, shape.k_dim)
        self._v = random(1, shape.kv_heads, _RACED_KEYS, shape.v_dim)

    def unfused_wins(self, portions: KeyPortions) -> bool:
        """Judged by a hit and by a prompt, each relative to SDPA.

        Where both end, every plan of SDPA's would hand over the same keys.
        """
        ratios = []
        for count, first in _JUDGED:
            ours, theirs = self._seconds(
                first, count, UnfusedAttention(portions), FusedAttention((), KEY_BLOCK)
            )
            ratios.append(ours / theirs)
        return sum(ratios) / len(ratios) < _UNFUSED_MARGIN

    def best_for_decode(self, portions: KeyPortions | None) -> str:
        """The fastest of what ``AttentionPlan.decode`` may be."""
        kernels: dict[str, AttentionKernel] = {"heads": OneQueryAttention(False)}
        if self._heads != self._k.shape[1]:
            kernels["rows"] = OneQueryAttention(True)
        if portions is not None:
            kernels["unfused"] = UnfusedAttention(portions)
        seconds = self._seconds(1024, 1, *kernels.values())
        return min(zip(seconds, kernels, strict=True))[1]

    def _seconds(
        self, first: int, count: int, *kernels: AttentionKernel
    ) -> list[float]:
        """The best time of each, of a few rounds in which they take turns."""
        from transformers.masking_utils import causal_mask_function

        mask = LazyMask(causal_mask_function, first, count, _RACED_KEYS)
        # Laid out in memory as models do.
        q = self._random(1, count, self._heads, self._dim).transpose(1, 2)
        best = [float("inf")] * len(kernels)
        for number in range(-1, _ROUNDS):  # the first compiles
            for index, kernel in enumerate(kernels):
                start = time.perf_counter()
                kernel(q, self._k, self._v, mask, None)
                if number >= 0:
                    best[index] = min(best[index], time.perf_counter() - start)
        return best
