"""The forward passes of one row: prefill over stored chunks, then decode.

Knows nothing about tiers: chunks to read and chunks to fill come in a ``ChunkIO``.
Engine thread only.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pcr_core.errors import ChunkLostError, DeviceMemoryError, ModelError, PcrError
from pcr_core.model import _compat
from pcr_core.model.chunk_io import ChunkIO
from pcr_core.model.key_blocks import KEY_BLOCK, round_up
from pcr_core.model.layerwise_cache import LayerwiseCache
from pcr_core.model.loading import LoadedModel
from pcr_core.model.prefill_plan import (
    Cuts,
    Segment,
    front_chunk,
    must_compute,
    next_segment,
    usable_chunks,
)
from pcr_core.model.row_buffer import RowBuffer
from pcr_core.model.rows import RowPool
from pcr_core.model.streams import Streams, inline_streams
from pcr_core.model.transfers import Copied, LayerClock, in_runs
from pcr_core.timeline.interval import Interval

_READY_ROWS = 2
READY_BYTES = _READY_ROWS * 48 * 2**20
"""KV memory that is made ready before the first request, at most."""


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


class Row:
    """One request's place in the model: its KV and how far it has come.

    Attributes:
        cache: Its KV.
        resident: Leading tokens of its prompt whose KV it was opened with.
        tokens: Tokens whose KV it holds and a later request may go on from.
    """

    def __init__(self, cache: LayerwiseCache, resident: int) -> None:
        self.cache = cache
        self.resident = resident
        self.tokens: list[int] = []

    @property
    def length(self) -> int:
        """Tokens with KV."""
        return self.cache.length


class Runner:
    """Runs one loaded model. One row at a time.

    Args:
        loaded: The model.
        chunk_tokens: Tokens per chunk.
        cuts: Where prefills are cut.
        streams: Where copies run; by default on the compute queue.
        resident_rows: Rows that keep their KV when they have finished.
        resting_bytes: What these may hold together.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        chunk_tokens: int,
        cuts: Cuts,
        streams: Streams | None = None,
        *,
        resident_rows: int = 0,
        resting_bytes: float = math.inf,
    ) -> None:
        self._model = loaded.model
        self._device = loaded.device
        self._chunk_tokens = chunk_tokens
        self.cuts = cuts
        self.streams = streams or inline_streams(loaded.device)
        self._shapes = loaded.shapes
        self._itemsize = loaded.dtype.itemsize
        self._window = loaded.context_window
        self._rows = RowPool(
            lambda: RowBuffer(loaded.shapes, loaded.dtype, loaded.device),
            resident_rows,
            resting_bytes,
            cuts.align,
        )
        self._cache_argument = _compat.cache_argument(loaded.model)
        self._partial_logits = _compat.takes_logits_to_keep(loaded.model)

    @property
    def buffer_bytes(self) -> int:
        """Working KV memory, rows at rest included, in bytes."""
        return self._rows.nbytes

    def usable_chunks(self, tokens: int) -> int:
        """How many leading chunks of a prompt of ``tokens`` tokens may be read."""
        return usable_chunks(tokens, self._chunk_tokens, self.cuts)

    def must_compute(self, tokens: int) -> int:
        """How many tokens at a prompt's end run, even if every chunk is there."""
        return must_compute(tokens, self._chunk_tokens, self.cuts)

    def make_ready(self) -> None:
        """Allocate and touch rows, so that the first requests need not.

        Each as long as the context window, together at most ``READY_BYTES``.
        """
        per_token = sum(
            shape.kv_heads * (shape.k_dim + shape.v_dim) for shape in self._shapes
        )
        affordable = READY_BYTES // _READY_ROWS // (per_token * self._itemsize)
        rows = [
            self.open_row(min(self._window, affordable))
            for _ in range(min(max(1, self._rows.most), _READY_ROWS))
        ]
        for row in rows:
            row.cache.buffer.clear(row.cache.buffer.capacity)
            self.close_row(row)

    def close(self) -> None:
        """Give the working memory back."""
        self._rows.close()

    def resident(self, prompt: Sequence[int]) -> int:
        """Leading tokens of a prompt with which a row could be opened now. Pure."""
        return self._rows.resident(prompt)

    def open_row(self, tokens: int, prompt: Sequence[int] = ()) -> Row:
        """A row with room for ``tokens`` tokens (padding is added here).

        Args:
            tokens: Prompt and output together.
            prompt: Whose KV is taken over, as far as a row at rest holds it.

        Raises:
            DeviceMemoryError: If there is no memory for it.
        """
        room = round_up(tokens, max(self.cuts.pad, KEY_BLOCK))
        buffer, resident = self._rows.take(prompt, room)
        return Row(LayerwiseCache(buffer, self.streams), resident)

    def close_row(self, row: Row) -> None:
        """Give the row back; ``row.tokens`` says what others may go on from."""
        self._rows.give_back(row.cache.buffer, row.tokens, row.cache.reach)

    def forget(self) -> None:
        """Have no later request go on from any row that there is now."""
        self._rows.forget()

    def prefill(self, row: Row, tokens: Sequence[int], io: ChunkIO) -> Prefilled:
        """KV for all ``tokens`` and the logits of the last.

        Raises:
            ModelError: If the forward pass fails.
        """
        position = resident = row.resident
        logits, forwards, filled = torch.empty(0), list[Forward](), set[int]()
        waited = 0.0
        while position < len(tokens):
            io.between()
            began = time.perf_counter()
            if not forwards:
                position = resident = self._taken_over(position, io)
            self._settle(position, io)
            waited += time.perf_counter() - began
            segment = self._next_segment(position, len(tokens), io)
            stores = io.stores(segment.stop // self._chunk_tokens, filled)
            done = self._try_segment(row, tokens, segment, stores, io)
            if done is None:
                continue
            logits, forward = done
            for index in stores:
                io.filled(index)
            filled.update(stores)
            forwards.append(forward)
            waited += forward.copied.waited
            position = segment.stop
        row.tokens = list(tokens)
        return Prefilled(logits, tuple(forwards), waited, resident, self._chunk_tokens)

    def decode(self, row: Row, token: int) -> torch.Tensor:
        """Append one token; returns its logits ``[1, vocabulary]``."""
        row.cache.begin(row.length)
        logits = self._forward(row, [token], row.length, 1)
        row.cache.end(1)
        if not self.cuts.exact:  # a forward of one row may round differently
            row.tokens.append(token)
        return logits

    def _taken_over(self, resident: int, io: ChunkIO) -> int:
        """How many of the tokens that a row was opened with are left as they are.

        Of a chunk that is only begun the whole can be loaded, if it is stored.
        """
        index = resident // self._chunk_tokens
        if index in io.pending:
            self._settle(resident, io)
        return index * self._chunk_tokens if index in io.sources else resident

    def _settle(self, position: int, io: ChunkIO) -> None:
        """Have the reads settled that the next forward depends on."""
        while (
            index := front_chunk(position, self._chunk_tokens, io.sources)
        ) in io.pending:
            io.settle(index)
            if index in io.pending:
                raise RuntimeError(f"settle({index}) left the chunk pending")

    def _next_segment(self, position: int, total: int, io: ChunkIO) -> Segment:
        heads = {index: head.tokens for index, head in io.heads.items()}
        return next_segment(
            position,
            total,
            self._chunk_tokens,
            io.sources,
            io.pending,
            self.cuts,
            heads,
        )

    def _try_segment(
        self,
        row: Row,
        tokens: Sequence[int],
        segment: Segment,
        stores: Sequence[int],
        io: ChunkIO,
    ) -> tuple[torch.Tensor, Forward] | None:
        """Run one forward; ``None`` if it is to be repeated, as things have changed."""
        try:
            return self._run_segment(row, tokens, segment, stores, io)
        except ChunkLostError as lost:
            io.lost(lost.index)
        except DeviceMemoryError:
            if not self._rows.give_up():
                raise
        return None

    def _run_segment(
        self,
        row: Row,
        tokens: Sequence[int],
        segment: Segment,
        stores: Sequence[int],
        io: ChunkIO,
    ) -> tuple[torch.Tensor, Forward]:
        """Run one forward; returns the last token's logits."""
        clock, done = LayerClock(self.streams.stopwatch), 0
        began = time.perf_counter()
        part = tokens[segment.start : segment.stop]
        try:
            row.cache.begin(
                segment.start,
                io.loads(segment, self._chunk_tokens),
                in_runs(io.sinks, stores, self._chunk_tokens),
                clock,
            )
            logits = self.forward_range(row, part, segment.start)
            clock.end()
            done = len(part)
        finally:  # whatever fails, copies may have begun
            copied = row.cache.end(done)
        seconds = time.perf_counter() - began
        return logits, Forward(segment.start, segment.stop, seconds, copied, clock)

    def forward_range(
        self, row: Row, tokens: Sequence[int], start: int
    ) -> torch.Tensor:
        """One forward of ``tokens`` at position ``start``, padded as the cuts ask.

        Call between ``row.cache.begin(start)`` and ``row.cache.end(len(tokens))``.
        Returns the logits of the last token, ``[1, vocabulary]``.
        """
        count = len(tokens)
        padding = [tokens[-1]] * (round_up(count, self.cuts.pad) - count)
        return self._forward(row, [*tokens, *padding], start, count)

    def _forward(
        self, row: Row, tokens: list[int], start: int, count: int
    ) -> torch.Tensor:
        """Run ``tokens``, of which the first ``count`` are real, at ``start``.

        Padding repeats the last real token and position: finite, in the vocabulary,
        within the context window; later queries never see it, as its place is
        overwritten before they come.
        """
        ids = torch.tensor([tokens], device=self._device)
        positions = torch.arange(start, start + len(tokens), device=self._device)
        positions.clamp_(max=start + count - 1)
        options: dict[str, Any] = {self._cache_argument: row.cache}
        if self._partial_logits:
            # A tensor, not a number: with padding the last real row is not the last.
            options["logits_to_keep"] = torch.tensor([count - 1], device=self._device)
        try:
            with torch.inference_mode():
                output = self._model(
                    input_ids=ids,
                    position_ids=positions.unsqueeze(0),
                    use_cache=True,
                    **options,
                )
        except PcrError:
            raise  # not the model's: a read was lost, or whoever asked has gone
        except torch.OutOfMemoryError as error:
            raise DeviceMemoryError(
                f"the forward pass ran out of memory: {error}; use a shorter prompt or "
                "another device"
            ) from error
        except (RuntimeError, ValueError, IndexError) as error:
            raise ModelError(f"the forward pass failed: {error}") from error
        logits: torch.Tensor = output.logits
        return logits[:, -1] if self._partial_logits else logits[:, count - 1]
