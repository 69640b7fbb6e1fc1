"""How much memory the systems of ``peers.py`` get, in tokens and bytes. No model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from examples.benchmarks.stream import Asked

TIMES = 4  # the working set, measured in memory budgets
ROUND = 32  # tokens: a block of vLLM, and more than an answer
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}  # of one number


@dataclass(frozen=True)
class Stretch:
    """Sizes of a stream, in tokens.

    Attributes:
        working_set: What a prefix cache without limit would hold at the end.
        budget: A quarter of it, but enough for one request.
        window: Room for the longest prompt and its answer.
    """

    working_set: int
    budget: int
    window: int


def stretch(stream: Sequence[Asked], tokens: int) -> Stretch:
    """Sizes for a stream, and for prompts of ``tokens`` tokens besides."""
    distinct = sum(len(asked.prompt) - asked.reusable for asked in stream)
    longest = max(tokens, *(len(asked.prompt) for asked in stream))
    window = (longest // ROUND + 2) * ROUND
    return Stretch(distinct, max(distinct // TIMES, window), window)


def kv_bytes(config: Any, dtype: str) -> int:
    """Bytes of one token's keys and values.

    Args:
        config: Of a decoder of transformers, with full attention in every layer.
        dtype: Of keys and values.
    """
    heads = config.num_key_value_heads
    width = getattr(config, "head_dim", None)
    width = width or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * width * BYTES[dtype])


def popular(stream: Sequence[Asked], count: int) -> list[Asked]:
    """The last request for each of the documents asked for most, the most first."""
    last = {tuple(asked.prompt[: asked.prefix]): asked for asked in stream}
    times = Counter(tuple(asked.prompt[: asked.prefix]) for asked in stream)
    return [last[prefix] for prefix, _ in times.most_common(count)]
