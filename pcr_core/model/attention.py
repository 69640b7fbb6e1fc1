"""Attention whose bits depend on the tokens before a query and on nothing else.

Registered with transformers under a name of its own; model code stays untouched.

Two things make stock attention slow and shape-dependent on a cached prefix. It expands
K and V from the KV heads to all heads; our kernels take the grouped heads. And its
rounding depends on how many keys it is given; we hand over portions that a probe has
found to give the same bits, the surplus masked. A masked-out key changes no bit, so a
query sees the same arithmetic whether its prefix was loaded or computed, and however
the prefill was cut. Decode is one query: always the same shape, so it needs no surplus.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from pcr_core.errors import UnsupportedModelError
from pcr_core.model import _compat
from pcr_core.model.attention_kernels import (
    AttentionKernel,
    FusedAttention,
    KeyPortions,
    MaskedRowsAttention,
    OneQueryAttention,
    UnfusedAttention,
)
from pcr_core.model.batch_cache import RowsKv
from pcr_core.model.key_blocks import KEY_BLOCK
from pcr_core.model.masks import LazyMask, lazy_mask
from pcr_core.model.slot_cache import SlotsKv


@dataclass(frozen=True)
class AttentionPlan:
    """Which kernels compute attention, and how they may be called.

    The defaults are safe wherever a masked key block changes no bit.

    Attributes:
        causal_tails: Query counts modulo ``KEY_BLOCK`` at which the causal kernel gives
            the bits of the masked one.
        key_grain: The masked kernel gets a multiple of this many keys.
        unfused: How ``UnfusedAttention`` gets its keys, if it is to compute prefills.
        decode: What computes a single query: ``"heads"`` or ``"rows"`` (SDPA with the
            heads of a group as heads or as rows), or ``"unfused"``.
    """

    causal_tails: tuple[int, ...] = ()
    key_grain: int = KEY_BLOCK
    unfused: KeyPortions | None = None
    decode: str = "heads"


class KvAttention:
    """The attention function registered with transformers.

    Args:
        plan: What the start-up probe found about the kernels.
    """

    def __init__(self, plan: AttentionPlan) -> None:
        self._plan = plan
        self._prefill: AttentionKernel
        self._decode: AttentionKernel
        unfused = UnfusedAttention(plan.unfused or KeyPortions())
        if plan.unfused is None:
            self._prefill = FusedAttention(plan.causal_tails, plan.key_grain)
        else:
            self._prefill = unfused
        if plan.decode == "unfused":
            self._decode = unfused
        else:
            self._decode = OneQueryAttention(as_rows=plan.decode == "rows")
        self._in_slots = MaskedRowsAttention()

    @property
    def name(self) -> str:
        """Its name in transformers' registry: equal behaviour, equal name."""
        digest = hashlib.blake2b(repr(self._plan).encode(), digest_size=6)
        return f"pcr-{digest.hexdigest()}"

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor | RowsKv | SlotsKv,
        value: torch.Tensor | RowsKv | SlotsKv,
        attention_mask: LazyMask | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attention over grouped heads, in portions of keys.

        Args:
            module: The attention module, for error messages.
            query: ``[1, heads, q, k_dim]``.
            key: ``[1, kv_heads, capacity, k_dim]``; positions at or after the last
                query may hold anything finite.
            value: ``[1, kv_heads, capacity, v_dim]``. Of a batch, key and value are
                ``RowsKv``, and each row has one query: each is computed as it would be
                alone. Of a batch in slots they are ``SlotsKv``.
            attention_mask: From ``lazy_mask``.
            dropout: Ignored: the engine never trains.
            scaling: Softmax scale.
            options: ``softcap``, ``s_aux`` and ``position_bias`` are refused.

        Returns:
            ``[batch, q, heads, v_dim]`` and ``None`` (no attention weights).
        """
        for name in ("softcap", "s_aux", "position_bias"):
            if options.get(name) is not None:
                raise UnsupportedModelError(f"attention with {name} is not supported")
        if attention_mask is None:
            raise UnsupportedModelError(
                f"{type(module).__name__} runs without a causal mask; only "
                "decoder-only models can reuse prefixes"
            )
        if isinstance(key, RowsKv) and isinstance(value, RowsKv):
            return self._each_row(query, key, value, attention_mask, scaling), None
        if isinstance(key, SlotsKv) and isinstance(value, SlotsKv):
            k, v = key.places, value.places
            mask = attention_mask.of_each(key.positions, k.shape[2], query)
            return self._in_slots(query, k, v, mask, scaling), None
        assert isinstance(key, torch.Tensor)
        assert isinstance(value, torch.Tensor)
        kernel = self._decode if query.shape[2] == 1 else self._prefill
        return kernel(query, key, value, attention_mask, scaling), None

    def _each_row(
        self,
        query: torch.Tensor,
        keys: RowsKv,
        values: RowsKv,
        mask: LazyMask,
        scaling: float | None,
    ) -> torch.Tensor:
        """One query a row, each over its own buffer."""
        rows = zip(torch.split(query, 1), keys, values, keys.positions, strict=True)
        return torch.cat(
            [self._decode(q, k, v, mask.at(at), scaling) for q, k, v, at in rows]
        )


@contextmanager
def attention_installed(model: Any, attention: KvAttention) -> Iterator[None]:
    """Let ``model`` run with this attention; put back its own afterwards."""
    _compat.register_attention(attention.name, attention, lazy_mask)
    before = model.config._attn_implementation  # noqa: SLF001
    model.set_attn_implementation(attention.name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
