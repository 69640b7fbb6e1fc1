"""Fields that every wrapper has: the engine's, sampling's, and a timeout."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import AliasChoices, BaseModel, Field, ValidationError
from pydantic.fields import FieldInfo

from pcr_core import ConfigError, EngineConfig, SamplingParams
from pcr_integrations._engines import check_settings, engine_for
from pcr_integrations._options import CallOptions, read_options

if TYPE_CHECKING:
    from pcr_core import Engine

_MODEL_NAMES = AliasChoices("model", "model_name")
_MAX_TOKENS_NAMES = AliasChoices(
    "max_tokens", "max_new_tokens", "max_completion_tokens"
)
_STOP_NAMES = AliasChoices("stop", "stop_sequences")


class PcrFields(BaseModel):
    """Fields of ``EngineConfig`` and ``SamplingParams``; ``None`` is their default.

    A mixin for the frameworks' pydantic classes. Constructing one loads nothing; the
    engine is built, or found among those of this process, when it is first needed.
    """

    engine: Any = Field(default=None, exclude=True, repr=False)
    """An ``Engine`` to use; excludes ``EngineConfig`` fields."""

    model: str | None = Field(default=None, validation_alias=_MODEL_NAMES)
    cache_dir: str | Path | None = None
    dram_bytes: int | str | None = None
    ssd_bytes: int | str | None = None
    chunk_tokens: int | str | None = None
    exact: bool | None = None
    device: str | None = None
    dtype: str | None = None
    overlap: str | None = None
    cuda_graphs: str | None = None
    cpu_kernels: str | None = None
    resident_rows: int | None = None
    threads: int | None = None
    max_batch_size: int | None = None
    max_prefill_tokens: int | None = None
    row_bytes: int | str | None = None
    order: str | None = None
    max_overtakes: int | None = None
    store_answers: bool | None = None
    max_queue: int | None = None
    eviction: str | None = None
    lookahead_window: int | str | None = None
    prefetch: str | None = None
    prefetch_timeout: float | None = None
    write_policy: str | None = None
    namespace: str | None = None
    namespace_bytes: int | str | None = None
    trace: str | Path | None = None

    max_tokens: int | None = Field(default=None, validation_alias=_MAX_TOKENS_NAMES)
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: list[str] | str | None = Field(default=None, validation_alias=_STOP_NAMES)
    stop_token_ids: list[int] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    choices: list[str] | None = None
    grammar: str | None = None
    n: int | None = None

    timeout: float | None = Field(default=None, gt=0)
    """Seconds to wait for a whole answer, or for the next piece of a stream."""

    def __init__(self, **settings: Any) -> None:
        check_names(type(self).model_fields, settings)
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise ConfigError(_explain(error)) from None
        check_settings(self.engine, self._engine_settings())
        SamplingParams(**self._sampling_defaults())

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Any:
        """Copy the settings; the engine is one, whatever is copied around it."""
        memo = {} if memo is None else memo
        memo[id(self.engine)] = self.engine
        return super().__deepcopy__(memo)

    def _engine_settings(self) -> dict[str, Any]:
        return self._given(EngineConfig.model_fields)

    def _sampling_defaults(self) -> dict[str, Any]:
        return self._given(SamplingParams.model_fields)

    def _given(self, names: Mapping[str, Any]) -> dict[str, Any]:
        values = {name: getattr(self, name, None) for name in names}
        return {name: value for name, value in values.items() if value is not None}

    def _open_engine(self, model: str | None = None) -> Engine:
        """Return the engine; builds it on first use (seconds), so not on a loop."""
        settings = self._engine_settings()
        if model is not None and model != self._model_label():
            settings["model"] = model
        return engine_for(self.engine, settings)

    def _options(
        self, options: Mapping[str, Any], ignored: frozenset[str] = frozenset()
    ) -> CallOptions:
        defaults = {**self._sampling_defaults(), "timeout": self.timeout}
        return read_options(defaults, options, ignored=ignored)

    def _model_label(self) -> str:
        """Name the model without loading it."""
        if self.engine is not None:
            return str(self.engine.model_name)
        return self.model or "packaged-model"

    def _identity(self) -> dict[str, Any]:
        """Return everything that can change an answer, for traces and cache keys."""
        config = (
            EngineConfig(**self._engine_settings())
            if self.engine is None
            else self.engine.config
        )
        kept = config.model_dump(mode="json", include=_CHANGE_ANSWERS)
        sampling = SamplingParams(**self._sampling_defaults())
        # Nested: LangChain writes the call's own options, None included, at the top.
        return {
            **kept,
            "model": self._model_label(),
            "sampling": sampling.model_dump(mode="json"),
        }


# Budgets, folders and policies are left out: reuse does not change what is answered.
_CHANGE_ANSWERS = {"exact", "device", "dtype", "chunk_tokens", "cpu_kernels"}


def check_names(fields: Mapping[str, FieldInfo], settings: Mapping[str, Any]) -> None:
    """Refuse settings that no field takes, and a field set twice by two of its names.

    Raises:
        ConfigError: It names the setting, and the nearest one that exists.
    """
    owner: dict[str, str] = {}
    for name, info in fields.items():
        owner[name] = name
        for alias in _aliases(info):
            owner[alias] = name
    seen: dict[str, Any] = {}
    for given, value in settings.items():
        if given not in owner:
            near = difflib.get_close_matches(given, owner, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "check the spelling"
            raise ConfigError(f"there is no setting {given!r}; {hint}")
        name = owner[given]
        if value is not None and seen.setdefault(name, value) != value:
            raise ConfigError(
                f"{name} was given twice, as {seen[name]!r} and as {value!r} ({given})"
            )


def _aliases(info: FieldInfo) -> list[str]:
    alias = info.validation_alias
    if isinstance(alias, AliasChoices):
        return [choice for choice in alias.choices if isinstance(choice, str)]
    return [name for name in (alias, info.alias) if isinstance(name, str)]


def _explain(error: ValidationError) -> str:
    problems = []
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"][:1]) or "settings"
        problems.append(f"{where}: {item['msg'].removeprefix('Value error, ')}")
    return "; ".join(dict.fromkeys(problems))
