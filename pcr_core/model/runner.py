"""The forward passes: a prompt over stored chunks, and one token of several rows.

Knows nothing about tiers: chunks to read and chunks to fill come in a ``ChunkIO``.
Engine thread only.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import torch

from pcr_core.errors import ChunkLostError, DeviceMemoryError
from pcr_core.model.chunk_io import ChunkIO
from pcr_core.model.decode_step import DecodeStep, Decoding, StepInRows
from pcr_core.model.key_blocks import KEY_BLOCK, round_up
from pcr_core.model.layerwise_cache import LayerwiseCache
from pcr_core.model.loading import LoadedModel
from pcr_core.model.model_call import ModelCall
from pcr_core.model.prefill import Forward, Prefill, Prefilled
from pcr_core.model.prefill_plan import (
    Cuts,
    Segment,
    must_compute,
    usable_chunks,
)
from pcr_core.model.row_buffer import RowBuffer
from pcr_core.model.rows import RowPool
from pcr_core.model.streams import Streams, inline_streams
from pcr_core.model.transfers import LayerClock, in_runs

_READY_ROWS = 2
READY_BYTES = _READY_ROWS * 48 * 2**20
"""KV memory that is made ready before the first request, at most."""


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
    """Runs one loaded model.

    Args:
        loaded: The model.
        chunk_tokens: Tokens per chunk.
        cuts: Where prefills are cut.
        streams: Where copies run; by default on the compute queue.
        resident_rows: Rows that keep their KV when they have finished.
        resting_bytes: What these may hold together.
        decoding: Whether several rows are decoded in one forward.
        row_bytes: What all rows in use may hold together.

    Attributes:
        chunk_tokens, cuts, streams: See above.
        call: Calls the model.
        step: Computes decode steps; at first on the rows' own buffers.
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
        decoding: Decoding = "serial",
        row_bytes: float = math.inf,
    ) -> None:
        self.chunk_tokens = chunk_tokens
        self.cuts = cuts
        self.call = ModelCall(loaded)
        self._in_rows = StepInRows(self.call, decoding)
        self.step: DecodeStep = self._in_rows
        self.streams = streams or inline_streams(loaded.device)
        self._shapes = loaded.shapes
        self._itemsize = loaded.dtype.itemsize
        self._window = loaded.context_window
        self._rows = RowPool(
            lambda: RowBuffer(loaded.shapes, loaded.dtype, loaded.device),
            resident_rows,
            resting_bytes,
            cuts.align,
            row_bytes,
        )

    @property
    def decoding(self) -> Decoding:
        """What rows that are decoded in one forward do to each other's bits."""
        return self._in_rows.decoding

    @property
    def buffer_bytes(self) -> int:
        """Working KV memory, rows at rest included, in bytes."""
        return self._rows.nbytes + self.step.nbytes

    def decode_by(self, step: DecodeStep) -> None:
        """Have decode steps computed by ``step`` from now on."""
        self.step = step
        self._rows.spare = step.give_up  # not of self: that would be a cycle

    def usable_chunks(self, tokens: int) -> int:
        """How many leading chunks of a prompt of ``tokens`` tokens may be read."""
        return usable_chunks(tokens, self.chunk_tokens, self.cuts)

    def must_compute(self, tokens: int) -> int:
        """How many tokens at a prompt's end run, even if every chunk is there."""
        return must_compute(tokens, self.chunk_tokens, self.cuts)

    def make_ready(self) -> None:
        """Allocate and touch rows, so that the first requests need not.

        Each as long as the context window, together at most ``READY_BYTES``.
        """
        per_token = sum(
            shape.kv_heads * (shape.k_dim + shape.v_dim) for shape in self._shapes
        )
        affordable = READY_BYTES // _READY_ROWS // (per_token * self._itemsize)
        room, rows = min(self._window, affordable), list[Row]()
        for _ in range(min(max(1, self._rows.most), _READY_ROWS)):
            if self.fits(room):
                rows.append(self.open_row(room))
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
        buffer, resident = self._rows.take(prompt, self._padded(tokens))
        return Row(LayerwiseCache(buffer, self.streams), resident)

    def fits(self, tokens: int) -> bool:
        """Whether a row of so many tokens may be opened beside those in use. Pure."""
        return self._rows.fits(self._padded(tokens))

    def make_room(self, row: Row, most: int) -> None:
        """See to it that a row can hold one token more.

        Args:
            row: The row.
            most: Tokens it will hold at its end; it grows by half, up to that.

        Raises:
            DeviceMemoryError: If there is no memory for it; the row is as it was.
        """
        buffer = row.cache.buffer
        if row.length < buffer.capacity:
            return
        self.step.settle(row.cache)
        room = min(most, buffer.capacity + max(KEY_BLOCK, buffer.capacity // 2))
        self._rows.grow(buffer, max(room, row.length + 1), row.length)
        row.cache = row.cache.moved()

    def copy_row(self, row: Row, tokens: int) -> Row:
        """A second row with the same KV, and room for ``tokens`` tokens.

        Raises:
            DeviceMemoryError: If there is no memory for it.
        """
        self.step.settle(row.cache)
        copy = self.open_row(max(tokens, row.length))
        copy.resident = 0
        copy.cache.copy_from(row.cache)
        copy.tokens = list(row.tokens)
        return copy

    def give_up(self) -> bool:
        """Free what can be done without; returns whether there was any.

        That is the memory of rows at rest, and what decode steps hold for themselves.
        """
        return self._rows.give_up()

    def _padded(self, tokens: int) -> int:
        return round_up(tokens, max(self.cuts.pad, KEY_BLOCK))

    def close_row(self, row: Row) -> None:
        """Give the row back; ``row.tokens`` says what others may go on from."""
        self.step.settle(row.cache)
        self._rows.give_back(row.cache.buffer, row.tokens, row.cache.reach)

    def forget(self) -> None:
        """Have no later request go on from any row that there is now."""
        self._rows.forget()

    def begin_prefill(self, row: Row, tokens: Sequence[int], io: ChunkIO) -> Prefill:
        """Prepare KV for all ``tokens`` and the logits of the last, forward by forward.

        ``io`` must stay as it is until the last forward has run.
        """
        self.step.settle(row.cache)
        return Prefill(self, row, tokens, io)

    def prefill(self, row: Row, tokens: Sequence[int], io: ChunkIO) -> Prefilled:
        """KV for all ``tokens`` and the logits of the last, at once.

        Raises:
            ModelError: If the forward pass fails.
        """
        run = self.begin_prefill(row, tokens, io)
        run.advance(None)
        return run.result()

    def decode(self, rows: Sequence[Row], tokens: Sequence[int]) -> torch.Tensor:
        """Append one token to each row; returns ``[rows, vocabulary]`` logits.

        If it raises, no row has become longer, and it can be tried again.

        Raises:
            ModelError: If the forward pass fails.
        """
        logits = self.step.logits([row.cache for row in rows], tokens)
        for row, token in zip(rows, tokens, strict=True):
            row.cache.extend()
            if not self.cuts.exact:  # a forward of one row may round differently
                row.tokens.append(token)
        return logits

    def try_segment(
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
                io.loads(segment, self.chunk_tokens),
                in_runs(io.sinks, stores, self.chunk_tokens),
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
        return self._forward(row.cache, [[*tokens, *padding]], start, count)

    def _forward(
        self, cache: LayerwiseCache, tokens: list[list[int]], start: int, count: int
    ) -> torch.Tensor:
        """Run ``tokens``, of which the first ``count`` are real, at ``start``.

        Padding repeats the last real token and position: finite, in the vocabulary,
        within the context window; later queries never see it, as its place is
        overwritten before they come.
        """
        positions = torch.arange(start, start + len(tokens[0]))
        positions.clamp_(max=start + count - 1)
        return self.call(cache, torch.tensor(tokens), positions[None], count)
