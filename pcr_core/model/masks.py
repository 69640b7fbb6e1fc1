"""Attention masks that are built when a kernel asks for a part of them.

A mask is never materialised for a whole prompt: transformers passes on whatever the
registered mask function returns, so ours returns a ``LazyMask``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch

from pcr_core.errors import UnsupportedModelError
from pcr_core.model import _compat


class LazyMask:
    """A model's own mask function, evaluated for one block of queries at a time.

    Attributes:
        causal: Whether it is the plain causal mask, without window or padding.
    """

    # Model code may look at these as it would at a tensor's.
    ndim = 4

    def __init__(
        self,
        function: Callable[..., Any],
        first: int | torch.Tensor,
        count: int,
        keys: int,
    ) -> None:
        from transformers.masking_utils import causal_mask_function

        self._function = function
        self._first = first
        self.shape = (1, 1, count, keys)
        plain: Callable[..., Any] = causal_mask_function
        self.causal = function is plain
        self._blocks: dict[tuple[int, int, int, torch.dtype], torch.Tensor] = {}
        self._seen: tuple[int, int] | None = None  # by the first query
        self._gaps = False
        self._single: dict[int, LazyMask] = {}
        self._each: dict[int, torch.Tensor] = {}

    @cached_property
    def first(self) -> int:
        """Position of the first query; if it is a tensor, this waits for the device."""
        return int(self._first)

    def at(self, position: int) -> LazyMask:
        """The mask of one query at ``position``; the same object for every layer."""
        mask = self._single.get(position)
        if mask is None:
            mask = LazyMask(self._function, position, 1, position + 1)
            self._single[position] = mask
        return mask

    def block(
        self, start: int, stop: int, keys: int, like: torch.Tensor
    ) -> torch.Tensor:
        """Additive mask ``[1, 1, stop - start, keys]`` of queries ``start..stop``.

        The same for every layer of a kind, so it is built once per forward.
        """
        name = (start, stop, keys, like.dtype)
        mask = self._blocks.get(name)
        if mask is None:
            keep = self._keep(start, stop, keys, like.device)
            mask = torch.zeros(keep.shape, dtype=like.dtype, device=like.device)
            self._blocks[name] = mask.masked_fill_(~keep, float("-inf"))
        return mask

    def of_each(
        self, positions: torch.Tensor, keys: int, like: torch.Tensor
    ) -> torch.Tensor:
        """Additive mask ``[rows, 1, 1, keys]`` of one query a row.

        Positions are not looked at by the host. The same for every layer of a kind.

        Args:
            positions: Of the queries, ``[rows]``.
            keys: How many places there are; those behind a query are hidden, too.
            like: Of the dtype and on the device of the mask.
        """
        mask = self._each.get(keys)
        if mask is None:
            rows = torch.arange(len(positions), device=like.device)
            kv = torch.arange(keys, device=like.device)
            keep: torch.Tensor = self._function(
                rows[:, None, None, None],
                torch.zeros_like(rows[:1])[None, :, None, None],
                positions[:, None, None, None],
                kv[None, None, None, :],
            )
            shape = (len(positions), 1, 1, keys)
            mask = torch.zeros(shape, dtype=like.dtype, device=like.device)
            self._each[keys] = mask.masked_fill_(~keep, float("-inf"))
        return mask

    def seen_by_first(self, device: torch.device) -> tuple[int, int] | None:
        """The keys ``start..stop`` that the first query sees; ``None``: with gaps."""
        if self.causal:
            return 0, self.first + 1
        if self._seen is None:
            keep = self._keep(0, 1, self.first + 1, device)
            seen = keep.flatten().nonzero().flatten().tolist()
            self._seen = (seen[0], seen[-1] + 1) if seen else (0, 0)
            self._gaps = self._seen[1] - self._seen[0] != len(seen) or not seen
        return None if self._gaps else self._seen

    def _keep(
        self, start: int, stop: int, keys: int, device: torch.device
    ) -> torch.Tensor:
        """Which of the first ``keys`` keys queries ``start..stop`` see."""
        zero = torch.zeros(1, dtype=torch.long, device=device)
        q = torch.arange(start, stop, device=device) + self.first
        kv = torch.arange(keys, device=device)
        keep: torch.Tensor = self._function(
            zero[:, None, None, None],
            zero[None, :, None, None],
            q[None, None, :, None],
            kv[None, None, None, :],
        )
        return keep.expand(1, 1, stop - start, keys)


def lazy_mask(*_: Any, **arguments: Any) -> LazyMask:
    """The mask function registered with transformers; returns a ``LazyMask``."""
    if arguments.get("attention_mask") is not None:
        raise UnsupportedModelError(
            "the engine's attention takes no padding mask; put back the model's with "
            "model.set_attn_implementation('sdpa') before batching outside the engine"
        )
    first, count = _compat.query_range(arguments)
    return LazyMask(arguments["mask_function"], first, count, arguments["kv_length"])
