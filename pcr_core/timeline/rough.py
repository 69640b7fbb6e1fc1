"""What a request's timing alone tells, where intervals were not recorded."""

from __future__ import annotations

from collections.abc import Sequence

from pcr_core.timeline.interval import Interval, Lane


def filled_in(
    intervals: Sequence[Interval],
    *,
    queue: float,
    load_wait: float,
    first_token: float,
    total: float,
) -> tuple[Interval, ...]:
    """``intervals``, and one for each part of the time of which they tell nothing.

    Args:
        intervals: What was recorded; may be empty.
        queue: Seconds until the engine took the request up.
        load_wait: Seconds behind that in which it waited for reads.
        first_token: Seconds from submit to the first token.
        total: Seconds from submit to the end.
    """
    recorded = {interval.lane for interval in intervals}
    began = queue + load_wait
    rough: list[tuple[Lane, float, float]] = []
    if "queue" not in recorded:
        rough.append(("queue", 0.0, queue))
    if not recorded - {"queue", "decode"}:
        rough.append(("read", queue, began))
        rough.append(("compute", began, first_token))
    if "decode" not in recorded:
        rough.append(("decode", first_token, total))
    more = [Interval(lane, None, start, stop) for lane, start, stop in rough]
    return (*intervals, *(i for i in more if i.start < i.stop))
