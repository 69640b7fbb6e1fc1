"""One decode step of several requests; a failure is that of one. Engine thread only.

All rows go through one forward. If that fails, one of them may be to blame, or memory
may be short for all at once: then they run one by one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from pcr_core.errors import DeviceMemoryError
from pcr_core.model.generation import Generation
from pcr_core.model.runner import Runner


@dataclass(frozen=True, slots=True)
class Decoded:
    """What a step gave one request.

    Attributes:
        generation: Whose it is.
        began: When its forward began, in seconds of ``time.perf_counter``.
        outcome: Logits of ``generation.next_input``, ``[1, vocabulary]``, or what its
            forward raised.
    """

    generation: Generation
    began: float
    outcome: torch.Tensor | Exception

    def accept(self) -> None:
        """Hand the logits over.

        Raises:
            Exception: What the forward raised, or what choosing a token raises.
        """
        if isinstance(self.outcome, Exception):
            raise self.outcome
        self.generation.accept(self.outcome, self.began)


def decoded(runner: Runner, generations: Sequence[Generation]) -> Iterator[Decoded]:
    """Run one token of each; what one raises concerns it alone.

    Where they run one by one, the next runs when the one before has been dealt with:
    a row that failed may have been freed by then.
    """
    if len(generations) > 1:
        began = time.perf_counter()
        try:
            logits = _forward(runner, generations)
        except Exception:
            pass  # who is to blame turns out below
        else:
            for one, part in zip(generations, torch.split(logits, 1), strict=True):
                yield Decoded(one, began, part)
            return
    for one in generations:
        began = time.perf_counter()
        yield Decoded(one, began, _alone(runner, one))


def _alone(runner: Runner, generation: Generation) -> torch.Tensor | Exception:
    try:
        try:
            return _forward(runner, [generation])
        except DeviceMemoryError:
            if not runner.give_up():
                raise
            return _forward(runner, [generation])
    except Exception as error:
        return error


def _forward(runner: Runner, generations: Sequence[Generation]) -> torch.Tensor:
    rows = [generation.row for generation in generations]
    return runner.decode(rows, [one.next_input for one in generations])
