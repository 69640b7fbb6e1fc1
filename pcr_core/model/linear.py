"""Linear layers whose rows do not depend on how many rows there are (CPU).

For the duration of an engine, every ``nn.Linear`` of the model except the output head
computes in row tiles (see ``row_tiles``), with the kernel that measures best: torch's
own, or oneDNN's on weights packed once. Packing keeps one copy: the packed tensor
replaces the parameter, and the original bits are put back when the engine closes.
Structure, names and model code stay as they are.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional

from pcr_core.memory import page_out
from pcr_core.model import onednn
from pcr_core.model.fused import fused_from, fused_layers, fused_parts
from pcr_core.model.products import keep_tiled
from pcr_core.model.row_tiles import (
    COARSE_SIZES,
    FEW_JUDGED,
    FEW_SIZES,
    JUDGED,
    SIZES,
    TIMED_SIZES,
    RowTiles,
    best_class,
    interpolate,
)

_LARGE_WEIGHT = 6_000_000  # elements; up to here all sizes take a second or two
_TIMED_LAYERS = 6
_COMPARED_ROWS = 512
_COMPARED_FEW = 64
_ROUNDS = 4
_TIMING_SECONDS = 2.0
_CALL_SECONDS = 10e-6  # what one more call costs in Python
_PACK_MARGIN = 0.95  # packing must win by this much to be worth touching the weights


@dataclass(frozen=True)
class LayerPlan:
    """How to run all layers of one shape.

    Attributes:
        packed: Whether on packed weights.
        tiles: For the tokens of a prefill.
        few: For one token of each of several rows. The default is one row at a time.
    """

    packed: bool
    tiles: RowTiles
    few: RowTiles = field(default_factory=lambda: RowTiles({1: 1.0}))


class Kernel(Protocol):
    """``[rows, in_features]`` -> ``[rows, out_features]``, by one fixed code path."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """The product, in new memory."""
        ...

    def into(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """The product, written to ``out``; the same bits."""
        ...


class PlainKernel:
    """torch's own matrix product."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight.t()
        self._bias = bias

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """See ``Kernel``."""
        out = rows.new_empty(rows.shape[0], self._weight.shape[1])
        self.into(rows, out)
        return out

    def into(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """See ``Kernel``."""
        if self._bias is None:
            torch.mm(rows, self._weight, out=out)
        else:
            torch.addmm(self._bias, rows, self._weight, out=out)


class PackedKernel:
    """oneDNN's, on weights packed once instead of at every call."""

    def __init__(self, packed: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._packed = packed
        self._bias = bias

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """See ``Kernel``."""
        return onednn.linear(rows, self._packed, self._bias)

    def into(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """See ``Kernel``; the operator cannot write in place, so this copies."""
        out.copy_(self(rows))


def bias_of(layer: nn.Linear) -> torch.Tensor | None:
    """The layer's bias, if it has one."""
    bias: torch.Tensor | None = layer.bias  # nn.Linear declares it as never None
    return None if bias is None else bias.detach()


def in_tiles(
    rows: torch.Tensor, kernel: Kernel, tiles: RowTiles, out_features: int
) -> torch.Tensor:
    """Apply ``kernel`` to ``[rows, in_features]`` in tiles of one class."""
    count = rows.shape[0]
    plan = tiles.plan(count)
    if len(plan) == 1:
        return kernel(_tile(rows, 0, plan[0]))[:count]
    out = rows.new_empty(sum(plan), out_features)
    at = 0
    for size in plan:
        kernel.into(_tile(rows, at, size), out[at : at + size])
        at += size
    return out[:count]


def _tile(rows: torch.Tensor, at: int, size: int) -> torch.Tensor:
    """``size`` rows; those that are missing at the end are zeros."""
    if at == 0 and size == rows.shape[0]:
        return rows
    part = rows[at : at + size]
    missing = size - part.shape[0]
    return functional.pad(part, (0, 0, 0, missing)) if missing else part


def measure(layers: Sequence[nn.Linear]) -> LayerPlan:
    """Find the kernel and the tiles for layers of one shape.

    Compares candidate tile sizes bit for bit on noise (only powers of two, for a layer
    so large that all of them would take many seconds), and times some of them on
    several layers in turn, so that weights come from memory as they do in a forward.
    """
    large = layers[0].weight.numel() > _LARGE_WEIGHT
    sizes = COARSE_SIZES if large else SIZES
    weights = [
        layer.weight.detach() for layer in layers[: 2 if large else _TIMED_LAYERS]
    ]
    bias = bias_of(layers[0])
    rows = noise_for(weights[0])
    plain = [PlainKernel(w, bias) for w in weights]
    found = LayerPlan(
        False, best_class(_classes(plain, rows, sizes)), few_tiles(plain, rows)
    )
    if not onednn.supports(weights[0].dtype):
        return found
    packed = [PackedKernel(onednn.pack(w), bias) for w in weights]
    other = LayerPlan(
        True, best_class(_classes(packed, rows, sizes)), few_tiles(packed, rows)
    )
    return better_plan(found, other)


def better_plan(plain: LayerPlan, packed: LayerPlan) -> LayerPlan:
    """The plan that costs less over a hit, a prompt and decode steps."""
    ratios = [packed.tiles.seconds(n) / plain.tiles.seconds(n) for n in JUDGED]
    ratios += [packed.few.seconds(n) / plain.few.seconds(n) for n in FEW_JUDGED]
    return packed if sum(ratios) / len(ratios) < _PACK_MARGIN else plain


def few_tiles(kernels: Sequence[Kernel], rows: torch.Tensor) -> RowTiles:
    """Row counts that give a row the same bits as others do, for decode steps.

    A class may be single rows only; then several rows are as many products.
    """
    some = rows[:_COMPARED_FEW]
    return best_class(_classes(kernels, some, FEW_SIZES, FEW_SIZES), FEW_JUDGED)


def noise_for(weight: torch.Tensor) -> torch.Tensor:
    """As many rows as the largest tile has."""
    noise = torch.Generator().manual_seed(0)
    return torch.randn(max(SIZES), weight.shape[1], generator=noise).to(weight.dtype)


def _classes(
    kernels: Sequence[Kernel],
    rows: torch.Tensor,
    sizes: Sequence[int],
    timed: Sequence[int] = TIMED_SIZES,
) -> list[dict[int, float]]:
    """Group tile sizes whose results agree on every row; sizes -> seconds.

    A class is represented by all rows in tiles of its first size; a further size is
    compared on one tile, or on as many as make ``_COMPARED_ROWS``.
    """
    seconds = _seconds(kernels, rows, [size for size in timed if size in sizes])
    found: list[tuple[torch.Tensor, dict[int, float]]] = []
    for size in sizes:
        result = _tiled(kernels[0], rows, size, size * max(1, _COMPARED_ROWS // size))
        cost = seconds[size] if size in seconds else interpolate(seconds, size)
        for seen, group in found:
            common = min(len(seen), len(result))
            if torch.equal(seen[:common], result[:common]):
                group[size] = cost
                break
        else:
            found.append((_tiled(kernels[0], rows, size, len(rows)), {size: cost}))
    return [group for _, group in found]


def _tiled(kernel: Kernel, rows: torch.Tensor, size: int, most: int) -> torch.Tensor:
    """Whole tiles of ``size`` rows, from the first ``most`` rows."""
    whole = rows[: min(most, len(rows)) // size * size]
    return torch.cat([kernel(part) for part in torch.split(whole, size)])


def _seconds(
    kernels: Sequence[Kernel], rows: torch.Tensor, sizes: Sequence[int]
) -> dict[int, float]:
    """Time per call by tile size: the best of a few rounds, as interference only adds.

    The sizes take turns within a round, so that a slow moment hits all of them.
    """
    best = dict.fromkeys(sizes, float("inf"))
    until = time.perf_counter() + _TIMING_SECONDS
    for number in range(_ROUNDS):
        if number and time.perf_counter() > until:
            break  # a busy machine: a worse choice beats a long start
        for size in sizes:
            start = time.perf_counter()
            for kernel in kernels:
                kernel(rows[:size])
            elapsed = (time.perf_counter() - start) / len(kernels)
            best[size] = min(best[size], elapsed)
    return {size: seconds + _CALL_SECONDS for size, seconds in best.items()}


def _layers(model: Any) -> Iterator[nn.Linear]:
    """The linear layers that run on many rows: all but the output head."""
    head = model.get_output_embeddings()
    shared = {
        id(p)
        for m in model.modules()
        if isinstance(m, nn.Embedding)
        for p in m.parameters()
    }
    for module in (*model.modules(), *fused_layers(model)):
        if type(module) is not nn.Linear or module is head:
            continue
        if id(module.weight) in shared or "forward" in module.__dict__:
            continue  # tied to another module, or hooked by somebody else
        shared.add(id(module.weight))
        if module.weight.device.type == "cpu":
            yield module


def packed_memory(model: Any) -> list[tuple[int, int]]:
    """Address and size in bytes of all packed weights."""
    layers = (*model.modules(), *fused_layers(model))
    weights = [one.weight for one in layers if isinstance(one, nn.Linear)]
    found = [onednn.memory_of(w) for w in weights if w.layout is not torch.strided]
    return [piece for piece in found if piece is not None]


def all_products_tiled(model: Any) -> bool:
    """Whether every matrix product on many rows is in a layer that can be tiled.

    Experts held as one 3-D parameter, ``Conv1D`` layers and the like are not: their
    kernels may choose by shape, and then no probe of a few lengths is proof.
    """
    covered = {id(layer.weight) for layer in _layers(model)} | fused_parts(model)
    head = model.get_output_embeddings()
    for module in model.modules():
        if isinstance(module, nn.Embedding) or module is head:
            continue
        for parameter in module.parameters(recurse=False):
            if parameter.ndim > 1 and id(parameter) not in covered:
                return False
    return True


def output_widths(model: Any) -> set[int]:
    """Widths of what the tiled layers give; activations run on these.

    Of fused layers on their parts', too.
    """
    parts = {part.out_features for part in fused_from(model)}
    return {layer.out_features for layer in _layers(model)} | parts


def is_decode(x: torch.Tensor) -> bool:
    """Whether this is one token of each row: ``[rows, 1, width]``."""
    return x.shape[-2] == 1 if x.ndim > 1 else True


class _Installed:
    """One layer running in tiles, and the way back."""

    def __init__(self, layer: nn.Linear, plan: LayerPlan) -> None:
        self._layer = layer
        self._tiles = plan.tiles
        self._few = plan.few
        self._packed = plan.packed
        self._trainable = layer.weight.requires_grad
        bias = bias_of(layer)
        if plan.packed:
            plain = layer.weight.detach()
            packed = onednn.pack(plain)
            layer.weight = nn.Parameter(packed, requires_grad=False)
            page_out(plain.data_ptr(), plain.nbytes)
            self._kernel: Kernel = PackedKernel(packed, bias)
        else:
            self._kernel = PlainKernel(layer.weight.detach(), bias)
        layer.__dict__["forward"] = self.forward
        keep_tiled(layer, self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., in_features]`` -> ``[..., out_features]``."""
        rows = x.reshape(-1, self._layer.in_features)
        width = self._layer.out_features
        tiles = self._few if is_decode(x) else self._tiles
        out = in_tiles(rows, self._kernel, tiles, width)
        return out.view(*x.shape[:-1], width)

    def room(self, count: int, *, few: bool) -> int:
        """See ``products.room``."""
        return sum((self._few if few else self._tiles).plan(count))

    def pieces(
        self, rows: torch.Tensor, count: int, *, few: bool
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """See ``products.pieces``."""
        at = 0
        for size in (self._few if few else self._tiles).plan(count):
            out = self._kernel(_tile(rows, at, size))
            yield at, out if at + size <= count else out[: count - at]
            at += size

    def remove(self) -> None:
        """Put back the layer's own forward and its weight, bit for bit."""
        del self._layer.__dict__["forward"]
        keep_tiled(self._layer, None)
        if self._packed:
            weight = self._layer.weight.to_dense()
            self._layer.weight = nn.Parameter(weight, requires_grad=self._trainable)


Shape = tuple[int, int, bool]


def plan_layers(model: Any) -> Mapping[Shape, LayerPlan]:
    """Measure the layers of every shape. Takes about a second for a 135M model."""
    groups: dict[Shape, list[nn.Linear]] = {}
    for layer in _layers(model):
        groups.setdefault(_shape(layer), []).append(layer)
    return {shape: measure(layers) for shape, layers in groups.items()}


def _shape(layer: nn.Linear) -> Shape:
    return layer.in_features, layer.out_features, bias_of(layer) is not None


@contextmanager
def row_tiles_installed(model: Any, plans: Mapping[Shape, LayerPlan]) -> Iterator[None]:
    """Run the model's linear layers in tiles; restore them afterwards.

    Args:
        model: See above.
        plans: From ``plan_layers``.
    """
    installed: list[_Installed] = []
    try:
        for layer in list(_layers(model)):
            installed.append(_Installed(layer, plans[_shape(layer)]))
        yield
    finally:
        for tiled in installed:
            tiled.remove()
