"""One speculative prefill: a request for each document, given up when it is wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

from pcr_core import CancelledError, PcrError, SamplingParams
from pcr_integrations._background import Post, Work
from pcr_integrations.documents._submit import submit_with
from pcr_integrations.speculation._ledger import Ledger
from pcr_integrations.speculation._plan import Plan

if TYPE_CHECKING:
    from pcr_core import Completion

Order = Sequence[Hashable]

_ONCE = SamplingParams(max_tokens=1)
_LAST = -1_000_000
"""Priority of what nobody waits for: behind whatever comes before it has begun."""


class Prefill:
    """Computes the documents of one order, one request each. Any thread.

    A forward cannot be interrupted, and a request that comes meanwhile waits for its
    end: with a request for each document it waits for one document at most. Finished
    chunks stay, whatever becomes of the rest.

    Args:
        order: Names of the documents.
        ledger: Counts.
        post: Where submitting is done.
    """

    def __init__(self, order: Order, ledger: Ledger, post: Post) -> None:
        self.order = order
        self._ledger, self._post = ledger, post
        self._lock = threading.Lock()
        self._running: tuple[int, Completion] | None = None
        self._keep = len(order)
        self._stopped = self._judged = False
        self._computed: list[tuple[int, int]] = []
        self._behind: Work | None = None

    def begin(self, plan: Plan) -> None:
        """Start with the first document, unless stopped already."""
        self._next(plan, 0)

    def give_up(self, order: Order) -> None:
        """Start nothing more; cancel what runs unless ``order`` begins with it."""
        with self._lock:
            self._stopped = True
            self._keep = _shared(self.order, order)
            if self._running is not None and self._running[0] >= self._keep:
                self._running[1].cancel()

    def judge(self, final: Order) -> None:
        """As ``give_up``, for the order at the end: what it does not need is waste."""
        self.give_up(final)
        with self._lock:
            self._judged = True
            computed, self._computed = self._computed, []
        for step, tokens in computed:
            self._settle(step, tokens)

    def when_over(self, work: Work) -> bool:
        """Post ``work`` once the running request has ended; False if there is none."""
        with self._lock:
            if self._running is None:
                return False
            self._behind = work
            return True

    # --- on the worker's thread ---

    def _next(self, plan: Plan, step: int) -> None:
        if step == len(plan.steps) or self._is_stopped():
            return
        if not plan.engine.idle:
            self._ledger.add(yielded=1)
            return
        one = plan.steps[step]
        try:
            options: dict[str, Any] = {"tools": one.tools} if one.tools else {}
            completion, _ = submit_with(
                plan.engine,
                one.prompt,
                _ONCE,
                one.documents,
                priority=_LAST,
                **options,
            )
        except Exception as error:
            self._ledger.fail(error)
            return
        with self._lock:
            self._running = step, completion
        if self._is_stopped() and step >= self._keep:
            completion.cancel()
        completion.subscribe(self._watcher(plan, step, completion))

    def _watcher(
        self, plan: Plan, step: int, completion: Completion
    ) -> Callable[[], None]:
        told = threading.Event()

        def changed() -> None:
            if completion.done and not told.is_set():
                told.set()
                self._post(lambda: self._ended(plan, step, completion))

        return changed

    def _ended(self, plan: Plan, step: int, completion: Completion) -> None:
        tokens, failed = 0, False
        try:
            tokens = completion.result(0).usage.computed_tokens
        except CancelledError:
            failed = True  # what it has stored all the same is not reported
        except PcrError as error:
            failed = True
            self._ledger.fail(error)
        with self._lock:
            self._running = None
            behind, self._behind = self._behind, None
            judged = self._judged
            if not judged:
                self._computed.append((step, tokens))
        self._ledger.add(computed_tokens=tokens)
        if judged:
            self._settle(step, tokens)
        if behind is not None:
            self._post(behind)
        elif not failed:
            self._next(plan, step + 1)

    def _is_stopped(self) -> bool:
        return self._stopped

    def _settle(self, step: int, tokens: int) -> None:
        if step >= self._keep:
            self._ledger.add(wasted_tokens=tokens)


def _shared(one: Order, other: Order) -> int:
    """How many leading documents two orders share."""
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        count += 1
    return count
