"""What the chat model and the text model have in common."""

from __future__ import annotations

from typing import Any, Literal

from langchain_core.language_models import LangSmithParams
from pydantic import Field, SecretStr

from pcr_integrations._fields import PcrFields
from pcr_integrations.langchain._replies import PROVIDER

# Keywords that LangChain hands through to the model for its own tracing and routing.
FRAMEWORK_KEYWORDS = frozenset(
    {
        "config",
        "ls_structured_output_format",
        "run_id",
        "stream",
        "strict",
        "structured_output_format",
    }
)


class LangChainFields(PcrFields):
    """The engine's and sampling's fields, and what LangChain gives to every model."""

    max_retries: int | None = None
    """Accepted as a standard parameter; there is no network call to repeat."""

    api_key: SecretStr | None = Field(default=None, exclude=True, repr=False)
    """Accepted as a standard parameter; a local model needs no key."""

    streaming: bool | None = None
    """``True`` makes ``invoke`` stream too, ``False`` makes ``stream`` one piece."""

    @property
    def model_name(self) -> str:
        """Name of the model, as in ``response_metadata`` once the engine is given."""
        return self._model_label()

    def _trace_params(
        self,
        kind: Literal["chat", "llm"],
        stop: list[str] | None,
        options: dict[str, Any],
    ) -> LangSmithParams:
        """Return the standard tracing parameters, the call's over the wrapper's."""
        known = {k: v for k, v in options.items() if k not in FRAMEWORK_KEYWORDS}
        stop = stop or _as_list(options.get("stop_sequences")) or _as_list(self.stop)
        params = LangSmithParams(
            ls_provider=PROVIDER,
            ls_model_type=kind,
            ls_model_name=known.get("model") or self._model_label(),
            ls_temperature=_first(known.get("temperature"), self.temperature),
        )
        max_tokens = _first(known.get("max_tokens"), self.max_tokens)
        if max_tokens is not None:
            params["ls_max_tokens"] = max_tokens
        if stop:
            params["ls_stop"] = stop
        return params

    def get_token_ids(self, text: str) -> list[int]:
        """Tokenise with the model's tokenizer: no special tokens, no network."""
        custom = getattr(self, "custom_get_token_ids", None)
        if custom is not None:
            return list(custom(text))
        ids = self._open_engine().tokenizer.encode(text, add_special_tokens=False)
        return list(ids)


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _as_list(stop: list[str] | str | None) -> list[str]:
    return [stop] if isinstance(stop, str) else list(stop or ())
