"""How tokens are chosen: the sampling parameters of a request, checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from pcr_core.config import Integer, Real
from pcr_core.errors import RequestError

CONSTRAINTS = ("json_schema", "regex", "choices", "grammar")
"""Fields that say which texts are possible at all; at most one is given."""


def _as_tuple(value: object) -> object:
    """One stop string is a list of one; nothing is the empty list."""
    if value is None:
        return ()
    if isinstance(value, (str, int)):
        return (value,)
    return value


def _as_schema(value: object) -> object:
    """A Pydantic class stands for its schema, a string for the JSON in it."""
    if isinstance(value, type) and issubclass(value, BaseModel):
        return value.model_json_schema()
    if isinstance(value, str):
        value = json.loads(value)
    if isinstance(value, Mapping):
        return json.loads(json.dumps(dict(value), allow_nan=False))
    return value


def _checked_schema(value: object) -> object:
    try:
        return _as_schema(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {error}") from None


StopStrings = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_as_tuple)
]
StopTokens = Annotated[
    tuple[Annotated[Integer, Field(ge=0)], ...], BeforeValidator(_as_tuple)
]
LogitBias = dict[Annotated[Integer, Field(ge=0)], Real]
Schema = Annotated[dict[str, Any], BeforeValidator(_checked_schema)]
Choices = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)
]


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Values for the fields of ``SamplingParams`` that are ``None``.

    As they stand here, everything is off and decoding is greedy.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def under(self, params: SamplingParams) -> SamplingDefaults:
        """Return these values with those that ``params`` give put over them."""
        given = {name: getattr(params, name) for name in asdict(self)}
        return replace(self, **{k: v for k, v in given.items() if v is not None})


class SamplingParams(BaseModel):
    """How tokens are chosen and when generation ends. Frozen.

    ``temperature``, ``top_p``, ``top_k``, ``min_p`` and ``repetition_penalty`` are by
    default ``None``: what the model's own generation config says, or else off.
    ``engine.resolve(params)`` shows what they come to.

    Attributes:
        max_tokens: Most tokens to generate, at least 1.
        min_tokens: Tokens that end generation are impossible before this many. Stop
            strings are not affected.
        temperature: 0, or less than 1e-5, is greedy.
        top_p, top_k, min_p: Usual truncations; ``1.0``, ``0`` and ``0.0`` are off.
        repetition_penalty: 1.0 is off; over prompt and output.
        presence_penalty, frequency_penalty: Subtracted from the logits of tokens
            generated before: once, and once per occurrence.
        seed: The same seed gives the same text. ``None`` draws one.
        stop: Texts that end generation; found across token borders, never returned.
        stop_token_ids: Tokens that end generation, beside the model's own.
        logprobs: Also return the log-probability of each chosen token.
        top_logprobs: Also return this many of the most likely tokens at each place,
            with their log-probabilities; above 0 it includes ``logprobs``.
        logit_bias: Added to the logits of these token ids; finite.
        json_schema: The text is JSON of this schema: a mapping, JSON text, or a
            Pydantic class.
        regex: The whole text matches this regular expression (Rust's syntax).
        choices: The text is one of these.
        grammar: The text follows this grammar in llguidance's variant of Lark.
        n: Answers to generate, which share the prompt's prefill; see
            ``Result.answers``. Each has a seed of its own, derived from ``seed``.

    At most one of ``json_schema``, ``regex``, ``choices`` and ``grammar``; they need
    the extra ``structured``. Where ``max_tokens`` or a stop string ends the text, it
    may be cut short of what they promise.

    Raises:
        RequestError: For an unknown field or a bad value.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)

    max_tokens: Integer = Field(default=256, ge=1)
    min_tokens: Integer = Field(default=0, ge=0)
    temperature: Real | None = Field(default=None, ge=0.0)
    top_p: Real | None = Field(default=None, gt=0.0, le=1.0)
    top_k: Integer | None = Field(default=None, ge=0)
    min_p: Real | None = Field(default=None, ge=0.0, le=1.0)
    repetition_penalty: Real | None = Field(default=None, ge=0.01, le=100.0)
    presence_penalty: Real = Field(default=0.0, ge=-2.0, le=2.0)
    frequency_penalty: Real = Field(default=0.0, ge=-2.0, le=2.0)
    seed: Integer | None = None
    stop: StopStrings = ()
    stop_token_ids: StopTokens = ()
    logprobs: bool = False
    top_logprobs: Integer = Field(default=0, ge=0)
    logit_bias: LogitBias = Field(default_factory=dict)
    json_schema: Schema | None = None
    regex: Annotated[str, Field(min_length=1)] | None = None
    choices: Choices | None = None
    grammar: Annotated[str, Field(min_length=1)] | None = None
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
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) > 1:
            raise RequestError(
                f"{' and '.join(given)} were given together; a text can be held to one"
            )

    @property
    def constraint(self) -> tuple[str, Any] | None:
        """Name and value of the one constraint that is given, or ``None``."""
        for name in CONSTRAINTS:
            value = getattr(self, name)
            if value is not None:
                return name, value
        return None

    def resolved(self, defaults: SamplingDefaults) -> SamplingParams:
        """Fill in every field that is ``None`` and has a default."""
        return self.model_copy(update=asdict(defaults.under(self)))


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
