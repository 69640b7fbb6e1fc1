"""A request between its admission and its first token. Engine thread only.

Holds what must be given back whatever happens: the lease on the chunks it reads and
fills. It lives over several steps of the loop when other rows are running.
"""

from __future__ import annotations

from collections.abc import Callable

from pcr_core.errors import ModelError
from pcr_core.model.chunk_io import ChunkIO, Head
from pcr_core.model.generation import Generation
from pcr_core.request import Request
from pcr_core.tiers import Lease, TierManager


class Prefilling:
    """One prompt being computed, its lease open. Close it, whatever happens.

    Args:
        generation: Whose prompt it is; its row is open.
        tiers: Lend chunks.
        checkpoint: Called now and then; raises to end it.
    """

    def __init__(
        self,
        generation: Generation,
        tiers: TierManager,
        checkpoint: Callable[[], None],
    ) -> None:
        self.generation = generation
        self._tiers = tiers
        request = generation.request
        self._lease = tiers.lease(
            request.keys, request.tokens, request.usable, generation.resident
        )
        self._lease.checkpoint = checkpoint
        generation.begin_prefill(_io(self._lease))

    @property
    def request(self) -> Request:
        """Whose prompt it is."""
        return self.generation.request

    def uncounted(self) -> Prefilling:
        """Have it count for no hits: nobody asked for it."""
        self._lease.counted = False
        return self

    def is_late(self) -> bool:
        """Whether ``advance`` would wait for reads; others can go on meanwhile."""
        return self._lease.is_late(self.generation.front)

    def advance(self, budget: int | None) -> bool:
        """Compute up to ``budget`` tokens; returns whether the prompt is done.

        Raises:
            ModelError: If the forward pass fails.
        """
        try:
            return self.generation.advance_prefill(budget)
        except ModelError:
            self._lease.discard()  # KV behind a failed forward is worthless
            raise

    def finish(self) -> None:
        """Take what it gave: the first token, unless that is known; end the lease.

        Raises:
            ModelError: If the logits are NaN.
        """
        try:
            forwards = self.generation.end_prefill(self._lease.tiers)
        except ModelError:
            self._lease.discard()
            raise
        for one in forwards:
            new = one.stop - one.start
            self._tiers.prefill_times.observe(one.start, new, one.seconds)
        self._lease.reused = self.generation.cached_by_tier
        self.close()
        self.generation.note_reads(self._lease.reads)

    def close(self) -> None:
        """Give the chunks back; those that are filled are kept."""
        self._lease.close()


def _io(lease: Lease) -> ChunkIO:
    heads = {i: Head(one.slot, one.tokens) for i, one in lease.heads.items()}
    return ChunkIO(
        sources=lease.sources,
        arriving=lease.arriving,
        lost=lease.lost,
        sinks=lease.sinks,
        filled=lease.filled,
        between=lambda: lease.checkpoint(),
        pending=lease.pending,
        settle=lease.settle,
        heads=heads,
    )
