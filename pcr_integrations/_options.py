"""Options of one call: checked, merged over the wrapper's own, never dropped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pcr_core import RequestError, SamplingParams
from pcr_integrations._tools import ToolUse, tool_use

ALIASES: Mapping[str, str] = {
    "model_name": "model",
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "stop_sequences": "stop",
}
_BESIDE_SAMPLING = (
    "model",
    "timeout",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
)


@dataclass(frozen=True, slots=True)
class CallOptions:
    """What one call asks for.

    Attributes:
        params: Sampling parameters, the wrapper's own underneath the call's.
        tools: Tools the model may call, or ``None``.
        model: Another model than the wrapper's, or ``None``.
        timeout: Seconds to wait for the engine, or ``None`` for as long as it takes.
        response_format: ``{"type": "json_object"}`` or ``{"type": "json_schema",
            "json_schema": {...}}``, or ``None``.
    """

    params: SamplingParams
    tools: ToolUse | None = None
    model: str | None = None
    timeout: float | None = None
    response_format: Mapping[str, Any] | None = None


def read_options(
    defaults: Mapping[str, Any],
    options: Mapping[str, Any],
    *,
    ignored: frozenset[str] = frozenset(),
) -> CallOptions:
    """Merge the options of a call over the wrapper's defaults.

    Args:
        defaults: The wrapper's ``SamplingParams`` fields and ``timeout``.
        options: Keyword arguments of the call; ``None`` means "as the wrapper has
            it". A stop list given here replaces the wrapper's.
        ignored: Keywords that the framework passes for its own purposes.

    Raises:
        RequestError: For an unknown option or a bad value.
    """
    given = _rename({k: v for k, v in options.items() if k not in ignored})
    merged = {**defaults, **given}
    beside = {name: merged.pop(name, None) for name in _BESIDE_SAMPLING}
    unknown = [name for name in merged if name not in SamplingParams.model_fields]
    if unknown:
        known = ", ".join((*SamplingParams.model_fields, *_BESIDE_SAMPLING, *ALIASES))
        raise RequestError(
            f"unknown call option {', '.join(map(repr, unknown))}; known are: {known}"
        )
    parallel = beside["parallel_tool_calls"]
    return CallOptions(
        params=_one_answer(SamplingParams(**merged)),
        tools=tool_use(
            beside["tools"],
            choice=beside["tool_choice"],
            parallel=parallel is None or bool(parallel),
        ),
        model=beside["model"],
        timeout=_seconds(beside["timeout"]),
        response_format=_checked_format(beside["response_format"]),
    )


def _one_answer(params: SamplingParams) -> SamplingParams:
    """Return the parameters, if they ask for one answer.

    Raises:
        RequestError: If they ask for several: the frameworks' calls return one.
    """
    if params.n > 1:
        raise RequestError(
            f"a call returns one answer, but n={params.n}; several come from "
            "engine.generate(prompt, SamplingParams(n=...)).answers"
        )
    return params


def _rename(options: Mapping[str, Any]) -> dict[str, Any]:
    """Apply the aliases and leave out what is ``None``."""
    renamed: dict[str, Any] = {}
    for given, value in options.items():
        name = ALIASES.get(given, given)
        if value is None and (name in _BESIDE_SAMPLING or _known(name)):
            continue
        if name in renamed and renamed[name] != value:
            raise RequestError(
                f"{name} was given twice under different names, with different values"
            )
        renamed[name] = value
    return renamed


def _known(name: str) -> bool:
    return name in SamplingParams.model_fields


def _seconds(timeout: object) -> float | None:
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise RequestError(f"timeout is a number of seconds, not {timeout!r}")
    if timeout <= 0:
        raise RequestError(f"timeout must be above 0 seconds, not {timeout!r}")
    return float(timeout)


def _checked_format(form: object) -> Mapping[str, Any] | None:
    if form is None:
        return None
    kind = form.get("type") if isinstance(form, Mapping) else None
    if isinstance(form, Mapping) and kind in ("text", "json_object"):
        return form if kind == "json_object" else None
    if isinstance(form, Mapping) and kind == "json_schema":
        schema = form.get("json_schema")
        if isinstance(schema, Mapping):
            return form
    raise RequestError(
        f"response_format is {{'type': 'json_object'}} or {{'type': 'json_schema', "
        f"'json_schema': {{...}}}}, not {form!r}"
    )
