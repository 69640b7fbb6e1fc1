"""Counters of speculation."""

from __future__ import annotations

from dataclasses import dataclass

from pcr_integrations._counters import Counters


@dataclass(frozen=True, slots=True)
class SpeculationStats(Counters):
    """What speculation has done so far. ``print`` shows a table.

    Attributes:
        searches: Searches in stages that were watched.
        hints: Orders of documents whose predicted prompt was prefetched.
        launched: Prefills started for an order that was not final yet.
        used: Those whose order was the final one.
        cancelled: Those given up because the order changed, or was another in the end.
            What they share with the final order from the first document on is used all
            the same.
        yielded: Those stopped between two documents because requests had come.
        late: Prefills not started because too little of the search was left.
        busy: Prefills not started because the engine had requests.
        unknown: Hints and prefills that were not possible because it is not known yet
            how a prompt begins.
        failed: Hints and prefills that failed: the engine was closed, its queue was
            full, the prompt was too long. ``last_error`` says how.
        computed_tokens: Tokens computed ahead of the request.
        wasted_tokens: Those of documents that the final order does not begin with.
        last_error: The last failure in words; empty if there was none.
    """

    searches: int = 0
    hints: int = 0
    launched: int = 0
    used: int = 0
    cancelled: int = 0
    yielded: int = 0
    late: int = 0
    busy: int = 0
    unknown: int = 0
    failed: int = 0
    computed_tokens: int = 0
    wasted_tokens: int = 0
    last_error: str = ""
