"""Which numbers of rows and keys change no bit of a product, tried on the machine.

Noise shows a difference between two orders of summing only here and there, in bf16 in
one element of ten thousand. So the sums compared here cancel: what is left is rounding
alone, and nearly every element differs if the order does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch.nn.functional import pad

from pcr_core.index.chunk import LayerShape
from pcr_core.model import onednn
from pcr_core.model.attention_kernels import (
    KeyPortions,
    queries_per_block,
    scores_into,
    weighted_sum,
)
from pcr_core.model.key_blocks import KEY_BLOCK

_PORTIONS = (
    KeyPortions(64, 64),
    KeyPortions(64, KEY_BLOCK),
    KeyPortions(KEY_BLOCK, KEY_BLOCK),
)
_NEAR = (0, 1, 2, 3, 7)  # key blocks in which products are compared, and the last
_FURTHEST = 63
_QUERIES = (4, 12, 16, 48, 100, 128)
_STOPS = (130, 400, KEY_BLOCK)  # ends of blocks of queries, within a key block
_FIRST_STOPS = (*range(64, KEY_BLOCK, 64), *_STOPS)  # and within the first
_DISTINCT = 512  # rows of noise; repeated beyond
_SCALING = 0.3


def noise_of(seed: int, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """Normal noise of any shape, the same every time."""
    source = torch.Generator().manual_seed(seed)
    return lambda *size: torch.randn(*size, generator=source).to(dtype)


def cancelling(
    left: torch.Tensor, right: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Make a product whose exact value is 0, without small partial sums.

    Args:
        left: ``[batch, rows, half]``.
        right: ``[batch, half, columns]``.

    Returns:
        ``[batch, rows, 2 * half]`` and ``[batch, 2 * half, columns]``: each summand has
        its opposite somewhere along the inner dimension.
    """
    half = left.shape[2]
    order = torch.randperm(2 * half, generator=torch.Generator().manual_seed(half))
    place = torch.argsort(order)
    return (
        torch.cat((left, left), 2).index_select(2, place),
        torch.cat((right, -right), 1).index_select(1, place),
    )


def finest_portions(
    heads: int, shapes: Sequence[LayerShape], dtype: torch.dtype, window: int
) -> KeyPortions | None:
    """The finest portions of keys in which ``UnfusedAttention`` keeps its bits.

    Args:
        heads: Query heads.
        shapes: Of the layers.
        dtype: Of queries, keys and values.
        window: Longest sequence, in tokens.

    Returns:
        ``None`` if there are none, or the machine has no fast product for ``dtype``.
    """
    if not onednn.supports(dtype):
        return None
    last = min(_FURTHEST, (window - 1) // KEY_BLOCK)
    blocks = sorted({*(block for block in _NEAR if block < last), last})
    products = [_Products(heads, shape, dtype) for shape in set(shapes)]
    for portions in _PORTIONS:
        if all(p.agree(portions, block) for p in products for block in blocks):
            return portions
    return None


class _Products:
    """The two products of ``UnfusedAttention`` for layers of one shape."""

    def __init__(self, heads: int, shape: LayerShape, dtype: torch.dtype) -> None:
        self._batch = shape.kv_heads
        self._group = heads // shape.kv_heads
        self._shape, self._dtype = shape, dtype
        self._noise = noise_of(1, dtype)

    def agree(self, portions: KeyPortions, block: int) -> bool:
        """Whether, for queries in a key block, portions and rows change no bit."""
        keys = (block + 1) * KEY_BLOCK
        most = queries_per_block(self._batch, self._group, keys, self._dtype.itemsize)
        rows = [n * self._group for n in _QUERIES if n <= most]
        stops = [block * KEY_BLOCK + stop for stop in _STOPS if block] or _FIRST_STOPS
        return self._scores_agree(portions, keys, stops, rows) and all(
            self._sums_agree(portions, stop, keys, rows) for stop in stops
        )

    def _repeated(self, batch: int, rows: int, columns: int) -> torch.Tensor:
        """Noise, of which only so many rows are distinct."""
        distinct = min(rows, _DISTINCT)
        noise = self._noise(batch, distinct, columns)
        return noise.repeat(1, -(-rows // distinct), 1)[:, :rows]

    def _tries(self, rows: Sequence[int]) -> Iterator[tuple[int, int]]:
        """``(heads, rows)``; a very long window is computed head by head."""
        for count in rows:
            yield self._batch, count
        yield 1, rows[0]

    def _scores_agree(
        self,
        portions: KeyPortions,
        keys: int,
        stops: Sequence[int],
        rows: Sequence[int],
    ) -> bool:
        dim = self._shape.k_dim // 2
        query, key = cancelling(
            self._repeated(self._batch, rows[-1], dim),
            self._repeated(self._batch, keys, dim).transpose(1, 2),
        )
        key = key.transpose(1, 2).contiguous()
        expected = query.new_empty(self._batch, rows[-1], keys)
        scores_into(expected, query, key, _SCALING)
        for some in {portions.cover(stop) for stop in stops}:
            for heads, count in self._tries(rows):
                out = query.new_full((heads, count, some), float("nan"))
                part = query[:heads, :count].contiguous()
                scores_into(out, part, key[:heads, :some], _SCALING)
                if not torch.equal(out, expected[:heads, :count, :some]):
                    return False
        return True

    def _sums_agree(
        self, portions: KeyPortions, stop: int, keys: int, rows: Sequence[int]
    ) -> bool:
        """Keys from ``stop`` on carry no weight, as they are masked."""
        half = stop // 2
        weights, value = cancelling(
            self._noise(self._batch, 8, half).repeat(1, -(-rows[-1] // 8), 1),
            self._repeated(self._batch, half, self._shape.v_dim),
        )
        weights = pad(weights[:, : rows[-1]], (0, keys - 2 * half))
        value = pad(value, (0, 0, 0, keys - 2 * half))
        expected = weighted_sum(weights, value)
        some = portions.cover(stop)
        for heads, count in self._tries(rows):
            part = weights[:heads, :count, :some].contiguous()
            result = weighted_sum(part, value[:heads, :some])
            if not torch.equal(result, expected[:heads, :count]):
                return False
        return True
