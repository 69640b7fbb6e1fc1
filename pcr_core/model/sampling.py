"""Logits -> token, with transformers' own logits processors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pcr_core.errors import ModelError
from pcr_core.sampling_params import SamplingParams


class _Bias(LogitsProcessor):
    """Adds a constant to some tokens' logits."""

    def __init__(self, bias: dict[int, float]) -> None:
        self._ids = torch.tensor(list(bias), dtype=torch.long)
        self._values = torch.tensor(list(bias.values()))

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[:, self._ids] += self._values
        return scores


class _OutputPenalty(LogitsProcessor):
    """Presence and frequency penalty over generated tokens (OpenAI's definition).

    transformers has only the multiplicative repetition penalty.
    """

    def __init__(self, prompt_tokens: int, presence: float, frequency: float) -> None:
        self._prompt_tokens = prompt_tokens
        self._presence = presence
        self._frequency = frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        generated = input_ids[0, self._prompt_tokens :]
        counts = torch.bincount(generated, minlength=scores.shape[1]).to(scores.dtype)
        penalty = self._presence * (counts > 0) + self._frequency * counts
        return scores - penalty


_COLDEST = 1e-5
"""Below this temperature scores would overflow, and only the best has a chance."""


def _is_greedy(params: SamplingParams) -> bool:
    return params.temperature < _COLDEST


def processors(
    params: SamplingParams, prompt_tokens: int, end_ids: Sequence[int]
) -> LogitsProcessorList:
    """The processors these parameters ask for, in transformers' own order."""
    chain = LogitsProcessorList()
    if params.logit_bias:
        chain.append(_Bias(params.logit_bias))
    if params.repetition_penalty != 1.0:
        chain.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.presence_penalty or params.frequency_penalty:
        penalties = params.presence_penalty, params.frequency_penalty
        chain.append(_OutputPenalty(prompt_tokens, *penalties))
    if params.min_tokens and end_ids:
        chain.append(
            MinNewTokensLengthLogitsProcessor(
                prompt_tokens, params.min_tokens, list(end_ids)
            )
        )
    if _is_greedy(params):
        return chain
    chain.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        chain.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        chain.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        chain.append(MinPLogitsWarper(params.min_p))
    return chain


class Sampler:
    """Chooses one request's tokens. Holds its own random state."""

    def __init__(
        self, params: SamplingParams, prompt: Sequence[int], end_ids: Sequence[int]
    ) -> None:
        self._greedy = _is_greedy(params)
        self._logprobs: list[float] | None = [] if params.logprobs else None
        self._chain = processors(params, len(prompt), end_ids)
        self._history = list(prompt)
        self._random = torch.Generator()
        if params.seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(params.seed % 2**63)

    @property
    def logprobs(self) -> list[float] | None:
        """Natural log-probability of each token chosen so far, when asked for."""
        return self._logprobs

    def choose(self, logits: torch.Tensor) -> int:
        """The next token from ``[1, vocabulary]`` logits of any float dtype.

        Raises:
            ModelError: If a logit is not a number; nothing sensible could be chosen.
        """
        scores = logits.to(device="cpu", dtype=torch.float32)
        if bool(torch.isnan(scores).any()):
            raise ModelError(
                "the model produced NaN logits; try dtype='float32', and check the "
                "weights if that does not help"
            )
        raw = scores
        if self._chain:
            scores = self._chain(torch.LongTensor([self._history]), scores)
        if self._greedy:
            token = int(scores.argmax())
        else:
            chances = torch.softmax(scores, dim=-1)
            token = int(torch.multinomial(chances, 1, generator=self._random))
        if self._logprobs is not None:
            self._logprobs.append(float(torch.log_softmax(raw, dim=-1)[0, token]))
        self._history.append(token)
        return token


def end_token_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end generation: the generation config's, else the tokenizer's."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    if configured is None:
        configured = tokenizer.eos_token_id
    if configured is None:
        return ()
    return (configured,) if isinstance(configured, int) else tuple(configured)
