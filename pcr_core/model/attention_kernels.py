"""Three ways to compute attention over a row's buffer, chosen by a start-up probe.

All take grouped heads as they are, without expanding K and V to all heads, and keys in
portions in which a masked-out key changes no bit (see ``key_blocks``).

``FusedAttention`` is torch's SDPA. On a CPU without AMX it spends most of its time on
entering small matrix products, one per head and key block, so ``UnfusedAttention``
computes scores, softmax and weighted sum as one batched operation each; in bf16 its
scores are rounded to bf16, as in transformers' eager attention. ``OneQueryAttention``
is for decode: SDPA without a mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

from pcr_core.model.key_blocks import KEY_BLOCK, round_up
from pcr_core.model.masks import LazyMask

_ONE_CALL = 256  # so few queries are cheaper in one call than cut at key blocks
_SCORE_BYTES = 4 << 20  # of one block of scores: more would leave the caches
_FEWEST_QUERIES, _MOST_QUERIES = 16, 128  # per block of ``UnfusedAttention``


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


class AttentionKernel(Protocol):
    """Attention of some queries over a row's buffer."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: LazyMask,
        scaling: float | None,
    ) -> torch.Tensor:
        """``[1, heads, q, k_dim]`` -> ``[1, q, heads, v_dim]``.

        Args:
            query: See above.
            key: ``[1, kv_heads, capacity, k_dim]``.
            value: ``[1, kv_heads, capacity, v_dim]``.
            mask: Of these queries.
            scaling: Softmax scale; by default that of ``k_dim``.
        """
        ...


class FusedAttention:
    """SDPA over whole key blocks.

    Args:
        causal_tails: Query counts modulo ``KEY_BLOCK`` at which the causal kernel gives
            the bits of the masked one.
        key_grain: The masked kernel gets a multiple of this many keys.
    """

    def __init__(self, causal_tails: Sequence[int], key_grain: int) -> None:
        self._tails = sorted({0, *causal_tails}, reverse=True)
        self._grain = key_grain

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: LazyMask,
        scaling: float | None,
    ) -> torch.Tensor:
        """See ``AttentionKernel``."""
        count, capacity = query.shape[2], key.shape[2]
        pieces = []
        for start, stop, keys, causal in self._blocks(mask, count, capacity):
            part = query[:, :, start:stop]
            k, v = key[:, :, :keys], value[:, :, :keys]
            block = None if causal else mask.block(start, stop, keys, query)
            pieces.append(grouped_attention(part, k, v, block, scaling))
        out = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)
        return out.transpose(1, 2).contiguous()

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
            keys = round_up(mask.first + stop, self._grain)
            yield start, stop, min(keys, capacity), False
            start = stop


def scores_into(
    out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, scaling: float
) -> None:
    """``scaling * query @ key^T``, ``[batch, rows, dim]`` and ``[batch, keys, dim]``.

    What is in ``out`` is ignored.
    """
    torch.baddbmm(out, query, key.transpose(1, 2), beta=0, alpha=scaling, out=out)


def weighted_sum(weights: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """``weights @ value``; ``[batch, rows, keys]``, ``[batch, keys, dim]``."""
    return torch.bmm(weights, value)


@dataclass(frozen=True)
class KeyPortions:
    """How many keys a product over keys may get without a change in its bits.

    Attributes:
        grain: A multiple of this many,
        least: and at least so many.
    """

    grain: int = KEY_BLOCK
    least: int = KEY_BLOCK

    def cover(self, stop: int) -> int:
        """The fewest keys to hand over, for those before ``stop``."""
        return max(self.least, round_up(stop, self.grain))


def queries_per_block(kv_heads: int, group: int, keys: int, itemsize: int) -> int:
    """How many queries ``UnfusedAttention`` takes at once when they see ``keys``."""
    room = _SCORE_BYTES // (kv_heads * group * keys * itemsize)
    unit = _FEWEST_QUERIES
    return max(unit, min(_MOST_QUERIES, room // unit * unit))


class UnfusedAttention:
    """Scores, softmax and weighted sum as one operation each. Engine thread only.

    The query heads of one KV head are rows of one product, query by query. Memory for
    a block of scores is kept.

    Args:
        portions: How keys are handed over.
    """

    def __init__(self, portions: KeyPortions) -> None:
        self._portions = portions
        self._memory = torch.empty(0)
        self._above = torch.empty(0)

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: LazyMask,
        scaling: float | None,
    ) -> torch.Tensor:
        """See ``AttentionKernel``."""
        heads, count, dim = query.shape[1:]
        kv_heads = key.shape[1]
        grouped = query.view(kv_heads, heads // kv_heads, count, dim).transpose(1, 2)
        out = query.new_empty(1, count, kv_heads, heads // kv_heads, value.shape[3])
        factor = dim**-0.5 if scaling is None else scaling
        start = 0
        while start < count:
            stop, keys = self._block(mask.first, start, count, grouped)
            keys = min(keys, key.shape[2])
            some = self._heads_at_once(stop - start, keys, grouped)
            for head in range(0, kv_heads, some):
                part = slice(head, head + some)
                q, k, v = grouped[part, start:stop], key[0, part], value[0, part]
                scores = self._scores(q, k[:, :keys], factor)
                self._mask(scores, mask, start, stop)
                result = self._finish(scores, v[:, :keys])
                out[0, start:stop, part] = result.transpose(0, 1)
            start = stop
        return out.view(1, count, heads, -1)

    def _block(
        self, first: int, start: int, count: int, grouped: torch.Tensor
    ) -> tuple[int, int]:
        """Where the block from ``start`` on ends, and the keys it needs."""
        end = round_up(first + start + 1, KEY_BLOCK)
        kv_heads, _, group, _ = grouped.shape
        most = queries_per_block(kv_heads, group, end, grouped.itemsize)
        stop = min(count, start + most, end - first)
        return stop, self._portions.cover(first + stop)

    def _heads_at_once(self, queries: int, keys: int, grouped: torch.Tensor) -> int:
        """KV heads per product: all, unless the window is very long."""
        per_head = queries * grouped.shape[2] * keys * grouped.itemsize
        return max(1, min(grouped.shape[0], 2 * _SCORE_BYTES // per_head))

    def _scores(
        self, grouped: torch.Tensor, key: torch.Tensor, factor: float
    ) -> torch.Tensor:
        """``[kv_heads, q, group, keys]``."""
        kv_heads, queries, group, dim = grouped.shape
        keys = key.shape[1]
        wanted = kv_heads * queries * group * keys
        if wanted > len(self._memory) or self._memory.dtype is not key.dtype:
            self._memory = key.new_empty(wanted)
        scores = self._memory[:wanted].view(kv_heads, queries * group, keys)
        rows = grouped.reshape(kv_heads, queries * group, dim)
        scores_into(scores, rows, key, factor)
        return scores.view(kv_heads, queries, group, keys)

    def _mask(
        self, scores: torch.Tensor, mask: LazyMask, start: int, stop: int
    ) -> None:
        """Take keys away from queries, in place."""
        keys = scores.shape[3]
        if not mask.causal:
            block = mask.block(start, stop, keys, scores)
            scores.add_(block[0, 0, :, None])
            return
        seen = mask.first + start  # by all queries of the block
        above = self._upper(stop - start, keys - seen, scores)
        scores[..., seen:].add_(above[:, None])

    def _upper(self, rows: int, columns: int, like: torch.Tensor) -> torch.Tensor:
        """``-inf`` above the diagonal, 0 elsewhere; of one matrix that is kept."""
        above = self._above
        fits = above.ndim == 2 and rows <= above.shape[0] and columns <= above.shape[1]
        if not fits or above.dtype is not like.dtype:
            size = _MOST_QUERIES, max(columns, _MOST_QUERIES + KEY_BLOCK)
            above = like.new_full(size, float("-inf")).triu_(1)
            self._above = above
        return above[:rows, :columns]

    def _finish(self, scores: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Softmax in place, and the weighted sum ``[kv_heads, q, group, v_dim]``."""
        kv_heads, queries, group, keys = scores.shape
        rows = scores.view(kv_heads, queries * group, keys)
        torch.softmax(rows, -1, out=rows)
        return weighted_sum(rows, value).view(kv_heads, queries, group, -1)


class OneQueryAttention:
    """SDPA of one query over exactly the keys it sees; for decode.

    Args:
        as_rows: Whether the heads of a group are handed over as queries of one head.
    """

    def __init__(self, as_rows: bool) -> None:
        self._as_rows = as_rows

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: LazyMask,
        scaling: float | None,
    ) -> torch.Tensor:
        """See ``AttentionKernel``; ``q`` is 1."""
        heads, kv_heads = query.shape[1], key.shape[1]
        seen = mask.seen_by_first(query.device)
        start, stop = seen if seen is not None else (0, mask.first + 1)
        hidden = None if seen is not None else mask.block(0, 1, stop, query)
        if self._as_rows:
            query = query.reshape(1, kv_heads, heads // kv_heads, -1)
        out = scaled_dot_product_attention(
            query,
            key[:, :, start:stop],
            value[:, :, start:stop],
            attn_mask=hidden,
            scale=scaling,
            enable_gqa=query.shape[1] != kv_heads,
        )
        return out.reshape(1, 1, heads, -1)


class MaskedRowsAttention:
    """SDPA of one query a row over all places of a buffer; for decode in slots.

    The heads of a group are handed over as queries of their KV head: kernels that take
    a mask need not know of groups.
    """

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor,
        scaling: float | None,
    ) -> torch.Tensor:
        """``[rows, heads, 1, k_dim]`` -> ``[rows, 1, heads, v_dim]``.

        Args:
            query: See above.
            key: ``[rows, kv_heads, places, k_dim]``, finite.
            value: ``[rows, kv_heads, places, v_dim]``, finite.
            mask: Additive, ``[rows, 1, 1, places]``.
            scaling: Softmax scale; by default that of ``k_dim``.
        """
        rows, heads, _, dim = query.shape
        kv_heads = key.shape[1]
        grouped = query.reshape(rows, kv_heads, heads // kv_heads, dim)
        out = scaled_dot_product_attention(
            grouped, key, value, attn_mask=mask, scale=scaling
        )
        return out.reshape(rows, 1, heads, -1)
