"""Token counts and times of a result as plain, JSON-ready records."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pcr_core import Engine, Result, Timing, Usage


def usage_record(usage: Usage) -> dict[str, Any]:
    """Return every count of ``usage``, in tokens, and their total."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
        "cached_by_tier": dict(usage.cached_by_tier),
        "computed_tokens": usage.computed_tokens,
    }


def timing_record(timing: Timing) -> dict[str, float]:
    """Return every time of ``timing``, in seconds."""
    return dataclasses.asdict(timing)


def logprob_records(engine: Engine, result: Result) -> list[dict[str, Any]] | None:
    """Return text, id and log-probability of each token, or ``None`` if not asked.

    With ``top_logprobs`` each record has the alternatives under that name.
    """
    if result.logprobs is None:
        return None

    def record(token: int, value: float) -> dict[str, Any]:
        text = engine.tokenizer.decode([token])
        return {"token": text, "token_id": token, "logprob": value}

    pairs = zip(result.token_ids, result.logprobs, strict=True)
    records = [record(*pair) for pair in pairs]
    for one, top in zip(records, result.top_logprobs or (), strict=False):
        one["top_logprobs"] = [record(*pair) for pair in top.items()]
    return records
