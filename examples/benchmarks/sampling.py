"""What choosing a token costs: the engine's sampler beside transformers' processors.

    python -m examples.benchmarks.sampling

Logits are noise as wide as the packaged model's, behind a history of 4,000 tokens. Both
take turns in every round; milliseconds per token of one row.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from examples.benchmarks.common import Spread, arguments, ratios, timed
from examples.benchmarks.report import Run
from pcr_core import SamplingParams
from pcr_core.model.sampling import Sampler

VOCABULARY, HISTORY, CALLS = 49_152, 4_000, 20
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.7},
    "top-k": {"temperature": 0.7, "top_k": 40},
    "top-p": {"temperature": 0.7, "top_p": 0.9},
    "all and repetition penalty": {
        "temperature": 0.7,
        "top_k": 40,
        "top_p": 0.9,
        "repetition_penalty": 1.1,
    },
}


def ours(case: dict[str, Any], history: list[int], rows: torch.Tensor) -> Any:
    sampler = Sampler(SamplingParams(seed=0, **case), history, [2])
    return lambda index: sampler.choose(rows[index : index + 1])


def theirs(case: dict[str, Any], history: list[int], rows: torch.Tensor) -> Any:
    """As an engine would have to call them: the history grows by a token a step."""
    chain = LogitsProcessorList()
    if "repetition_penalty" in case:
        chain.append(RepetitionPenaltyLogitsProcessor(case["repetition_penalty"]))
    if case["temperature"]:
        chain.append(TemperatureLogitsWarper(case["temperature"]))
    if "top_k" in case:
        chain.append(TopKLogitsWarper(case["top_k"]))
    if "top_p" in case:
        chain.append(TopPLogitsWarper(case["top_p"]))
    random, seen = torch.Generator().manual_seed(0), list(history)

    def choose(index: int) -> None:
        tokens = torch.tensor([seen]) if "repetition_penalty" in case else None
        scores = chain(tokens, rows[index : index + 1])
        if case["temperature"]:
            chances = torch.softmax(scores, dim=-1)
            token = int(torch.multinomial(chances, 1, generator=random))
        else:
            token = int(scores.argmax())
        seen.append(token)

    return choose


def seconds(choose: Callable[[int], Any]) -> float:
    """Median of some calls."""
    return statistics.median(timed(lambda i=i: choose(i)) for i in range(CALLS))


def main() -> None:
    with Run("sampling", arguments(__doc__.splitlines()[0]).parse_args()) as run:
        measure(run)


def measure(run: Run) -> None:
    """Both sides in turn, in every round."""
    noise = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(CALLS, VOCABULARY, generator=noise)
    history = torch.randint(0, VOCABULARY, (HISTORY,), generator=noise).tolist()
    rows = []
    for name, case in CASES.items():
        sides = {"ours": ours, "transformers": theirs}
        choosers = {who: make(case, history, logits) for who, make in sides.items()}
        sample: dict[str, list[float]] = {who: [] for who in choosers}
        for index in range(-1, run.options.rounds):  # the first round warms up
            for who, choose in choosers.items():
                taken = seconds(choose)
                if index >= 0:
                    sample[who].append(taken)
        run.figures[name] = sample
        figures = (1e3 * Spread.of(sample[who]).median for who in sides)
        ratio = ratios(sample["ours"], sample["transformers"]).ratio()
        rows.append([name, *(f"{figure:.2f}" for figure in figures), ratio])
    run.table(("sampling", "ours, ms", "transformers, ms", "ratio"), rows)


if __name__ == "__main__":
    main()
