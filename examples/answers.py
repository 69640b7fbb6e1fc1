"""What questions gave and cost, and what that adds up to.

Plain values and functions: no model, no framework, no terminal.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Where the KV of a prompt came from, by the share that was reused.
HARDLY, NEARLY_ALL = 0.25, 0.9
GROUPS = (
    "hardly any (< 25 %)",
    "a part, most of it from DRAM",
    "a part, most of it from SSD",
    "nearly all (>= 90 %), most from DRAM",
    "nearly all (>= 90 %), most from SSD",
)


@dataclass(frozen=True)
class Answer:
    """What one question gave, and what it cost.

    Attributes:
        framework: ``"LlamaIndex"`` or ``"LangChain"``.
        question: As asked.
        text: The model's answer.
        prompt_tokens: Length of the prompt; the sum of the next three.
        dram: Prompt tokens whose KV came from DRAM.
        ssd: Prompt tokens whose KV came from SSD.
        computed: Prompt tokens that went through the model.
        ttft: Seconds from submit to the first token.
    """

    framework: str
    question: str
    text: str
    prompt_tokens: int
    dram: int
    ssd: int
    computed: int
    ttft: float


def group_of(answer: Answer) -> str:
    """Name the group an answer belongs to, one of ``GROUPS``."""
    share = (answer.dram + answer.ssd) / answer.prompt_tokens
    if share < HARDLY:
        return GROUPS[0]
    return GROUPS[1 + 2 * (share >= NEARLY_ALL) + (answer.ssd > answer.dram)]


def summarize(
    answers: Sequence[Answer], uncached: Mapping[str, Answer]
) -> list[dict[str, Any]]:
    """One record per group that occurs.

    Args:
        answers: All answers given with reuse.
        uncached: Question to the answer given to the same prompt without any reuse.

    Returns:
        Records with the group, the number of requests, medians of tokens and of TTFT
        (milliseconds) with and without reuse, and the median of the requests' own
        ratios, without over with. Only requests that have an uncached twin count.
    """
    records = []
    for group in GROUPS:
        pairs = [
            (a, uncached[a.question])
            for a in answers
            if group_of(a) == group and a.question in uncached
        ]
        if not pairs:
            continue
        ttft = [1000 * a.ttft for a, _ in pairs]
        records.append(
            {
                "reused": group,
                "requests": len(pairs),
                "prompt_tokens": statistics.median(a.prompt_tokens for a, _ in pairs),
                "computed_tokens": statistics.median(a.computed for a, _ in pairs),
                "ttft_ms": round(statistics.median(ttft), 1),
                "ttft_ms_mean": round(statistics.mean(ttft), 1),
                "ttft_ms_uncached": round(
                    statistics.median(1000 * twin.ttft for _, twin in pairs), 1
                ),
                "times_sooner": round(
                    statistics.median(twin.ttft / a.ttft for a, twin in pairs), 2
                ),
            }
        )
    return records


def differing(
    answers: Iterable[Answer], uncached: Mapping[str, Answer]
) -> list[Answer]:
    """Answers that are not, to the letter, what the model says without a cache."""
    return [
        a
        for a in answers
        if a.question in uncached and a.text != uncached[a.question].text
    ]
