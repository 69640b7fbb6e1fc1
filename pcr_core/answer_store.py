"""Answers become prefixes: the next turn of a conversation begins with them.

KV that decode steps leave behind may differ by rounding from what a prefill computes,
and exact mode promises that it makes no difference whether something was cached. So
what a prompt and its answer fill of whole chunks is prefilled once more, when nothing
else is to be done; everything before the answer is read, not computed. In free mode the
row at rest holds all of it, and it is only copied. The row that this takes goes back to
rest with prompt and answer, so that the next turn goes on from there. Engine thread
only.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence

from pcr_core.errors import EngineClosedError
from pcr_core.model.generation import Generation
from pcr_core.model.runner import Runner
from pcr_core.prefilling import Prefilling
from pcr_core.request import Request
from pcr_core.sampling_params import SamplingParams
from pcr_core.tiers import TierManager

_log = logging.getLogger("pcr_core.engine")
_MOST_WAITING = 16


class AnswerStore:
    """Stores the chunks that answers complete, bit by bit.

    Args:
        runner: Runs the model.
        tiers: Where chunks go.
        generation: Makes a generation of a request.
        closing: Says whether all work is to end.
    """

    def __init__(
        self,
        runner: Runner,
        tiers: TierManager,
        generation: Callable[[Request], Generation],
        closing: Callable[[], bool],
    ) -> None:
        self._runner = runner
        self._tiers = tiers
        self._generation = generation
        self._closing = closing
        self._waiting: deque[Request] = deque(maxlen=_MOST_WAITING)
        self._current: Prefilling | None = None

    def add(self, request: Request, answer: Sequence[int]) -> None:
        """Note an answer, if it completes a chunk and may be remembered."""
        tokens = [*request.tokens, *answer]
        size = self._tiers.chunk_tokens
        known = len(request.tokens) // size
        if not request.remembered or len(tokens) // size == known:
            return
        if len(request.keys) < known:
            return  # a part of the prompt was forgotten
        self._waiting.append(
            Request(
                tokens,
                self._tiers.keys_of(tokens),
                SamplingParams(max_tokens=1),
                spans=request.spans,
                usable=self._runner.usable_chunks(len(tokens)),
                epoch=self._tiers.epoch,
            )
        )

    def waiting(self) -> list[Request]:
        """What is not stored yet; ``forget`` strikes out what must not be."""
        current = [] if self._current is None else [self._current.request]
        return [*current, *self._waiting]

    def advance(self, budget: int) -> bool:
        """Compute up to ``budget`` tokens; returns whether there was anything to do."""
        if self._current is None and not self._waiting:
            return False
        try:
            self._step(budget)
        except Exception as error:
            # Nobody waits for it, and nothing is lost but a later hit.
            self.close()
            if not isinstance(error, EngineClosedError):
                _log.warning("an answer was not stored: %s", error)
        return True

    def pause(self) -> None:
        """Give way to a request; what is under way goes on from its filled chunks."""
        if self._current is not None:
            request = self._current.request
            self.close()
            if len(self._waiting) < _MOST_WAITING:
                self._waiting.appendleft(request)

    def close(self) -> None:
        """End what is under way; chunks that are filled are kept."""
        if self._current is not None:
            current, self._current = self._current, None
            current.close()
            current.generation.close()

    def _step(self, budget: int) -> None:
        if self._current is None:
            request = self._waiting.popleft()
            if not request.remembered:
                return
            generation = self._generation(request)
            generation.open()
            try:
                self._current = Prefilling(
                    generation, self._tiers, self._checkpoint
                ).uncounted()
            except BaseException:
                generation.close()
                raise
        if self._current.advance(budget):
            self._current.finish()  # so that its row lies down with all that it holds
            self.close()

    def _checkpoint(self) -> None:
        if self._closing():
            raise EngineClosedError("the engine is closed")
