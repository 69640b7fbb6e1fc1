"""Attention whose bits depend on the tokens before a query and on nothing else.

Registered with transformers under the name ``"pcr"``; model code stays untouched.

Two things make stock attention slow and shape-dependent on a cached prefix. It expands
K and V from the KV heads to all heads; we hand SDPA the grouped heads. And its rounding
depends on how many keys it is given; we hand over whole blocks of ``KEY_BLOCK`` (as
torch's CPU kernel walks them) or a part that a probe has found to give the same bits,
the surplus masked. A masked-out key changes no bit, so a query sees the same arithmetic
whether its prefix was loaded or computed, and however the prefill was cut.

The mask is never materialised for the whole prompt: transformers passes on whatever the
mask function returns, so ours returns a ``LazyMask``, evaluated block by block.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from pcr_core.errors import UnsupportedModelError
from pcr_core.index.chunk import LayerShape
from pcr_core.model import _compat

_ONE_CALL = 256  # so few queries are cheaper in one call than cut at key blocks
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
        self, function: Callable[..., Any], first: int, count: int, keys: int
    ) -> None:
        from transformers.masking_utils import causal_mask_function

        self._function = function
        self.first = first
        self.shape = (1, 1, count, keys)
        plain: Callable[..., Any] = causal_mask_function
        self.causal = function is plain
        self._blocks: dict[tuple[int, int, int, torch.dtype], torch.Tensor] = {}

    def block(
        self, start: int, stop: int, keys: int, like: torch.Tensor
    ) -> torch.Tensor:
        """Additive mask ``[1, 1, stop - start, keys]`` of queries ``start..stop``.

        The same for every layer of a kind, so it is built once per forward.
        """
        name = (start, stop, keys, like.dtype)
        mask = self._blocks.get(name)
        if mask is None:
            mask = self._blocks[name] = self._build(start, stop, keys, like)
        return mask

    def _build(
        self, start: int, stop: int, keys: int, like: torch.Tensor
    ) -> torch.Tensor:
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
            "the engine's attention takes no padding mask; put back the model's with "
            "model.set_attn_implementation('sdpa') before batching outside the engine"
        )
    first, count = _compat.query_range(arguments)
    return LazyMask(arguments["mask_function"], first, count, arguments["kv_length"])


@dataclass(frozen=True)
class AttentionPlan:
    """How SDPA may be called without its bits depending on the shape of the call.

    The defaults are safe wherever a masked key block changes no bit.

    Attributes:
        causal_tails: Query counts modulo ``KEY_BLOCK`` at which the causal kernel gives
            the bits of the masked one.
        key_grain: The masked kernel gets a multiple of this many keys.
    """

    causal_tails: tuple[int, ...] = ()
    key_grain: int = KEY_BLOCK


class KvAttention:
    """The attention function registered with transformers.

    Args:
        plan: What the start-up probe found about SDPA's kernels.
    """

    def __init__(self, plan: AttentionPlan) -> None:
        self._plan = plan
        self._tails = sorted({0, *plan.causal_tails}, reverse=True)

    @property
    def name(self) -> str:
        """Its name in transformers' registry: equal behaviour, equal name."""
        digest = hashlib.blake2b(repr(self._plan).encode(), digest_size=6)
        return f"pcr-{digest.hexdigest()}"

    def __call__(
        self,
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
            module: The attention module, for error messages.
            query: ``[1, heads, q, k_dim]``.
            key: ``[1, kv_heads, capacity, k_dim]``; positions at or after the last
                query may hold anything finite.
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
                raise UnsupportedModelError(f"attention with {name} is not supported")
        if attention_mask is None:
            raise UnsupportedModelError(
                f"{type(module).__name__} runs without a causal mask; only "
                "decoder-only models can reuse prefixes"
            )
        count, capacity = query.shape[2], key.shape[2]
        pieces = []
        for start, stop, keys, causal in self._blocks(attention_mask, count, capacity):
            mask = None if causal else attention_mask.block(start, stop, keys, query)
            part = query[:, :, start:stop]
            k, v = key[:, :, :keys], value[:, :, :keys]
            pieces.append(grouped_attention(part, k, v, mask, scaling))
        out = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)
        return out.transpose(1, 2).contiguous(), None

    def _blocks(
        self, mask: LazyMask, count: int, capacity: int
    ) -> Iterator[tuple[int, int, int, bool]]:
        """Cut queries ``0..count`` into ``(start, stop, keys, causal kernel?)``.

        Queries from position 0 under a plain causal mask go to the causal kernel, as
        many as it gives the right bits for: it skips the upper triangle. The rest, if
        long, is cut where a key block ends, so that no query sees a block more than it
        must.
        """
        start = 0
        if mask.causal and mask.first == 0:
            tail = count % KEY_BLOCK
            start = count - tail + next(t for t in self._tails if t <= tail)
            if start:
                yield 0, start, start, True
        while start < count:
            stop = count
            if count - start > _ONE_CALL:
                stop = round_up(mask.first + start + 1, KEY_BLOCK) - mask.first
                stop = min(count, stop)
            keys = round_up(mask.first + stop, self._plan.key_grain)
            yield start, stop, min(keys, capacity), False
            start = stop


def grouped_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
) -> torch.Tensor:
    """SDPA without expanding KV heads; without a mask it is causal from position 0."""
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def plan_attention(
    heads: int, shapes: Sequence[LayerShape], dtype: torch.dtype
) -> AttentionPlan:
    """Compare SDPA's CPU kernels bit for bit on noise, for every head shape.

    Tails: the causal kernel shortens its last key block to the last query, and some
    lengths make the matrix product in it round differently. Multiples of 32 are
    compared, in the first and in a later key block. Odd multiples of 16 are left out
    untested: with AMX they differ in a few outputs of a million, too rarely in bf16 to
    be sure of catching it.

    Grain: likewise a shorter last key block may change nothing under a mask; if so,
    a hit need not be padded to the whole block.
    """
    tails = set(range(_TAIL_STEP, KEY_BLOCK, _TAIL_STEP))
    grains = set(_GRAINS)
    for shape in set(shapes):
        for trial in range(_TRIALS):
            kernels = _Kernels(heads, shape, dtype, trial)
            tails = {tail for tail in tails if kernels.tail_agrees(tail)}
            grains = {grain for grain in grains if kernels.grain_agrees(grain)}
    return AttentionPlan(tuple(sorted(tails)), min(grains, default=KEY_BLOCK))


_TAIL_STEP = 32
_GRAINS = (64, 128, 256)
_TRIALS = 3


class _Kernels:
    """SDPA on noise over two key blocks, beside what it should give."""

    def __init__(
        self, heads: int, shape: LayerShape, dtype: torch.dtype, seed: int
    ) -> None:
        from transformers.masking_utils import causal_mask_function

        noise = torch.Generator().manual_seed(seed)
        length = 2 * KEY_BLOCK

        def random(count: int, dim: int) -> torch.Tensor:
            return torch.randn(1, count, length, dim, generator=noise).to(dtype)

        self._q = random(heads, shape.k_dim)
        self._k = random(shape.kv_heads, shape.k_dim)
        self._v = random(shape.kv_heads, shape.v_dim)
        self._mask = LazyMask(causal_mask_function, 0, length, length)
        blocks = ((0, KEY_BLOCK), (KEY_BLOCK, length))
        parts = [self._masked(start, stop, stop) for start, stop in blocks]
        self._expected = torch.cat(parts, dim=2)

    def tail_agrees(self, tail: int) -> bool:
        """Whether the causal kernel is right for this many queries into a block."""
        return self._causal_is_right(tail) and self._causal_is_right(KEY_BLOCK + tail)

    def grain_agrees(self, grain: int) -> bool:
        """Whether the masked kernel is right with a last key block cut at ``grain``."""
        for stop in range(grain, 2 * KEY_BLOCK, grain):
            for count in (16, 48, grain):
                start = max(stop - count, stop // KEY_BLOCK * KEY_BLOCK)
                expected = self._expected[:, :, start:stop]
                if not torch.equal(self._masked(start, stop, stop), expected):
                    return False
        return True

    def _causal_is_right(self, count: int) -> bool:
        q, k, v = self._q[:, :, :count], self._k[:, :, :count], self._v[:, :, :count]
        result = grouped_attention(q, k, v, None, None)
        return torch.equal(result, self._expected[:, :, :count])

    def _masked(self, start: int, stop: int, keys: int) -> torch.Tensor:
        mask = self._mask.block(start, stop, keys, self._q)
        q = self._q[:, :, start:stop]
        return grouped_attention(
            q, self._k[:, :, :keys], self._v[:, :, :keys], mask, None
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
