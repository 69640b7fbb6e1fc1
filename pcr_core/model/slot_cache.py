"""A transformers ``Cache`` over slots: all rows of one length, each masked to its own.

Where a row ends is a tensor that the host does not look at: shapes, addresses and the
sequence of operations are the same for all lengths, so a step can be recorded once and
replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


class SlotsKv(NamedTuple):
    """Keys or values of one layer in all slots of a step, in place of a tensor.

    Attributes:
        places: ``[rows, kv_heads, places, dim]``; what is behind a row's query may be
            anything finite.
        positions: Of each row's query, ``[rows]``, int64, on the device.
    """

    places: torch.Tensor
    positions: torch.Tensor


class _Layer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of all slots."""

    is_sliding = False
    is_compileable = False

    def __init__(self, keys: SlotsKv, values: SlotsKv) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._k, self._v = keys, values
        self.is_initialized = True

    def lazy_initialization(self, *_: Any, **__: Any) -> None:
        """Nothing to do: the slots exist."""

    def update(  # type: ignore[override]
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[SlotsKv, SlotsKv]:
        """Put ``[rows, kv_heads, 1, dim]`` where each row ends."""
        for kv, new in ((self._k, key_states), (self._v, value_states)):
            at = kv.positions[:, None, None, None].expand(new.shape)
            kv.places.scatter_(2, at, new)
        return self._k, self._v

    def get_mask_sizes(self, *_: Any) -> tuple[int, int]:
        """All places; each row's mask is made by attention."""
        return self.get_max_length(), 0

    def get_seq_length(self, *_: Any) -> int:
        """Nothing that depends on lengths; positions are handed to the model."""
        return 0

    def get_max_length(self) -> int:
        """Tokens that a slot can hold."""
        return self._k.places.shape[2]

    get_max_cache_shape = get_max_length  # its name before transformers 5.x renamed it


class SlotCache(Cache):
    """The KV of one decode step in slots. Engine thread only.

    Args:
        keys: Per layer ``[rows, kv_heads, places, k_dim]``.
        values: Per layer ``[rows, kv_heads, places, v_dim]``.
        positions: Where the new token of each row goes, ``[rows]``.
    """

    def __init__(
        self,
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        positions: torch.Tensor,
    ) -> None:
        pairs = zip(keys, values, strict=True)
        super().__init__(
            layers=[
                _Layer(SlotsKv(k, positions), SlotsKv(v, positions)) for k, v in pairs
            ]
        )
