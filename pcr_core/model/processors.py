"""What changes a row of logits before a token is chosen, a step at a time.

transformers' processors are functions of the whole sequence, which they are given as a
tensor at every step. Each of these keeps what it needs of the sequence instead, so that
a step costs the same behind a long prompt as behind a short one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch
from transformers import RepetitionPenaltyLogitsProcessor

_IMPOSSIBLE = float("-inf")


class Processor(Protocol):
    """Changes scores; is told of every token that was chosen."""

    def __call__(self, scores: torch.Tensor) -> torch.Tensor:
        """Return new ``[1, vocabulary]`` scores, fp32; the given ones stay as is."""
        ...

    def accept(self, token: int) -> None:
        """Take note of the token that was chosen."""
        ...


class Bias:
    """Adds a constant to some tokens' logits."""

    def __init__(self, bias: Mapping[int, float]) -> None:
        self._ids = torch.tensor(list(bias), dtype=torch.long)
        self._values = torch.tensor(list(bias.values()), dtype=torch.float32)

    def __call__(self, scores: torch.Tensor) -> torch.Tensor:
        """See ``Processor``."""
        return scores.index_add(1, self._ids, self._values[None])

    def accept(self, token: int) -> None:
        """See ``Processor``."""


class RepetitionPenalty:
    """transformers' repetition penalty, given each token of the sequence once.

    It divides or multiplies the score of every token that occurs, however often.
    """

    def __init__(self, penalty: float, prompt: Sequence[int]) -> None:
        self._apply = RepetitionPenaltyLogitsProcessor(penalty)
        self._seen = set(prompt)
        self._ids = torch.tensor([sorted(self._seen)], dtype=torch.long)

    def __call__(self, scores: torch.Tensor) -> torch.Tensor:
        """See ``Processor``."""
        changed: torch.Tensor = self._apply(self._ids, scores)
        return changed

    def accept(self, token: int) -> None:
        """See ``Processor``."""
        if token not in self._seen:
            self._seen.add(token)
            self._ids = torch.cat([self._ids, torch.tensor([[token]])], dim=1)


class OutputPenalty:
    """Presence and frequency penalty over generated tokens (OpenAI's definition).

    transformers has only the multiplicative repetition penalty.
    """

    def __init__(self, presence: float, frequency: float) -> None:
        self._presence = presence
        self._frequency = frequency
        self._present: set[int] = set()
        self._penalties: torch.Tensor | None = None  # of the scores' shape

    def __call__(self, scores: torch.Tensor) -> torch.Tensor:
        """See ``Processor``."""
        if self._penalties is None:
            self._penalties = torch.zeros_like(scores)
        return scores - self._penalties

    def accept(self, token: int) -> None:
        """See ``Processor``."""
        assert self._penalties is not None
        new = token not in self._present
        self._present.add(token)
        self._penalties[0, token] += self._frequency + self._presence * new


class MinTokens:
    """Makes the tokens that end generation impossible before so many tokens.

    Where nothing else is possible, as at the end of a constraint, they stay possible.
    """

    def __init__(self, tokens: int, ends: Iterable[int]) -> None:
        self._left = tokens
        self._ends = torch.tensor(sorted(set(ends)), dtype=torch.long)

    def __call__(self, scores: torch.Tensor) -> torch.Tensor:
        """See ``Processor``."""
        if self._left <= 0:
            return scores
        going_on = scores.index_fill(1, self._ends, _IMPOSSIBLE)
        return scores if float(going_on.max()) == _IMPOSSIBLE else going_on

    def accept(self, token: int) -> None:
        """See ``Processor``."""
        self._left -= 1
