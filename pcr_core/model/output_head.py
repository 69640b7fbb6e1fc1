"""The output head in decode steps: one token of each row, in tiles (CPU).

For the duration of an engine, as the other linear layers (see ``linear``), but only for
decode: of a prefill it computes one row. It may be the embedding too, so that the
packed weights are a copy, not a replacement.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from pcr_core.memory import page_out
from pcr_core.model import onednn
from pcr_core.model.linear import (
    Kernel,
    LayerPlan,
    PackedKernel,
    PlainKernel,
    better_plan,
    bias_of,
    few_tiles,
    in_tiles,
    is_decode,
    noise_for,
)


class _InstalledHead:
    """The output head: in tiles for one token a row, as it was for all others."""

    def __init__(self, head: nn.Linear, plan: LayerPlan) -> None:
        self._head = head
        self._few = plan.few
        weight, bias = head.weight.detach(), bias_of(head)
        self._kernel: Kernel = PlainKernel(weight, bias)
        self.memory: list[tuple[int, int]] = []
        if plan.packed:
            # A copy, as the embedding may be the same tensor; of that only the rows
            # that are looked up are needed in memory.
            packed = onednn.pack(weight)
            self.memory = [*filter(None, [onednn.memory_of(packed)])]
            self._kernel = PackedKernel(packed, bias)
            page_out(weight.data_ptr(), weight.nbytes)
        head.__dict__["forward"] = self.forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., in_features]`` -> ``[..., out_features]``."""
        if not is_decode(x):
            return functional.linear(x, self._head.weight, self._head.bias)
        rows, width = x.reshape(-1, x.shape[-1]), self._head.out_features
        return in_tiles(rows, self._kernel, self._few, width).view(*x.shape[:-1], width)

    def remove(self) -> None:
        """Put back its own forward."""
        del self._head.__dict__["forward"]


def plan_head(model: Any) -> LayerPlan | None:
    """Measure the output head for decode steps; ``None`` if it cannot be tiled.

    Prefills compute one row of it, too, so its tiles for many rows are not used.
    """
    head = _head(model)
    if head is None:
        return None
    weight, bias = head.weight.detach(), bias_of(head)
    rows = noise_for(weight)
    few = few_tiles([PlainKernel(weight, bias)], rows)
    plain = LayerPlan(False, few, few)
    if not onednn.supports(weight.dtype):
        return plain
    few = few_tiles([PackedKernel(onednn.pack(weight), bias)], rows)
    return better_plan(plain, LayerPlan(True, few, few))


def _head(model: Any) -> nn.Linear | None:
    """The output head, if it is a plain layer on a CPU that nobody has hooked."""
    head = model.get_output_embeddings()
    plain = type(head) is nn.Linear and "forward" not in head.__dict__
    return head if plain and head.weight.device.type == "cpu" else None


@dataclass(frozen=True)
class PackedHead:
    """A copy of the head's weights, packed.

    Attributes:
        nbytes: Its size; 0 if there is none.
        memory: Address and size of it, if torch tells.
    """

    nbytes: int = 0
    memory: Sequence[tuple[int, int]] = ()


@contextmanager
def head_installed(model: Any, plan: LayerPlan | None) -> Iterator[PackedHead]:
    """Run the output head in tiles in decode steps; restore it afterwards.

    Args:
        model: See above.
        plan: From ``plan_head``; ``None`` leaves the head as it is.

    Yields:
        The copy of its weights that is kept meanwhile, if one is.
    """
    head = _head(model)
    if head is None or plan is None:
        yield PackedHead()
        return
    installed = _InstalledHead(head, plan)
    try:
        nbytes = head.weight.nbytes if plan.packed else 0
        yield PackedHead(nbytes, installed.memory)
    finally:
        installed.remove()
