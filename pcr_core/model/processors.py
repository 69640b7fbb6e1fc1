"""What changes a row of logits before a token is chosen, a step at a time.

transformers' processors are functions of the whole sequence, which they are given as a
tensor at every step. Each of these keeps what it needs of the sequence instead, so that
a step costs the same behind a long prompt as behind a short one. In NumPy, as ``draw``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Scores = npt.NDArray[np.float32]
"""``[vocabulary]``, fp32."""

_IMPOSSIBLE = -np.inf


class Processor(Protocol):
    """Changes scores; is told of every token that was chosen."""

    def __call__(self, scores: Scores) -> None:
        """Change ``scores`` in place."""
        ...

    def accept(self, token: int) -> None:
        """Take note of the token that was chosen."""
        ...


class Bias:
    """Adds a constant to some tokens' logits."""

    def __init__(self, bias: Mapping[int, float]) -> None:
        self._ids = np.array(list(bias), dtype=np.int64)
        self._values = np.array(list(bias.values()), dtype=np.float32)

    def __call__(self, scores: Scores) -> None:
        """See ``Processor``."""
        scores[self._ids] += self._values

    def accept(self, token: int) -> None:
        """See ``Processor``."""


class RepetitionPenalty:
    """Divides or multiplies the score of every token that occurs, however often.

    The definition of Keskar et al. (2019), as transformers has it.
    """

    def __init__(self, penalty: float, prompt: Sequence[int]) -> None:
        self._penalty = np.float32(penalty)
        self._seen = set(prompt)
        self._ids = np.array(sorted(self._seen), dtype=np.int64)

    def __call__(self, scores: Scores) -> None:
        """See ``Processor``."""
        before = scores[self._ids]
        scores[self._ids] = np.where(
            before < 0, before * self._penalty, before / self._penalty
        )

    def accept(self, token: int) -> None:
        """See ``Processor``."""
        if token not in self._seen:
            self._seen.add(token)
            self._ids = np.append(self._ids, token)


class OutputPenalty:
    """Presence and frequency penalty over generated tokens (OpenAI's definition).

    transformers has only the multiplicative repetition penalty.
    """

    def __init__(self, presence: float, frequency: float) -> None:
        self._presence = presence
        self._frequency = frequency
        self._present: set[int] = set()
        self._penalties: npt.NDArray[Any] | None = None  # of the scores' shape

    def __call__(self, scores: Scores) -> None:
        """See ``Processor``."""
        if self._penalties is None:
            self._penalties = np.zeros_like(scores)
        scores -= self._penalties

    def accept(self, token: int) -> None:
        """See ``Processor``."""
        assert self._penalties is not None
        new = token not in self._present
        self._present.add(token)
        self._penalties[token] += self._frequency + self._presence * new


class MinTokens:
    """Makes the tokens that end generation impossible before so many tokens.

    Where nothing else is possible, as at the end of a constraint, they stay possible.
    """

    def __init__(self, tokens: int, ends: Iterable[int]) -> None:
        self._left = tokens
        self._ends = np.array(sorted(set(ends)), dtype=np.int64)

    def __call__(self, scores: Scores) -> None:
        """See ``Processor``."""
        if self._left <= 0:
            return
        before = scores[self._ends]
        scores[self._ends] = _IMPOSSIBLE
        if scores.max() == _IMPOSSIBLE:
            scores[self._ends] = before

    def accept(self, token: int) -> None:
        """See ``Processor``."""
        self._left -= 1
