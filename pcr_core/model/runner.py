"""The forward passes of one row: prefill over stored chunks, then decode.

Knows nothing about tiers: chunks to read and chunks to fill come as ``ChunkTensors``.
Engine thread only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pcr_core.errors import ModelError
from pcr_core.model import _compat
from pcr_core.model.attention import KEY_BLOCK, round_up
from pcr_core.model.layerwise_cache import (
    ChunkTensors,
    LayerwiseCache,
    RowBuffer,
    in_runs,
)
from pcr_core.model.loading import LoadedModel
from pcr_core.model.prefill_plan import (
    Cuts,
    Segment,
    front_chunk,
    must_compute,
    next_segment,
    usable_chunks,
)

_READY_BYTES = 48 * 2**20


def _nothing_pending(index: int) -> None:
    raise ValueError(f"chunk {index} is pending, but nobody said how to settle it")


@dataclass(frozen=True, slots=True)
class ChunkIO:
    """The chunks of one prefill, by index within the prompt.

    The callbacks may change the three collections, all of which are looked at again
    before each forward: a pending chunk may become a source, a sink, or neither, and
    it may do so at any time; a source stays one. A chunk that is in none of them is
    computed and not kept.

    Attributes:
        sources: Complete chunks to read.
        sinks: Chunks to fill where they are computed whole.
        filled: Called with the index of each sink once its bytes are complete.
        between: Called before each forward; may raise to stop the prefill.
        pending: Chunks whose reads are under way; nothing past one is computed.
        settle: Called with the index of a pending chunk when all before it is in
            place; when it returns, the chunk is pending no more. May raise to stop
            the prefill.
    """

    sources: Mapping[int, ChunkTensors]
    sinks: Mapping[int, ChunkTensors]
    filled: Callable[[int], None]
    between: Callable[[], None]
    pending: Collection[int] = ()
    settle: Callable[[int], None] = _nothing_pending


@dataclass(frozen=True, slots=True)
class Forward:
    """One forward of a prefill.

    Attributes:
        start, stop: Range of tokens it computed; ``start`` tokens were in place.
        seconds: How long it took, copies in and out included, waits for reads not.
    """

    start: int
    stop: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Prefilled:
    """What a prefill gave.

    Attributes:
        logits: Of the last token, ``[1, vocabulary]``.
        forwards: What went through the model, in order.
        waited: Seconds spent settling pending chunks.
        chunk_tokens: Tokens per chunk.
    """

    logits: torch.Tensor
    forwards: tuple[Forward, ...]
    waited: float
    chunk_tokens: int

    @property
    def computed(self) -> tuple[tuple[int, int], ...]:
        """Token ranges that went through the model."""
        return tuple((forward.start, forward.stop) for forward in self.forwards)

    def reused(self, index: int) -> int:
        """Tokens of chunk ``index`` that did not go through the model."""
        start = index * self.chunk_tokens
        stop = start + self.chunk_tokens
        again = sum(max(0, min(b, stop) - max(a, start)) for a, b in self.computed)
        return self.chunk_tokens - again


class Row:
    """One request's place in the model: its KV and how far it has come."""

    def __init__(self, cache: LayerwiseCache) -> None:
        self.cache = cache

    @property
    def length(self) -> int:
        """Tokens with KV."""
        return self.cache.length


class Runner:
    """Runs one loaded model. One row at a time."""

    def __init__(self, loaded: LoadedModel, chunk_tokens: int, cuts: Cuts) -> None:
        self._model = loaded.model
        self._device = loaded.device
        self._chunk_tokens = chunk_tokens
        self.cuts = cuts
        self._shapes = loaded.shapes
        self._itemsize = loaded.dtype.itemsize
        self._window = loaded.context_window
        self._buffer = RowBuffer(loaded.shapes, loaded.dtype, loaded.device)
        self._cache_argument = _compat.cache_argument(loaded.model)
        self._partial_logits = _compat.takes_logits_to_keep(loaded.model)

    @property
    def buffer_bytes(self) -> int:
        """Working KV memory, in bytes."""
        return self._buffer.nbytes

    def usable_chunks(self, tokens: int) -> int:
        """How many leading chunks of a prompt of ``tokens`` tokens may be read."""
        return usable_chunks(tokens, self._chunk_tokens, self.cuts)

    def must_compute(self, tokens: int) -> int:
        """How many tokens at a prompt's end run, even if every chunk is there."""
        return must_compute(tokens, self._chunk_tokens, self.cuts)

    def make_ready(self) -> None:
        """Allocate and touch a buffer, so that the first request need not.

        As long as the context window, but at most ``_READY_BYTES``.
        """
        per_token = sum(
            shape.kv_heads * (shape.k_dim + shape.v_dim) for shape in self._shapes
        )
        affordable = _READY_BYTES // (per_token * self._itemsize)
        self._buffer.reserve(min(self._window, affordable))
        self._buffer.clear(self._buffer.capacity)

    def close(self) -> None:
        """Give the working memory back."""
        self._buffer.release()

    def open_row(self, tokens: int) -> Row:
        """A row with room for ``tokens`` tokens (padding is added here)."""
        self._buffer.reserve(round_up(tokens, max(self.cuts.pad, KEY_BLOCK)))
        return Row(LayerwiseCache(self._buffer, self._chunk_tokens))

    def close_row(self, row: Row) -> None:
        """Give the row's memory back, cleared."""
        self._buffer.clear(row.cache.reach)

    def prefill(self, row: Row, tokens: Sequence[int], io: ChunkIO) -> Prefilled:
        """KV for all ``tokens`` and the logits of the last.

        Raises:
            ModelError: If the forward pass fails.
        """
        total, chunk, position, waited = len(tokens), self._chunk_tokens, 0, 0.0
        logits, forwards = torch.empty(0), list[Forward]()
        while position < total:
            io.between()
            waited += self._settle(position, io)
            segment = next_segment(
                position, total, chunk, io.sources, io.pending, self.cuts
            )
            logits, seconds = self._run_segment(row, tokens, segment, io)
            forwards.append(Forward(segment.start, segment.stop, seconds))
            position = segment.stop
        return Prefilled(logits, tuple(forwards), waited, chunk)

    def decode(self, row: Row, token: int) -> torch.Tensor:
        """Append one token; returns its logits ``[1, vocabulary]``."""
        row.cache.begin(row.length)
        logits = self._forward(row, [token], row.length, 1)
        row.cache.end(1)
        return logits

    def _settle(self, position: int, io: ChunkIO) -> float:
        """Have the reads settled that the next forward depends on; returns seconds."""
        began = time.perf_counter()
        while (
            index := front_chunk(position, self._chunk_tokens, io.sources)
        ) in io.pending:
            io.settle(index)
            if index in io.pending:
                raise RuntimeError(f"settle({index}) left the chunk pending")
        return time.perf_counter() - began

    def _run_segment(
        self, row: Row, tokens: Sequence[int], segment: Segment, io: ChunkIO
    ) -> tuple[torch.Tensor, float]:
        """Run one forward; returns the last token's logits and the seconds it took."""
        began = time.perf_counter()
        stores = [index for index in segment.stores if index in io.sinks]
        row.cache.begin(
            segment.start,
            in_runs(io.sources, segment.loads, self._chunk_tokens),
            in_runs(io.sinks, stores, self._chunk_tokens),
        )
        part = tokens[segment.start : segment.stop]
        logits = self.forward_range(row, part, segment.start)
        row.cache.end(len(part))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the sinks' copies are asynchronous
        seconds = time.perf_counter() - began
        for index in stores:
            io.filled(index)
        return logits, seconds

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
        except (RuntimeError, ValueError, IndexError) as error:
            raise ModelError(f"the forward pass failed: {error}") from error
        logits: torch.Tensor = output.logits
        return logits[:, -1] if self._partial_logits else logits[:, count - 1]
