"""Contenders side by side on one trace, for several budgets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pcr_core.config import parse_bytes
from pcr_core.errors import ConfigError
from pcr_core.simulator.optimum import infinite_reuse
from pcr_core.simulator.replay import Contender, Outcome, replay
from pcr_core.trace import Trace


@dataclass(frozen=True, slots=True)
class Budget:
    """Size of the simulated tier.

    Attributes:
        label: As it was asked for.
        chunks: Chunks that fit.
    """

    label: str
    chunks: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """What all contenders made of one trace.

    Attributes:
        trace: The trace.
        rate: Tokens per second that the server computes.
        reuse: Share of the prompt tokens that a cache without a limit would serve.
        budgets: The columns.
        contenders: The rows.
        outcomes: One row per contender, one column per budget.
    """

    trace: Trace
    rate: float
    reuse: float
    budgets: tuple[Budget, ...]
    contenders: tuple[Contender, ...]
    outcomes: tuple[tuple[Outcome, ...], ...]

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON; rates and shares from 0 to 1."""
        rows = zip(self.contenders, self.outcomes, strict=True)
        return {
            "trace": self.trace.name,
            "requests": len(self.trace.requests),
            "chunk_tokens": self.trace.chunk_tokens,
            "mean_tokens": self.trace.mean_tokens,
            "mean_chunks": self.trace.mean_chunks,
            "tokens_per_second": self.rate,
            "infinite_reuse": self.reuse,
            "outcomes": [
                {
                    "policy": contender.label,
                    "budget": budget.label,
                    **asdict(outcome),
                    "hit_rate": outcome.hit_rate,
                }
                for contender, row in rows
                for budget, outcome in zip(self.budgets, row, strict=True)
            ],
        }


def parse_budget(text: str, trace: Trace) -> Budget:
    """Turn ``"25"`` (mean requests) or ``"2GiB"`` into a budget.

    Raises:
        ConfigError: If it is neither, holds no chunk, or is in bytes while the trace
            does not say how many a chunk has.
    """
    requests = _number(text)
    if requests is not None:
        label, chunks = f"{text} requests", requests * trace.mean_chunks
    else:
        label, chunks = text, _chunks_of(text, trace)
    if not 1 <= chunks < 1e9:
        raise ConfigError(
            f"a budget of {label} is {chunks:.3g} chunks of this trace, whose requests "
            f"have {trace.mean_chunks:.1f} on average; it must hold at least one"
        )
    return Budget(label, round(chunks))


def compare(
    trace: Trace,
    contenders: Sequence[Contender],
    budgets: Sequence[Budget],
    rate: float,
    *,
    after_each: Callable[[], None] = lambda: None,
) -> Comparison:
    """Replay the trace once per contender and budget.

    Args:
        trace: The requests.
        contenders: The rows.
        budgets: The columns.
        rate: Prompt tokens per second that the server computes.
        after_each: Called after each request of each replay, to show progress.
    """
    outcomes = tuple(
        tuple(
            replay(trace, contender, budget.chunks, rate, after_each=after_each)
            for budget in budgets
        )
        for contender in contenders
    )
    reuse = infinite_reuse(trace)
    return Comparison(trace, rate, reuse, tuple(budgets), tuple(contenders), outcomes)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _chunks_of(text: str, trace: Trace) -> int:
    try:
        nbytes = parse_bytes(text)
    except ValueError:
        raise ConfigError(
            f"{text!r} is no budget; write a number of mean requests, such as 25, or a "
            "size, such as 2GiB"
        ) from None
    if trace.chunk_bytes == 0:
        raise ConfigError(
            f"{trace.name} does not say how many bytes a chunk has; give budgets as a "
            "number of mean requests, such as 25"
        )
    return nbytes // trace.chunk_bytes
