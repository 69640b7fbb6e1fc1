"""Several answers to one prompt: requests that share its prefill, seen as one.

Each answer is a request of its own with a seed of its own; they run like any others.
What the caller holds is one ``Completion``: it streams the first answer and ends when
all have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b

from pcr_core.request import Completion, Request
from pcr_core.result import Result


class _Answers:
    """Gathers the results of one prompt. Engine thread only."""

    def __init__(self, whole: Completion, count: int) -> None:
        self.whole = whole
        self._results: list[Result | None] = [None] * count

    def finished(self, index: int, result: Result) -> None:
        """Note one of them; the last ends the whole."""
        self._results[index] = result
        found = [one for one in self._results if one is not None]
        if len(found) == len(self._results):
            self.whole.finish(replace(found[0], others=tuple(found[1:])))

    def failed(self, error: BaseException) -> None:
        """One has failed, so the whole has: nobody needs the others."""
        self.whole.fail(error)
        self.whole.cancel()


class _Answer(Completion):
    """One of several answers. Cancelled with the whole."""

    def __init__(self, answers: _Answers, index: int) -> None:
        super().__init__()
        self._answers = answers
        self._index = index

    @property
    def cancelled(self) -> bool:
        """True once the whole was cancelled."""
        return self._answers.whole.cancelled

    def emit(self, text: str) -> None:
        """Append generated text; the caller sees the first answer's."""
        super().emit(text)
        if self._index == 0:
            self._answers.whole.emit(text)

    def finish(self, result: Result) -> None:
        """End with a result."""
        super().finish(result)
        self._answers.finished(self._index, result)

    def fail(self, error: BaseException) -> None:
        """End with an error."""
        super().fail(error)
        self._answers.failed(error)


def one_each(request: Request, copied: Callable[[Request], Request]) -> list[Request]:
    """Turn a request for ``params.n`` answers into as many for one.

    Args:
        request: Its completion is what the caller holds.
        copied: Copies a request.

    Returns:
        The request itself, if it asks for one answer. Else one for each answer, the
        first with the seed that was given; the others' are derived from it.
    """
    count = request.params.n
    if count == 1:
        return [request]
    answers, group = _Answers(request.completion, count), object()
    parts = []
    for index in range(count):
        part = copied(request)
        seed = derived_seed(request.params.seed, index)
        part.params = request.params.model_copy(update={"n": 1, "seed": seed})
        part.completion, part.group = _Answer(answers, index), group
        parts.append(part)
    return parts


def derived_seed(seed: int | None, index: int) -> int | None:
    """The seed of the answer ``index`` of a request with this seed."""
    if seed is None or index == 0:
        return seed
    digest = blake2b(f"answer {index} of seed {seed}".encode(), digest_size=7)
    return int.from_bytes(digest.digest(), "big")
