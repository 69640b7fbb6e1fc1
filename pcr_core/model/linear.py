"""Linear layers whose rows do not depend on how many rows there are (CPU).

For the duration of an engine, every ``nn.Linear`` of the model except the output head
computes in row tiles (see ``row_tiles``), with the kernel that measures best: torch's
own, or oneDNN's on weights packed once. Packing keeps one copy: the packed tensor
replaces the parameter, and the original bits are put back when the engine closes.
Structure, names and model code stay as they are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from pcr_core.model.row_tiles import SIZES, RowTiles, best_class

Kernel = Callable[[torch.Tensor], torch.Tensor]
"""``[rows, in_features]`` -> ``[rows, out_features]``."""

_PACK_ROWS = 64  # oneDNN's hint when it chooses the packed layout
_PROBE_FLOPS = 4e10  # bounds the probe of one very large layer to a second or so


@dataclass(frozen=True)
class LayerPlan:
    """How to run all layers of one shape."""

    packed: bool
    tiles: RowTiles


def _pack(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS)
    return packed


def _packed_kernel(packed: torch.Tensor, bias: torch.Tensor | None) -> Kernel:
    op = torch.ops.mkldnn._linear_pointwise
    return lambda rows: op(rows, packed, bias, "none", [], "")


def _plain_kernel(weight: torch.Tensor, bias: torch.Tensor | None) -> Kernel:
    return lambda rows: functional.linear(rows, weight, bias)


def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN has a packed kernel for this dtype on this machine."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float32


def in_tiles(rows: torch.Tensor, kernel: Kernel, tiles: RowTiles) -> torch.Tensor:
    """Apply ``kernel`` to ``[rows, in_features]`` in tiles of one class."""
    count = rows.shape[0]
    plan = tiles.plan(count)
    padding = sum(plan) - count
    if padding:
        rows = functional.pad(rows, (0, 0, 0, padding))
    if len(plan) == 1:
        return kernel(rows)[:count]
    return torch.cat([kernel(part) for part in rows.split(plan)])[:count]


def measure(weight: torch.Tensor, bias: torch.Tensor | None) -> LayerPlan:
    """Find the kernel and the tiles for layers shaped like this one.

    Compares all candidate tile sizes bit for bit on 1024 rows of noise (fewer for a
    layer so large that this would take seconds), and times them.
    """
    kernels: dict[bool, Kernel] = {False: _plain_kernel(weight, bias)}
    if can_pack(weight.dtype):
        kernels[True] = _packed_kernel(_pack(weight), bias)
    affordable = _PROBE_FLOPS / (2 * weight.numel() * len(SIZES) * len(kernels))
    most = max((size for size in SIZES if size <= affordable), default=SIZES[2])
    noise = torch.Generator().manual_seed(0)
    rows = torch.randn(most, weight.shape[1], generator=noise).to(weight.dtype)
    groups: list[tuple[bool, dict[int, float]]] = []
    for packed, kernel in kernels.items():
        groups += [(packed, group) for group in _classes(kernel, rows)]
    tiles = best_class([group for _, group in groups])
    packed = next(packed for packed, group in groups if group is tiles.costs)
    return LayerPlan(packed, tiles)


def _classes(kernel: Kernel, rows: torch.Tensor) -> list[dict[int, float]]:
    """Group tile sizes whose results agree on every row."""
    found: list[tuple[torch.Tensor, dict[int, float]]] = []
    for size in (size for size in SIZES if size <= rows.shape[0]):
        parts = rows.split(size)
        result = torch.cat([kernel(part) for part in parts])
        seconds = _seconds(kernel, parts[0])
        for seen, group in found:
            if torch.equal(seen, result):
                group[size] = seconds
                break
        else:
            found.append((result, {size: seconds}))
    return [group for _, group in found]


def _seconds(kernel: Kernel, rows: torch.Tensor) -> float:
    """Best of a few calls: interference only ever adds time."""
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        kernel(rows)
        best = min(best, time.perf_counter() - start)
    return best


def _layers(model: Any) -> Iterator[nn.Linear]:
    """The linear layers that run on many rows: all but the output head."""
    head = model.get_output_embeddings()
    shared = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in
              m.parameters()}
    for module in model.modules():
        if type(module) is not nn.Linear or module is head:
            continue
        if id(module.weight) not in shared and module.weight.device.type == "cpu":
            yield module


class _Installed:
    """One layer running in tiles, and the way back."""

    def __init__(self, layer: nn.Linear, plan: LayerPlan) -> None:
        self._layer = layer
        self._tiles = plan.tiles
        self._packed = plan.packed
        bias = None if layer.bias is None else layer.bias.detach()
        if plan.packed:
            packed = _pack(layer.weight.detach())
            layer._parameters["weight"] = nn.Parameter(packed, requires_grad=False)
            self._kernel = _packed_kernel(packed, bias)
        else:
            self._kernel = _plain_kernel(layer.weight.detach(), bias)
        layer.forward = self.forward  # type: ignore[method-assign]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., in_features]`` -> ``[..., out_features]``."""
        rows = x.reshape(-1, self._layer.in_features)
        # One row is decode: always the same shape, so it needs no tile.
        out = (
            self._kernel(rows)
            if rows.shape[0] == 1
            else in_tiles(rows, self._kernel, self._tiles)
        )
        return out.view(*x.shape[:-1], self._layer.out_features)

    def remove(self) -> None:
        """Put back the layer's own forward and its weight, bit for bit."""
        del self._layer.forward
        if self._packed:
            weight = self._layer.weight.to_dense()
            self._layer._parameters["weight"] = nn.Parameter(weight, requires_grad=False)


Shape = tuple[int, int, bool]


def plan_layers(model: Any) -> Mapping[Shape, LayerPlan]:
    """Measure one layer of every shape. Takes about 0.1 s for a 135M model."""
    plans: dict[Shape, LayerPlan] = {}
    for layer in _layers(model):
        shape = _shape(layer)
        if shape not in plans:
            bias = None if layer.bias is None else layer.bias.detach()
            plans[shape] = measure(layer.weight.detach(), bias)
    return plans


def _shape(layer: nn.Linear) -> Shape:
    return layer.in_features, layer.out_features, layer.bias is not None


@contextmanager
def row_tiles_installed(model: Any, plans: Mapping[Shape, LayerPlan]) -> Iterator[None]:
    """Run the model's linear layers in tiles; restore them afterwards."""
    installed: list[_Installed] = []
    try:
        for layer in list(_layers(model)):
            installed.append(_Installed(layer, plans[_shape(layer)]))
        yield
    finally:
        for layer in installed:
            layer.remove()
