"""What a request gives back: text, token counts, times, and how they are shown."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from pcr_core.document_use import DocumentUse
from pcr_core.table import as_html, quote_html
from pcr_core.timeline.interval import Interval
from pcr_core.timeline.layout import duration
from pcr_core.timeline.rough import filled_in
from pcr_core.timeline.timeline import Timeline

FinishReason = Literal["stop", "length"]

_END = {"stop": "at its end", "length": "cut at max_tokens"}
_TIERS = (("device", "device"), ("dram", "DRAM"), ("ssd", "SSD"))


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request.

    Attributes:
        prompt_tokens: Length of the prompt.
        completion_tokens: Tokens generated, the final stop token included.
        cached_by_tier: Prompt tokens whose KV was reused, by the tier it was found in:
            ``"device"`` (an earlier request had left it where the model computes),
            ``"dram"``, ``"ssd"``. What was read ahead for this request, while it waited
            or after a hint, was found on SSD. With ``exact=False`` these need not be
            whole chunks.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_by_tier: dict[str, int]

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens whose KV was reused, from any tier."""
        return sum(self.cached_by_tier.values())

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that went through the model."""
        return self.prompt_tokens - self.cached_tokens


@dataclass(frozen=True, slots=True)
class Timing:
    """Where the time of one request went, in seconds.

    Attributes:
        queue: From submit until the engine took it up.
        load_wait: Waiting for SSD reads that the forward pass could not start without.
        prefill: From then to the first token's logits.
        ttft: From submit to the first token.
        decode: From the first token to the last.
        total: From submit to the end.
    """

    queue: float = 0.0
    load_wait: float = 0.0
    prefill: float = 0.0
    ttft: float = 0.0
    decode: float = 0.0
    total: float = 0.0


@dataclass(frozen=True, slots=True)
class Result:
    """What a request gave. A notebook shows the text, token counts and times.

    Attributes:
        text: Generated text without stop string and special tokens.
        token_ids: Generated tokens, a final end-of-sequence token included.
        logprobs: Natural log-probability of each of ``token_ids`` under the model's
            unmodified distribution, or ``None`` when not asked for.
        finish_reason: ``"stop"`` or ``"length"``.
        usage: Token counts.
        timing: Seconds.
        intervals: What was done when, layer by layer; ``timeline()`` shows them.
        top_logprobs: For each of ``token_ids`` the ``SamplingParams.top_logprobs`` most
            likely tokens, likeliest first, with their log-probabilities under the same
            distribution; or ``None`` when not asked for. The token chosen need not be
            among them.
        documents: How much of each document named with the request was cached, in the
            order in which they stand in the prompt.
        others: With ``SamplingParams(n=...)``, the results of the other answers.
    """

    text: str
    token_ids: list[int]
    logprobs: list[float] | None
    finish_reason: FinishReason
    usage: Usage
    timing: Timing
    intervals: tuple[Interval, ...] = field(default=(), repr=False)
    top_logprobs: list[dict[int, float]] | None = field(default=None, repr=False)
    documents: tuple[DocumentUse, ...] = field(default=(), repr=False)
    others: tuple[Result, ...] = field(default=(), repr=False)

    @property
    def answers(self) -> tuple[Result, ...]:
        """All answers to the prompt: this one and the others."""
        return (replace(self, others=()), *self.others) if self.others else (self,)

    def _repr_html_(self) -> str:
        texts = "".join(quote_html(answer.text) for answer in self.answers)
        return texts + as_html(self.rows())

    def rows(self) -> list[tuple[str, str]]:
        """Name and value of each line of the table beside the text."""
        usage, timing = self.usage, self.timing
        share = usage.cached_tokens / max(1, usage.prompt_tokens)
        tiers = (f"{usage.cached_by_tier.get(key, 0)} {name}" for key, name in _TIERS)
        return [
            ("answer", f"{usage.completion_tokens} tokens, {_END[self.finish_reason]}"),
            (
                "prompt",
                f"{usage.prompt_tokens} tokens, {usage.computed_tokens} computed",
            ),
            ("reused", f"{usage.cached_tokens} ({share:.0%}): {', '.join(tiers)}"),
            ("first token", f"{duration(timing.ttft)} after submit"),
            (
                "in all",
                f"{duration(timing.total)}, {duration(timing.queue)} in the queue",
            ),
        ]

    def timeline(self) -> Timeline:
        """Where the time went: figures, a drawing, a trace.

        Of what was not recorded layer by layer, it has what ``timing`` tells.
        """
        timing = self.timing
        return Timeline(
            filled_in(
                self.intervals,
                queue=timing.queue,
                load_wait=timing.load_wait,
                read_tokens=self.usage.cached_by_tier.get("ssd", 0),
                first_token=timing.ttft,
                total=timing.total,
            ),
            prompt_tokens=self.usage.prompt_tokens,
            cached_tokens=self.usage.cached_tokens,
            first_token=timing.ttft or None,
        )
