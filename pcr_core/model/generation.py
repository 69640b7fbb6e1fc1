"""One request being generated: prefill, then one token per step. Engine thread only.

``step`` is the seam at which a later version decodes several rows at once.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from pcr_core.model.chunk_io import ChunkIO
from pcr_core.model.runner import Forward, Row, Runner
from pcr_core.model.sampling import Sampler
from pcr_core.model.text import TextStream
from pcr_core.request import FinishReason, Request, Result, Timing, Usage
from pcr_core.timeline.interval import Interval


class Generation:
    """State of a running request. Close it, whatever happens."""

    def __init__(
        self, runner: Runner, tokenizer: Any, request: Request, end_ids: Sequence[int]
    ) -> None:
        params = request.params
        self.request = request
        self._runner = runner
        self._sampler = Sampler(params, request.tokens, end_ids, request.constraint)
        self._text = TextStream(tokenizer, params.stop)
        self._end_ids = {*end_ids, *params.stop_token_ids}
        self._row: Row = runner.open_row(
            len(request.tokens) + params.max_tokens, request.tokens
        )
        self._tokens: list[int] = []
        self._pieces: list[str] = []
        self._started = time.perf_counter()
        self._loaded = self._first = self._started
        self._usage = Usage(len(request.tokens), 0, {})
        self._finish: FinishReason | None = None
        self._intervals: list[Interval] = []  # in seconds of time.perf_counter

    @property
    def resident(self) -> int:
        """Leading prompt tokens whose KV was there before anything was loaded."""
        return self._row.resident

    @property
    def cached_by_tier(self) -> Mapping[str, int]:
        """Prompt tokens that were not computed, by tier; known after ``prefill``."""
        return self._usage.cached_by_tier

    @property
    def finished(self) -> bool:
        """Whether the last token has been generated."""
        return self._finish is not None

    def prefill(self, io: ChunkIO, tiers: Mapping[int, str]) -> Sequence[Forward]:
        """Run the prompt and generate the first token.

        Args:
            io: Stored chunks and sinks.
            tiers: Tier of each of ``io.sources``, by chunk index; may grow with them.
                ``io.heads`` are in DRAM.

        Returns:
            The forwards, for who measures them.
        """
        began = time.perf_counter()
        prefilled = self._runner.prefill(self._row, self.request.tokens, io)
        self._loaded = began + prefilled.waited  # as if all waiting had come first
        cached = prefilled.cached({**dict.fromkeys(io.heads, "dram"), **tiers})
        self._usage = Usage(len(self.request.tokens), 0, cached)
        self._accept(prefilled.logits)
        self._first = time.perf_counter()
        for forward in prefilled.forwards:
            self._intervals += forward.intervals()
        return prefilled.forwards

    def step(self) -> None:
        """Generate one more token."""
        began = time.perf_counter()
        self._accept(self._runner.decode(self._row, self._tokens[-1]))
        self._intervals.append(
            Interval("decode", None, began, time.perf_counter(), tokens=1)
        )

    def note_reads(self, reads: Iterable[tuple[int, int, float, float]]) -> None:
        """Add the SSD reads of this request to its timeline.

        Args:
            reads: First and last layer, start and stop in seconds of
                ``time.perf_counter``. What was read before the request was submitted is
                left out.
        """
        sent = self.request.submitted
        self._intervals += [
            Interval("read", first if first == last else None, max(start, sent), stop)
            for first, last, start, stop in reads
            if stop > sent
        ]

    def result(self) -> Result:
        """The result of a finished generation."""
        assert self._finish is not None
        now, sent = time.perf_counter(), self.request.submitted
        return Result(
            text="".join(self._pieces),
            token_ids=self._tokens,
            logprobs=self._sampler.logprobs,
            top_logprobs=self._sampler.top_logprobs,
            finish_reason=self._finish,
            usage=Usage(
                self._usage.prompt_tokens, len(self._tokens), self._usage.cached_by_tier
            ),
            timing=Timing(
                queue=self._started - sent,
                load_wait=self._loaded - self._started,
                prefill=self._first - self._loaded,
                ttft=self._first - sent,
                decode=now - self._first,
                total=now - sent,
            ),
            intervals=tuple(
                Interval(
                    one.lane, one.layer, one.start - sent, one.stop - sent, one.tokens
                )
                for one in self._intervals
            ),
        )

    def close(self) -> None:
        """Give the row back; others may go on from it, if all went well."""
        if not (self.finished and self.request.remembered):
            self._row.tokens = []
        self._runner.close_row(self._row)

    def _accept(self, logits: torch.Tensor) -> None:
        token = self._sampler.choose(logits)
        self._tokens.append(token)
        if token in self._end_ids:
            self._end("stop")
            return
        self._emit(self._text.push(token))
        if self._text.stopped:
            self._finish = "stop"
        elif self._sampler.complete:
            self._end("stop")
        elif len(self._tokens) >= self.request.params.max_tokens:
            self._end("length")

    def _end(self, reason: FinishReason) -> None:
        self._emit(self._text.finish())
        self._finish = "stop" if self._text.stopped else reason

    def _emit(self, text: str) -> None:
        if text:
            self._pieces.append(text)
            self.request.completion.emit(text)
