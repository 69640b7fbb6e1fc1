"""How far two results may be apart that differ by rounding only."""

from __future__ import annotations

import torch

_SHARE = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}
"""Of the largest value, by what it was computed in."""


def differ_by_rounding(
    reference: torch.Tensor, other: torch.Tensor, dtype: torch.dtype
) -> bool:
    """Whether two tensors of one shape are as close as rounding leaves them.

    Args:
        reference: Finite.
        other: Compared with it; anything that is not finite is too far away.
        dtype: What both were computed in.
    """
    far = (reference.float() - other.float()).abs().max()
    return bool(far <= _SHARE[dtype] * reference.float().abs().max())
