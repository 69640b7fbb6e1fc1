"""The output head in tiles: the same logits, and no trace afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pcr_core.model import onednn
from pcr_core.model.linear import LayerPlan
from pcr_core.model.output_head import head_installed, plan_head
from pcr_core.model.row_tiles import RowTiles

TILES = RowTiles({1: 1.0, 4: 2.0})


class Small(nn.Module):
    """An embedding and a head; tied, or not."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 32)
        self.head = nn.Linear(32, 50, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight

    def get_output_embeddings(self) -> nn.Linear:
        return self.head


def plan(packed: bool) -> LayerPlan:
    if packed and not onednn.supports(torch.float32):
        pytest.skip("no packed kernel on this machine")
    return LayerPlan(packed, TILES, TILES)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("packed", [True, False])
@torch.inference_mode()
def test_a_row_has_the_same_logits_alone_and_beside_others(
    tied: bool, packed: bool
) -> None:
    model = Small(tied=tied)
    weight, bits = model.head.weight, model.head.weight.clone()
    rows = torch.randn(5, 1, 32)
    stock = model.head(rows)
    with head_installed(model, plan(packed)) as copied:
        together = model.head(rows)
        assert together.shape == (5, 1, 50)
        assert torch.allclose(together, stock, atol=1e-5)
        prefill = torch.randn(1, 7, 32)
        assert torch.allclose(
            model.head(prefill), nn.Linear.forward(model.head, prefill)
        )
        assert copied.nbytes == (weight.nbytes if packed else 0)
        sizes = [size for _, size in copied.memory]
        assert all(size >= weight.nbytes for size in sizes)
        assert packed or not sizes
        assert model.head.weight is weight
    assert "forward" not in vars(model.head)
    assert torch.equal(model.head.weight, bits)


@pytest.mark.parametrize("hooked", [True, False])
def test_it_is_left_alone_without_a_plan_or_if_somebody_has_it(hooked: bool) -> None:
    model = Small(tied=True)
    forward: Any = model.head.forward
    if hooked:
        model.head.__dict__["forward"] = forward
        assert plan_head(model) is None
    with head_installed(model, plan(False) if hooked else None) as copied:
        assert copied.nbytes == 0
        assert vars(model.head).get("forward") is (forward if hooked else None)
    assert ("forward" in vars(model.head)) is hooked


def test_it_is_put_back_after_an_error() -> None:
    model = Small(tied=True)
    with pytest.raises(ZeroDivisionError), head_installed(model, plan(False)):
        raise ZeroDivisionError
    assert "forward" not in vars(model.head)


def test_a_plan_is_measured_and_fits() -> None:
    model = Small(tied=False)
    found = plan_head(model)
    assert found is not None
    assert sum(found.few.plan(3)) >= 3
