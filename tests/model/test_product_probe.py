"""The probe of products sees an order of summing that noise would hide."""

from __future__ import annotations

import pytest
import torch

from pcr_core.index.chunk import LayerShape
from pcr_core.model import product_probe
from pcr_core.model.attention_kernels import KeyPortions
from pcr_core.model.product_probe import cancelling, finest_portions, noise_of

SHAPES = [LayerShape(2, 16, 16)]
DTYPES = [torch.float32, torch.bfloat16]
WINDOW = 2048


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_product_that_is_zero_but_for_rounding(dtype: torch.dtype) -> None:
    noise = noise_of(3, dtype)
    left, right = cancelling(noise(2, 7, 200), noise(2, 200, 5))
    assert left.shape == (2, 7, 400)
    assert right.shape == (2, 400, 5)
    exact = left.double() @ right.double()
    assert exact.abs().max() < 1e-9
    partial = left[..., :200].double() @ right[:, :200].double()
    assert partial.abs().mean() > 1


def _halves(weights: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Another order of summing, in fp32, from 256 keys on."""
    weights, value = weights.float(), value.float()
    at = weights.shape[2] // 2 if weights.shape[2] > 256 else 0
    parts = [weights[..., :at] @ value[:, :at], weights[..., at:] @ value[:, at:]]
    return (parts[0] + parts[1]).to(torch.bfloat16)


def _by_rows(weights: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Another order of summing for few rows."""
    if weights.shape[1] < 100:
        return weights.flip(2).bmm(value.flip(1))
    return weights.bmm(value)


@pytest.mark.parametrize("product", [_halves, _by_rows])
def test_another_order_of_summing_is_seen(
    monkeypatch: pytest.MonkeyPatch, product: object
) -> None:
    monkeypatch.setattr(product_probe.onednn, "supports", lambda dtype: True)
    monkeypatch.setattr(product_probe, "weighted_sum", product)
    assert finest_portions(4, SHAPES, torch.bfloat16, WINDOW) in (
        None,
        KeyPortions(),
    )


def test_a_score_that_depends_on_the_number_of_keys_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def scores_into(
        out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, scaling: float
    ) -> None:
        if key.shape[1] % 512:
            query, key = query.flip(2), key.flip(2)
        torch.baddbmm(out, query, key.transpose(1, 2), beta=0, alpha=scaling, out=out)

    monkeypatch.setattr(product_probe.onednn, "supports", lambda dtype: True)
    monkeypatch.setattr(product_probe, "scores_into", scores_into)
    found = finest_portions(4, SHAPES, torch.float32, WINDOW)
    assert found in (None, KeyPortions())


def test_a_dtype_without_a_fast_product_is_not_tried() -> None:
    assert finest_portions(4, SHAPES, torch.float64, WINDOW) is None
