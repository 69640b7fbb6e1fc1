"""How the DRAM tier's slots are shared out between what moves in and what moves out.

A slot that is being read into or written from cannot be evicted. Without limits a slow
disk would end with all of them so, and the request that runs would find none to read
into and none to keep its new chunks in. With one limit for both, reads and writes would
starve each other.
"""

from __future__ import annotations

from dataclasses import dataclass

_READ_AHEAD_BYTES = 256 * 2**20
"""Enough for the time of a long prefill, during which nothing new is started."""


@dataclass(frozen=True, slots=True)
class Reserves:
    """Shares of one pool, in slots. Whoever takes slots asks here how many it may.

    Attributes:
        reads_ahead: Most that may be filled at a time for requests that wait.
        writes: Most that may be queued for the writer, or in its hands, at a time.
        floor: What is left of the pool beside both. The request that runs can have as
            many in any case, as everything else in DRAM gives way to it.
    """

    reads_ahead: int
    writes: int
    floor: int

    @classmethod
    def of(cls, capacity: int, slot_bytes: int) -> Reserves:
        """Share out a pool: a quarter is the floor, reads and writes halve the rest.

        From 1 GiB on reads ahead need less than their part, and writes have half. A
        pool of one or two slots has no floor: each needs one.

        Args:
            capacity: Slots of the pool.
            slot_bytes: Bytes of one.
        """
        kept = (capacity + 1) // 4
        half = (capacity - kept + 1) // 2
        reads = max(1, min(_READ_AHEAD_BYTES // slot_bytes, half))
        writes = max(1, min(capacity // 2, capacity - kept - reads))
        return cls(reads, writes, max(0, capacity - reads - writes))
