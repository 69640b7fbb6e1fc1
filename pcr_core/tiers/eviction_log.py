"""Why chunks that were here are gone: a bounded memory, for ``explain`` only."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from pcr_core.index.chunk import ChunkKey

_CAPACITY = 16_384

Tier = Literal["dram", "ssd"]


@dataclass(frozen=True, slots=True)
class Gone:
    """How a chunk left a tier.

    Attributes:
        tier: Which tier it left.
        when: Unix time, in seconds.
        reason: Such as ``"dram budget"``, ``"ssd budget"``, ``"damaged"``.
        by: What it made room for, or ``""``.
    """

    tier: Tier
    when: float
    reason: str
    by: str


class EvictionLog:
    """The last departures, by chunk. Engine thread only.

    Args:
        capacity: Chunks remembered; the oldest departure is forgotten first.
        clock: Unix time in seconds.

    Attributes:
        cause: What is being made room for now.
    """

    def __init__(
        self, capacity: int = _CAPACITY, clock: Callable[[], float] = time.time
    ) -> None:
        self.cause = ""
        self._capacity = capacity
        self._clock = clock
        self._gone: OrderedDict[ChunkKey, Gone] = OrderedDict()

    @contextmanager
    def on_account_of(self, cause: str) -> Iterator[None]:
        """Within the block, room is made for something else."""
        before, self.cause = self.cause, cause
        try:
            yield
        finally:
            self.cause = before

    def note(
        self, key: ChunkKey, tier: Tier, reason: str, *, by: str | None = None
    ) -> None:
        """Remember that a chunk left a tier just now.

        Args:
            key: The chunk.
            tier: Which tier it left.
            reason: Why.
            by: On whose account; ``None`` is whatever room is being made for.
        """
        cause = self.cause if by is None else by
        self._gone[key] = Gone(tier, self._clock(), reason, cause)
        self._gone.move_to_end(key)
        if len(self._gone) > self._capacity:
            self._gone.popitem(last=False)

    def find(self, key: ChunkKey) -> Gone | None:
        """Return the chunk's last departure, or ``None``."""
        return self._gone.get(key)

    def forget(self, key: ChunkKey) -> None:
        """Drop what is known of a chunk."""
        self._gone.pop(key, None)
