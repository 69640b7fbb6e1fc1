"""How tokens are chosen: the sampling parameters of a request, checked."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from pcr_core.config import Integer, Real
from pcr_core.errors import RequestError


def _as_tuple(value: object) -> object:
    """One stop string is a list of one; nothing is the empty list."""
    if value is None:
        return ()
    if isinstance(value, (str, int)):
        return (value,)
    return value


StopStrings = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_as_tuple)
]
StopTokens = Annotated[
    tuple[Annotated[Integer, Field(ge=0)], ...], BeforeValidator(_as_tuple)
]
LogitBias = dict[Annotated[Integer, Field(ge=0)], Real]


class SamplingParams(BaseModel):
    """How tokens are chosen and when generation ends. Frozen.

    Attributes:
        max_tokens: Most tokens to generate, at least 1.
        min_tokens: End-of-sequence is impossible before this many tokens.
        temperature: 0, or less than 1e-5, is greedy.
        top_p, top_k, min_p: Usual truncations; ``1.0``, ``0`` and ``0.0`` are off.
        repetition_penalty: 1.0 is off; over prompt and output.
        presence_penalty, frequency_penalty: Subtracted from the logits of tokens
            generated before: once, and once per occurrence.
        seed: The same seed gives the same text. ``None`` draws one.
        stop: Texts that end generation; found across token borders, never returned.
        stop_token_ids: Tokens that end generation, beside the model's own.
        logprobs: Also return the log-probability of each chosen token.
        logit_bias: Added to the logits of these token ids; finite.
        n: Answers to generate, which share the prompt's prefill; see
            ``Result.answers``. Each has a seed of its own, derived from ``seed``.

    Raises:
        RequestError: For an unknown field or a bad value.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)

    max_tokens: Integer = Field(default=256, ge=1)
    min_tokens: Integer = Field(default=0, ge=0)
    temperature: Real = Field(default=0.0, ge=0.0)
    top_p: Real = Field(default=1.0, gt=0.0, le=1.0)
    top_k: Integer = Field(default=0, ge=0)
    min_p: Real = Field(default=0.0, ge=0.0, le=1.0)
    repetition_penalty: Real = Field(default=1.0, ge=0.01, le=100.0)
    presence_penalty: Real = Field(default=0.0, ge=-2.0, le=2.0)
    frequency_penalty: Real = Field(default=0.0, ge=-2.0, le=2.0)
    seed: Integer | None = None
    stop: StopStrings = ()
    stop_token_ids: StopTokens = ()
    logprobs: bool = False
    logit_bias: LogitBias = Field(default_factory=dict)
    n: Integer = Field(default=1, ge=1, le=64)

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise RequestError(_explain(error)) from None
        if self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}"
            )


def _explain(error: ValidationError) -> str:
    known = ", ".join(SamplingParams.model_fields)
    problems = []
    for item in error.errors():
        name = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            problems.append(f"unknown sampling parameter {name!r}; known are: {known}")
        else:
            problems.append(f"sampling parameter {name}: {item['msg']}")
    return "; ".join(problems)
