"""One prompt on its way through the model, forward by forward. Engine thread only.

Between two forwards other rows may be decoded: a long prompt does not hold them up for
longer than what ``Prefill.advance`` is told to compute. Where that cuts it changes no
bit in exact mode: cuts are where ``Cuts`` allows them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pcr_core.model.chunk_io import ChunkIO
from pcr_core.model.prefill_plan import Segment, front_chunk, next_segment
from pcr_core.model.transfers import Copied, LayerClock
from pcr_core.timeline.interval import Interval

if TYPE_CHECKING:
    from pcr_core.model.runner import Row, Runner


@dataclass(frozen=True, slots=True)
class Forward:
    """One forward of a prefill.

    Attributes:
        start, stop: Range of tokens it computed; ``start`` tokens were in place.
        host_seconds: How long it kept the caller.
        copied: What was copied meanwhile.
        clock: When compute worked on which layer.
    """

    start: int
    stop: int
    host_seconds: float
    copied: Copied
    clock: LayerClock

    @property
    def seconds(self) -> float:
        """How long it took, copies in and out included, waits for reads not.

        A GPU may still be computing when the caller goes on; this waits for it.
        """
        return max(self.host_seconds, self.clock.seconds) - self.copied.waited

    def intervals(self) -> list[Interval]:
        """Where its time went, in seconds of ``time.perf_counter``."""
        computed = self.clock.intervals(self.stop - self.start)
        return [*self.copied.intervals(), *computed]


@dataclass(frozen=True, slots=True)
class Prefilled:
    """What a prefill gave.

    Attributes:
        logits: Of the last token, ``[1, vocabulary]``.
        forwards: What went through the model, in order.
        waited: Seconds spent waiting for reads.
        resident: Leading tokens whose KV was in the row already.
        chunk_tokens: Tokens per chunk.
    """

    logits: torch.Tensor
    forwards: tuple[Forward, ...]
    waited: float
    resident: int
    chunk_tokens: int

    @property
    def computed(self) -> tuple[tuple[int, int], ...]:
        """Token ranges that went through the model."""
        return tuple((forward.start, forward.stop) for forward in self.forwards)

    def loaded(self, index: int) -> int:
        """Tokens of chunk ``index`` that were neither in the row nor computed."""
        first, (_, end) = index * self.chunk_tokens, self.computed[-1]
        start, stop = max(first, self.resident), min(first + self.chunk_tokens, end)
        computed = sum(max(0, min(b, stop) - max(a, start)) for a, b in self.computed)
        return max(0, stop - start) - computed

    def cached(self, tiers: Mapping[int, str]) -> dict[str, int]:
        """Tokens that were not computed, by tier.

        Args:
            tiers: Where chunks could be loaded from, by index.
        """
        found = {"device": self.resident}
        for index, tier in tiers.items():
            found[tier] = found.get(tier, 0) + self.loaded(index)
        return {tier: tokens for tier, tokens in found.items() if tokens}


class Prefill:
    """State of a prefill between two forwards.

    Args:
        runner: Runs the forwards.
        row: Where KV goes.
        tokens: The whole prompt.
        io: Stored chunks and sinks.
    """

    def __init__(
        self, runner: Runner, row: Row, tokens: Sequence[int], io: ChunkIO
    ) -> None:
        self._runner = runner
        self._row = row
        self._tokens = tokens
        self._io = io
        self._chunk = runner.chunk_tokens
        self._position = self._resident = row.resident
        self._logits = torch.empty(0)
        self._forwards: list[Forward] = []
        self._filled: set[int] = set()
        self._waited = 0.0

    @property
    def front(self) -> int:
        """Index of the chunk that the next forward begins in, or loads up to."""
        if not self._forwards and self._resident // self._chunk in self._io.pending:
            return self._resident // self._chunk
        return front_chunk(self._position, self._chunk, self._io.sources)

    def advance(self, budget: int | None) -> bool:
        """Run forwards until ``budget`` tokens are computed, one forward at least.

        Args:
            budget: Tokens; rounded down to where a prefill may be cut. ``None``: to
                the end of the prompt.

        Returns:
            Whether the prompt is done.

        Raises:
            ModelError: If the forward pass fails.
        """
        left = self._whole_cuts(budget)
        while self._position < len(self._tokens):
            done = self._forward(left)
            if left is not None:
                left -= done
                if left < self._runner.cuts.align:
                    break
        if self._position < len(self._tokens):
            return False
        self._row.tokens = list(self._tokens)
        return True

    def result(self) -> Prefilled:
        """What it gave, once it is done."""
        return Prefilled(
            self._logits,
            tuple(self._forwards),
            self._waited,
            self._resident,
            self._chunk,
        )

    def _whole_cuts(self, budget: int | None) -> int | None:
        align = self._runner.cuts.align
        return None if budget is None else max(align, budget // align * align)

    def _forward(self, most: int | None) -> int:
        """Run one forward of ``most`` tokens; returns how many it computed."""
        io = self._io
        io.between()
        began = time.perf_counter()
        if not self._forwards:
            self._position = self._resident = self._taken_over(self._resident, io)
        self._settle(self._position, io)
        self._waited += time.perf_counter() - began
        segment = self._next_segment(most)
        stores = io.stores(segment.stop // self._chunk, self._filled)
        done = self._runner.try_segment(self._row, self._tokens, segment, stores, io)
        if done is None:
            return 0
        self._logits, forward = done
        for index in stores:
            io.filled(index)
        self._filled.update(stores)
        self._forwards.append(forward)
        self._waited += forward.copied.waited
        self._position = segment.stop
        return segment.stop - segment.start

    def _taken_over(self, resident: int, io: ChunkIO) -> int:
        """How many of the tokens that a row was opened with are left as they are.

        Of a chunk that is only begun the whole can be loaded, if it is stored.
        """
        index = resident // self._chunk
        if index in io.pending:
            self._settle(resident, io)
        return index * self._chunk if index in io.sources else resident

    def _settle(self, position: int, io: ChunkIO) -> None:
        """Have the reads settled that the next forward depends on."""
        while (index := front_chunk(position, self._chunk, io.sources)) in io.pending:
            io.settle(index)
            if index in io.pending:
                raise RuntimeError(f"settle({index}) left the chunk pending")

    def _next_segment(self, most: int | None) -> Segment:
        io = self._io
        heads = {index: head.tokens for index, head in io.heads.items()}
        return next_segment(
            self._position,
            len(self._tokens),
            self._chunk,
            io.sources,
            io.pending,
            self._runner.cuts,
            heads,
            most,
        )
