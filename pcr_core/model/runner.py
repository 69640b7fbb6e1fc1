"""The forward passes of one row: prefill over stored chunks, then decode.

Knows nothing about tiers: chunks to read and chunks to fill come as ``ChunkTensors``.
Engine thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from pcr_core.model.prefill_plan import Cuts, Segment, plan_prefill, usable_chunks

_READY_BYTES = 48 * 2**20


@dataclass(frozen=True, slots=True)
class ChunkIO:
    """The chunks of one prefill, by index within the prompt.

    Attributes:
        sources: Complete chunks to read.
        sinks: Chunks to fill where they are computed whole.
        filled: Called with the index of each sink once its bytes are complete.
        between: Called before each forward; may raise to stop the prefill.
    """

    sources: Mapping[int, ChunkTensors]
    sinks: Mapping[int, ChunkTensors]
    filled: Callable[[int], None]
    between: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Prefilled:
    """What a prefill gave.

    Attributes:
        logits: Of the last token, ``[1, vocabulary]``.
        computed: Token ranges that went through the model.
        chunk_tokens: Tokens per chunk.
    """

    logits: torch.Tensor
    computed: tuple[tuple[int, int], ...]
    chunk_tokens: int

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
        segments = plan_prefill(len(tokens), self._chunk_tokens, io.sources, self.cuts)
        logits = torch.empty(0)
        for segment in segments:
            io.between()
            logits = self._run_segment(row, tokens, segment, io)
        computed = tuple((segment.start, segment.stop) for segment in segments)
        return Prefilled(logits, computed, self._chunk_tokens)

    def decode(self, row: Row, token: int) -> torch.Tensor:
        """Append one token; returns its logits ``[1, vocabulary]``."""
        row.cache.begin(row.length)
        logits = self._forward(row, [token], row.length, 1)
        row.cache.end(1)
        return logits

    def _run_segment(
        self, row: Row, tokens: Sequence[int], segment: Segment, io: ChunkIO
    ) -> torch.Tensor:
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
        for index in stores:
            io.filled(index)
        return logits

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
