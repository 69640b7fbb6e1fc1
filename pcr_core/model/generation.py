"""One request being generated: prefill, then one token per step. Engine thread only.

It may lose its row on the way, when memory is needed for an older request. Then its
prompt is prefilled again later, and what it had generated goes through the model once
more, token by token as the first time, so that what follows does not change by a bit.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from pcr_core.document_use import DocumentUse, TokenRange, document_uses
from pcr_core.model.chunk_io import ChunkIO
from pcr_core.model.key_blocks import KEY_BLOCK
from pcr_core.model.prefill import Forward, Prefill
from pcr_core.model.runner import Row, Runner
from pcr_core.model.sampling import Sampler
from pcr_core.model.text import TextStream
from pcr_core.request import Request
from pcr_core.result import FinishReason, Result, Timing, Usage
from pcr_core.timeline.interval import Interval

_FIRST_ROOM = KEY_BLOCK
"""Positions for the answer that a row has at first; it grows."""


def room_for(request: Request) -> int:
    """Tokens that a row must hold for a request to begin."""
    return len(request.tokens) + min(request.params.max_tokens, _FIRST_ROOM)


class Generation:
    """State of a running request. Open a row for it, and close it, whatever happens."""

    def __init__(
        self, runner: Runner, tokenizer: Any, request: Request, end_ids: Sequence[int]
    ) -> None:
        params = request.params
        self.request = request
        self._runner = runner
        self._sampler = Sampler(params, request.tokens, end_ids, request.constraint)
        self._text = TextStream(tokenizer, params.stop)
        self._end_ids = {*end_ids, *params.stop_token_ids}
        self._row: Row | None = None
        self._prefill: Prefill | None = None
        self._tokens: list[int] = []
        self._fed = 0  # of these, how many have gone through the model
        self._pieces: list[str] = []
        self._started = time.perf_counter()
        self._loaded = self._first = self._started
        self._usage = Usage(len(request.tokens), 0, {})
        self._computed: Sequence[TokenRange] = ()
        self._finish: FinishReason | None = None
        self._began = self._started
        self._heads: Mapping[int, Any] = {}
        self._logits = torch.empty(0)
        self._intervals: list[Interval] = []  # in seconds of time.perf_counter

    @property
    def resident(self) -> int:
        """Leading prompt tokens whose KV was there before anything was loaded."""
        return self.row.resident

    @property
    def row(self) -> Row:
        """Its place in the model; there is one between ``open`` and ``close``."""
        assert self._row is not None
        return self._row

    @property
    def room(self) -> int:
        """Tokens that a row must hold for it to go on."""
        return max(
            room_for(self.request), len(self.request.tokens) + len(self._tokens) + 1
        )

    @property
    def token_ids(self) -> Sequence[int]:
        """Tokens generated so far."""
        return self._tokens

    @property
    def next_input(self) -> int:
        """The token that goes through the model next."""
        return self._tokens[self._fed]

    @property
    def cached_by_tier(self) -> Mapping[str, int]:
        """Prompt tokens that were not computed, by tier; known after ``prefill``."""
        return self._usage.cached_by_tier

    @property
    def finished(self) -> bool:
        """Whether the last token has been generated."""
        return self._finish is not None

    def open(self) -> None:
        """Take a row, with what it holds of the prompt.

        Raises:
            DeviceMemoryError: If there is no memory for it.
        """
        self._row = self._runner.open_row(self.room, self.request.tokens)

    def open_beside(self, other: Generation) -> None:
        """Take a row with the KV of another that has just prefilled the same prompt.

        Raises:
            DeviceMemoryError: If there is no memory for it.
        """
        self._row = self._runner.copy_row(other.row, self.room)
        size = len(self.request.tokens)
        self._usage = Usage(size, 0, {"device": size})
        self._loaded = time.perf_counter()
        self._logits = other.prompt_logits
        self._accept_first()

    def begin_prefill(self, io: ChunkIO) -> None:
        """Prepare to run the prompt.

        Args:
            io: Stored chunks and sinks.
        """
        self._began = time.perf_counter()
        self._heads = io.heads
        self._prefill = self._runner.begin_prefill(self.row, self.request.tokens, io)

    @property
    def front(self) -> int:
        """Index of the chunk that the prefill is at."""
        assert self._prefill is not None
        return self._prefill.front

    def advance_prefill(self, budget: int | None) -> bool:
        """Compute up to ``budget`` tokens; returns whether the prompt is done."""
        assert self._prefill is not None
        return self._prefill.advance(budget)

    def end_prefill(self, tiers: Mapping[int, str]) -> Sequence[Forward]:
        """Take what the prefill gave, and generate the first token.

        Args:
            tiers: Tier of each chunk that was lent, by index. Heads are in DRAM.

        Returns:
            The forwards, for who measures them.
        """
        assert self._prefill is not None
        prefilled, self._prefill = self._prefill.result(), None
        again = bool(self._tokens)
        if not again:
            # As if all waiting had come first.
            self._loaded = self._began + prefilled.waited
            cached = prefilled.cached({**dict.fromkeys(self._heads, "dram"), **tiers})
            self._usage = Usage(len(self.request.tokens), 0, cached)
            self._computed = prefilled.computed
            self._logits = prefilled.logits
            self._accept_first()
        for forward in prefilled.forwards:
            self._intervals += forward.intervals()
        return prefilled.forwards

    @property
    def prompt_logits(self) -> torch.Tensor:
        """Of the last token of the prompt, ``[1, vocabulary]``."""
        return self._logits

    def make_room(self) -> None:
        """See to it that its row can hold one token more.

        Raises:
            DeviceMemoryError: If there is no memory for it; it is as it was.
        """
        most = len(self.request.tokens) + self.request.params.max_tokens
        self._runner.make_room(self.row, most)

    def accept(self, logits: torch.Tensor, began: float) -> None:
        """Take what the model gave for ``next_input``.

        Args:
            logits: ``[1, vocabulary]``.
            began: When the forward began, in seconds of ``time.perf_counter``.
        """
        self._fed += 1
        if self._fed == len(self._tokens):  # else they are known already
            self._accept(logits)
        self._intervals.append(
            Interval("decode", None, began, time.perf_counter(), tokens=1)
        )

    def suspend(self) -> None:
        """Lose the row; ``open`` and a prefill begin anew."""
        self._prefill = None
        self._fed = 0
        self.close()

    def _accept_first(self) -> None:
        self._accept(self._logits)
        self._first = time.perf_counter()

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
            documents=self._documents(),
            intervals=tuple(
                Interval(
                    one.lane, one.layer, one.start - sent, one.stop - sent, one.tokens
                )
                for one in self._intervals
            ),
        )

    def _documents(self) -> tuple[DocumentUse, ...]:
        places: dict[str, list[TokenRange]] = {}
        for span in self.request.spans:
            tokens = span.first_token, span.stop_token
            places.setdefault(span.document, []).append(tokens)
        return document_uses(places, self._computed)

    def close(self) -> None:
        """Give the row back; others may go on from it, if all went well."""
        if self._row is None:
            return
        if not (self.finished and self.request.remembered):
            self._row.tokens = []
        row, self._row = self._row, None
        self._runner.close_row(row)

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
