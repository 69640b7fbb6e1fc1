"""Attention whose bits depend on the tokens before a query and on nothing else.

Registered with transformers under the name ``"pcr"``; model code stays untouched.

Two things make stock attention slow and shape-dependent on a cached prefix. It expands
K and V from the KV heads to all heads; we hand SDPA the grouped heads. And its rounding
depends on how many keys it is given; we always hand over a multiple of ``KEY_BLOCK``
keys (the block in which torch's CPU kernel walks them), the surplus masked. A
masked-out block changes no bit, so a query sees the same arithmetic whether its prefix
was loaded or computed, and however the prefill was cut.

The mask is never materialised for the whole prompt: transformers passes on whatever the
mask function returns, so ours returns a ``LazyMask``, evaluated block by block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from pcr_core.errors import UnsupportedModelError
from pcr_core.model import _compat

NAME = "pcr"
KEY_BLOCK = 512
"""Keys per block of torch's CPU flash kernel (kvSplitSize in its source)."""


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``number``."""
    return -(-number // multiple) * multiple


class LazyMask:
    """A model's own mask function, evaluated for one block of queries at a time.

    Attributes:
        first: Position of the first query.
        causal: Whether it is the plain causal mask, without window or padding.
    """

    # Model code may look at these as it would at a tensor's.
    ndim = 4

    def __init__(
        self, function: Callable[..., torch.Tensor], first: int, count: int, keys: int
    ) -> None:
        from transformers.masking_utils import causal_mask_function

        self._function = function
        self.first = first
        self.shape = (1, 1, count, keys)
        self.causal = function is causal_mask_function
        self._blocks: dict[tuple[int, int, int, torch.dtype], torch.Tensor] = {}

    def block(self, start: int, stop: int, keys: int, like: torch.Tensor) -> torch.Tensor:
        """Additive mask ``[1, 1, stop - start, keys]`` of queries ``start..stop``.

        The same for every layer of a kind, so it is built once per forward.
        """
        name = (start, stop, keys, like.dtype)
        mask = self._blocks.get(name)
        if mask is None:
            mask = self._blocks[name] = self._build(start, stop, keys, like)
        return mask

    def _build(self, start: int, stop: int, keys: int, like: torch.Tensor) -> torch.Tensor:
        device = like.device
        zero = torch.zeros(1, dtype=torch.long, device=device)
        q = torch.arange(start, stop, device=device) + self.first
        kv = torch.arange(keys, device=device)
        keep = self._function(
            zero[:, None, None, None],
            zero[None, :, None, None],
            q[None, None, :, None],
            kv[None, None, None, :],
        ).expand(1, 1, stop - start, keys)
        mask = torch.zeros(keep.shape, dtype=like.dtype, device=device)
        return mask.masked_fill_(~keep, float("-inf"))


def lazy_mask(*_: Any, **arguments: Any) -> LazyMask:
    """The mask function registered with transformers; returns a ``LazyMask``."""
    if arguments.get("attention_mask") is not None:
        raise UnsupportedModelError(
            "the engine's attention takes no padding mask; restore the model's own with "
            "model.set_attn_implementation('sdpa') before batching outside the engine"
        )
    first, count = _compat.query_range(arguments)
    return LazyMask(arguments["mask_function"], first, count, arguments["kv_length"])


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: LazyMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Grouped-head SDPA over whole key blocks.

    Args:
        module: The attention module (unused; part of transformers' interface).
        query: ``[1, heads, q, k_dim]``.
        key: ``[1, kv_heads, capacity, k_dim]``; positions at or after the last query
            may hold anything finite.
        value: ``[1, kv_heads, capacity, v_dim]``.
        attention_mask: From ``lazy_mask``.
        dropout: Ignored: the engine never trains.
        scaling: Softmax scale.
        options: ``softcap``, ``s_aux`` and ``position_bias`` are refused.

    Returns:
        ``[1, q, heads, v_dim]`` and ``None`` (no attention weights).
    """
    for name in ("softcap", "s_aux", "position_bias"):
        if options.get(name) is not None:
            raise UnsupportedModelError(f"attention with {name} is not supported yet")
    if attention_mask is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} runs without a causal mask; only decoder-only "
            "models can reuse prefixes"
        )
    grouped = query.shape[1] != key.shape[1]
    pieces = []
    for start, stop, keys, causal in _blocks(attention_mask, query.shape[2], key.shape[2]):
        mask = None if causal else attention_mask.block(start, stop, keys, query)
        pieces.append(
            scaled_dot_product_attention(
                query[:, :, start:stop],
                key[:, :, :keys],
                value[:, :, :keys],
                attn_mask=mask,
                is_causal=causal,
                scale=scaling,
                enable_gqa=grouped,
            )
        )
    out = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)
    return out.transpose(1, 2).contiguous(), None


def _blocks(
    mask: LazyMask, count: int, capacity: int
) -> Iterator[tuple[int, int, int, bool]]:
    """Cut queries ``0..count`` into ``(start, stop, keys, causal kernel?)``.

    Whole key blocks from position 0 under a plain causal mask go to the causal kernel
    in one call: it skips the upper triangle and gives the same bits there (measured:
    it does so for query counts that are multiples of the key block, not for others).
    The rest is cut where a key block ends, so that no query sees a block more than
    it has to.
    """
    start = 0
    if mask.causal and mask.first == 0 and count >= KEY_BLOCK:
        start = count // KEY_BLOCK * KEY_BLOCK
        yield 0, start, start, True
    while start < count:
        keys = round_up(mask.first + start + 1, KEY_BLOCK)
        stop = min(count, keys - mask.first)
        yield start, stop, min(keys, capacity), False
        start = stop


@contextmanager
def attention_installed(model: Any) -> Iterator[None]:
    """Let ``model`` run with this attention; put back its own afterwards."""
    _compat.register_attention(NAME, attention, lazy_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
