"""Linear layers with the same input, as one. Knows no model code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from pcr_core.memory import page_out

_FUSED = "_pcr_fused"
_PARTS = "_pcr_parts"


def fused_layers(model: Any) -> list[nn.Linear]:
    """Linear layers that stand for several of the model's while an engine has it."""
    found: list[nn.Linear] = model.__dict__.get(_FUSED, [])
    return found


def keep_fused(model: Any, layers: list[nn.Linear] | None) -> None:
    """Say which these are; ``None``: there are none any more."""
    if layers is None:
        model.__dict__.pop(_FUSED, None)
    else:
        model.__dict__[_FUSED] = layers


def fused_from(model: Any) -> list[nn.Linear]:
    """The layers for which these stand."""
    return [part for fused in fused_layers(model) for part in fused.__dict__[_PARTS]]


def fused_parts(model: Any) -> set[int]:
    """Ids of the weights for which fused layers stand."""
    return {id(part.weight) for part in fused_from(model)}


class Fused:
    """Linear layers with the same input, as one; and the way back.

    One copy of the weights is kept: the fused one.
    """

    def __init__(self, parts: Sequence[nn.Linear]) -> None:
        self._parts = list(parts)
        self._sizes = [part.out_features for part in parts]
        self._trainable = [part.weight.requires_grad for part in parts]
        first = parts[0]
        self.linear = nn.Linear(
            first.in_features, sum(self._sizes), first.bias is not None, device="meta"
        )
        weight = torch.cat([part.weight.detach() for part in parts])
        self.linear.weight = nn.Parameter(weight, requires_grad=False)
        if first.bias is not None:
            bias = torch.cat([part.bias.detach() for part in parts])
            self.linear.bias = nn.Parameter(bias, requires_grad=False)
        self.linear.__dict__[_PARTS] = self._parts
        for index, part in enumerate(self._parts):
            plain = part.weight.detach()
            # Not ``plain[:0]``, which would keep all of the memory.
            nothing = plain.new_empty((0, plain.shape[1]))
            part.weight = nn.Parameter(nothing, requires_grad=False)
            page_out(plain.data_ptr(), plain.nbytes)
            part.__dict__["forward"] = self._slice(index)

    def _slice(self, index: int) -> Callable[[torch.Tensor], torch.Tensor]:
        """What a part gives when it is called by itself; nothing here does."""
        linear, sizes = self.linear, self._sizes

        def forward(x: torch.Tensor) -> torch.Tensor:
            return torch.split(linear(x), sizes, dim=-1)[index]

        return forward

    def remove(self) -> None:
        """Give the parts their weights back, bit for bit."""
        weights = torch.split(self.linear.weight.detach(), self._sizes)
        for part, weight, trainable in zip(
            self._parts, weights, self._trainable, strict=True
        ):
            del part.__dict__["forward"]
            part.weight = nn.Parameter(weight.clone(), requires_grad=trainable)
