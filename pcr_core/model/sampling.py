"""Logits -> token, for one request."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from pcr_core.errors import ModelError
from pcr_core.model.constraints import Constraint, Matcher
from pcr_core.model.draw import Warp, best_first, draw, log_total
from pcr_core.model.processors import (
    Bias,
    MinTokens,
    OutputPenalty,
    Processor,
    RepetitionPenalty,
    Scores,
)
from pcr_core.sampling_params import SamplingDefaults, SamplingParams

_COLDEST = 1e-5
"""Below this temperature scores would overflow, and only the best has a chance."""


def processors(
    params: SamplingParams,
    prompt: Sequence[int],
    end_ids: Sequence[int],
    matcher: Matcher | None = None,
) -> list[Processor]:
    """What these parameters ask for, in transformers' own order.

    Args:
        params: Sampling parameters; what is ``None`` is off.
        prompt: Its token ids.
        end_ids: Tokens that end a generation, beside ``params.stop_token_ids``.
        matcher: Follows the constraint, if there is one.
    """
    repetition = SamplingDefaults().under(params).repetition_penalty
    chain: list[Processor] = []
    if params.logit_bias:
        chain.append(Bias(params.logit_bias))
    if repetition != 1.0:
        chain.append(RepetitionPenalty(repetition, prompt))
    if params.presence_penalty or params.frequency_penalty:
        chain.append(OutputPenalty(params.presence_penalty, params.frequency_penalty))
    if matcher is not None:
        chain.append(matcher)
    ends = {*end_ids, *params.stop_token_ids}
    if params.min_tokens and ends:
        chain.append(MinTokens(params.min_tokens, ends))
    return chain


def warp(params: SamplingParams) -> Warp | None:
    """How tokens are drawn, or ``None`` if the best is taken."""
    full = SamplingDefaults().under(params)
    if full.temperature < _COLDEST:
        return None
    return Warp(full.temperature, full.top_p, full.top_k, full.min_p)


class Sampler:
    """Chooses one request's tokens. Holds its own random state.

    Args:
        params: Sampling parameters; what is ``None`` is off.
        prompt: Token ids of the prompt.
        end_ids: Tokens that end a generation.
        constraint: The compiled form of ``params.constraint``, or ``None``.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        end_ids: Sequence[int],
        constraint: Constraint | None = None,
    ) -> None:
        self._alternatives = params.top_logprobs
        asked = params.logprobs or self._alternatives > 0
        self._logprobs: list[float] | None = [] if asked else None
        self._top: list[dict[int, float]] | None = [] if self._alternatives else None
        self._matcher = constraint.start() if constraint is not None else None
        self._chain = processors(params, prompt, end_ids, self._matcher)
        self._warp = warp(params)
        self._random = torch.Generator()
        if params.seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(params.seed % 2**63)

    @property
    def logprobs(self) -> list[float] | None:
        """Natural log-probability of each token chosen so far, when asked for."""
        return self._logprobs

    @property
    def top_logprobs(self) -> list[dict[int, float]] | None:
        """The most likely tokens at each place, likeliest first, when asked for."""
        return self._top

    @property
    def complete(self) -> bool:
        """Whether the constraint leaves nothing to add; ``False`` without one."""
        return self._matcher is not None and self._matcher.complete

    def choose(self, logits: torch.Tensor) -> int:
        """The next token from ``[1, vocabulary]`` logits of any float dtype.

        Raises:
            ModelError: If a logit is NaN or infinite upwards, or no token is possible.
        """
        raw: Scores = logits[0].to(device="cpu", dtype=torch.float32).numpy()
        token = int(raw.argmax())  # of a NaN, if there is one
        if math.isnan(raw[token]) or raw[token] == math.inf:
            raise ModelError(
                "the model produced NaN or infinite logits; try dtype='float32', and "
                "check the weights if that does not help"
            )
        scores = raw.copy() if self._chain else raw
        for processor in self._chain:
            processor(scores)
        token = int(scores.argmax())
        if scores[token] == -math.inf:
            raise ModelError(
                "no token is possible: the model or the constraint excludes them all"
            )
        if self._warp is not None:
            token = draw(scores, self._warp, self._random)
        self._note(raw, token)
        for processor in self._chain:
            processor.accept(token)
        return token

    def _note(self, raw: Scores, token: int) -> None:
        """Keep the log-probabilities that were asked for."""
        if self._logprobs is None:
            return
        total = log_total(raw)
        self._logprobs.append(float(raw[token]) - total)
        if self._top is not None:
            top = best_first(raw, min(self._alternatives, raw.size)).tolist()
            self._top.append({one: float(raw[one]) - total for one in top})


def end_token_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end generation: the generation config's, else the tokenizer's."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    if configured is None:
        configured = tokenizer.eos_token_id
    if configured is None:
        return ()
    return (configured,) if isinstance(configured, int) else tuple(configured)
