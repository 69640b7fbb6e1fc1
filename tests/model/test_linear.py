"""Linear layers in tiles: bits do not depend on the row count, and all is put back."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from pcr_core.model import linear, onednn, products
from pcr_core.model.linear import (
    LayerPlan,
    in_tiles,
    measure,
    plan_layers,
    row_tiles_installed,
)
from pcr_core.model.row_tiles import COARSE_SIZES, SIZES, RowTiles

DTYPES = [torch.float32, torch.bfloat16]
MOST = 200


class Small(nn.Module):
    """Two layers of different shape, one without a bias, and a head."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embed = nn.Embedding(50, 96)
            self.first = nn.Linear(96, 160)
            self.second = nn.Linear(160, 96, bias=False)
            self.tied = nn.Linear(96, 50, bias=False)
            self.head = nn.Linear(96, 50, bias=False)
        self.tied.weight = self.embed.weight
        self.to(dtype)

    def get_output_embeddings(self) -> nn.Linear:
        return self.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(functional.silu(self.first(x)))
        return out


@contextmanager
def installed(model: Any, packed: bool) -> Iterator[None]:
    """Tiles as they were measured, with the kernel that the test wants."""
    plans = {}
    for shape, plan in plan_layers(model).items():
        layer = next(m for m in linear._layers(model) if linear._shape(m) == shape)
        tiles = plan.tiles if plan.packed is packed else _tiles(layer, packed)
        plans[shape] = LayerPlan(packed, tiles)
    with row_tiles_installed(model, plans):
        yield


def _tiles(layer: nn.Linear, packed: bool) -> RowTiles:
    weight, bias = layer.weight.detach(), linear.bias_of(layer)
    kernel = (
        linear.PackedKernel(onednn.pack(weight), bias)
        if packed
        else linear.PlainKernel(weight, bias)
    )
    return linear.best_class(linear._classes([kernel], linear.noise_for(weight), SIZES))


def noise(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, width, generator=generator).to(dtype)


@pytest.fixture(params=[False, True], ids=["plain", "packed"])
def packed(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_do_not_depend_on_the_row_count(dtype: torch.dtype, packed: bool) -> None:
    if packed and not onednn.supports(dtype):
        pytest.skip("oneDNN has no packed kernel for this dtype on this machine")
    model, rows = Small(dtype), noise(MOST, 96, dtype)
    with torch.inference_mode(), installed(model, packed):
        whole = model(rows)
        for count in range(2, MOST):
            assert torch.equal(model(rows[:count]), whole[:count]), count
        # Nor on the place within the batch.
        for start in (1, 16, 77):
            assert torch.equal(model(rows[start:]), whole[start:]), start
        one = torch.cat([model(rows[i : i + 1]) for i in range(MOST)])
        again = torch.cat([model(rows[i : i + 1]) for i in range(MOST)])
        assert torch.equal(one, again)
    tolerance = 1e-4 if dtype is torch.float32 else 0.05
    with torch.inference_mode():
        expected = model(rows)
    for computed in (whole, one):
        assert torch.allclose(computed.float(), expected.float(), atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_everything_is_put_back(dtype: torch.dtype, packed: bool) -> None:
    if packed and not onednn.supports(dtype):
        pytest.skip("oneDNN has no packed kernel for this dtype on this machine")
    model = Small(dtype)
    model.second.weight.requires_grad_(False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainable = {name: p.requires_grad for name, p in model.named_parameters()}
    names = {name: set(vars(module)) for name, module in model.named_modules()}
    with installed(model, packed):
        assert (model.first.weight.layout is torch._mkldnn) is packed
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name
    assert {n: p.requires_grad for n, p in model.named_parameters()} == trainable
    assert {n: set(vars(m)) for n, m in model.named_modules()} == names
    assert model.tied.weight is model.embed.weight


def test_packing_keeps_one_copy() -> None:
    """The packed tensor is the parameter; nothing else holds the old weights."""
    if not onednn.supports(torch.float32):
        pytest.skip("oneDNN is not available")
    model = Small(torch.float32)
    pointer = model.first.weight.data_ptr()
    assert pointer in _strided_data()
    with installed(model, packed=True):
        assert pointer not in _strided_data()


def test_packed_weights_say_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    if not onednn.supports(torch.float32):
        pytest.skip("oneDNN is not available")
    model = Small(torch.float32)
    least = [layer.weight.nbytes for layer in (model.first, model.second)]
    assert linear.packed_memory(model) == []
    with installed(model, packed=True):
        found = linear.packed_memory(model)
        pairs = zip(found, least, strict=True)
        assert all(size >= n for (_, size), n in pairs)
        assert all(address > 0 for address, _ in found)
        monkeypatch.setattr(torch.ops, "mkldnn", object())
        assert linear.packed_memory(model) == [], "another torch may not tell"


def test_pieces_are_the_product_and_need_no_more_rows_than_they_ask_for(
    packed: bool,
) -> None:
    if packed and not onednn.supports(torch.float32):
        pytest.skip("oneDNN is not available")
    model, rows = Small(torch.float32), noise(MOST, 96, torch.float32)
    layer = model.first
    with torch.inference_mode():
        assert products.room(layer, 7, few=False) == 7, "not in tiles yet"
        ((at, whole),) = products.pieces(layer, rows, 7, few=False)
        assert (at, whole.shape) == (0, (7, 160))
        with installed(model, packed):
            for count in (1, 2, 15, 16, 17, 100, MOST):
                for few in {True, count == 1}:  # one row is always taken for few
                    x = rows[:count, None] if few else rows[None, :count]
                    expected = layer(x).view(count, 160)
                    ample = torch.full((products.room(layer, count, few=few), 96), 3.0)
                    ample[:count] = rows[:count]
                    for given in (rows[:count], ample):
                        found = list(products.pieces(layer, given, count, few=few))
                        starts = [at for at, _ in found]
                        sizes = [len(part) for _, part in found]
                        assert starts == [sum(sizes[:i]) for i in range(len(sizes))]
                        joined = torch.cat([part for _, part in found])
                        assert torch.equal(joined, expected), (count, few)
        assert products.room(layer, 7, few=False) == 7


def _strided_data() -> set[int]:
    """Where the data is of every ordinary tensor that anybody holds."""
    gc.collect()
    tensors = (item for item in gc.get_objects() if type(item) in _TENSORS)
    return {t.data_ptr() for t in tensors if t.layout is torch.strided}


_TENSORS = (torch.Tensor, nn.Parameter)


def test_it_is_put_back_after_an_error() -> None:
    model = Small(torch.float32)
    with pytest.raises(KeyError), row_tiles_installed(model, {}):
        pass
    assert "forward" not in vars(model.first)
    with pytest.raises(ZeroDivisionError), installed(model, packed=False):
        raise ZeroDivisionError
    assert "forward" not in vars(model.first)


def test_head_and_tied_layers_are_left_alone() -> None:
    model = Small(torch.float32)
    assert list(linear._layers(model)) == [model.first, model.second]
    with installed(model, packed=False):
        assert "forward" not in vars(model.head)
        assert "forward" not in vars(model.tied)


def test_leading_dimensions_are_kept() -> None:
    model = Small(torch.float32)
    with torch.inference_mode(), installed(model, packed=False):
        for shape in ((1, 1), (1, 7), (2, 3), (40,)):
            assert model(torch.ones(*shape, 96)).shape == (*shape, 96)


def test_padding_rows_never_come_out() -> None:
    weight = torch.eye(4)
    kernel = linear.PlainKernel(weight, torch.full((4,), 9.0))
    rows = torch.arange(20.0).view(5, 4)
    for costs in ({16: 1.0}, {16: 1.0, 32: 9.0}):
        assert torch.equal(in_tiles(rows, kernel, RowTiles(costs), 4), rows + 9)
    many = torch.arange(160.0).view(40, 4)
    assert torch.equal(in_tiles(many, kernel, RowTiles({16: 1.0}), 4), many + 9)


def test_a_measured_class_agrees_bit_for_bit() -> None:
    layer = nn.Linear(96, 160)
    plan = measure([layer])
    assert plan.tiles.costs
    assert all(seconds > 0 for seconds in plan.tiles.costs.values())


def test_a_large_layer_still_gets_large_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a cold prompt would stream its weights for every few rows."""
    monkeypatch.setattr(linear, "_LARGE_WEIGHT", 0)
    torch.manual_seed(0)
    layer = nn.Linear(64, 96)
    tiles = linear.measure([layer]).tiles
    assert set(tiles.costs) <= set(COARSE_SIZES)
    assert max(tiles.costs) >= 512
    assert len(tiles.plan(1024)) <= 2
