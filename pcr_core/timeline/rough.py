"""What a request's timing alone tells, where intervals were not recorded."""

from __future__ import annotations

from collections.abc import Sequence

from pcr_core.timeline.interval import Interval


def filled_in(
    intervals: Sequence[Interval],
    *,
    queue: float,
    load_wait: float,
    read_tokens: int,
    first_token: float,
    total: float,
) -> tuple[Interval, ...]:
    """``intervals``, and one for each part of the time of which they tell nothing.

    Args:
        intervals: What was recorded; may be empty.
        queue: Seconds until the engine took the request up.
        load_wait: Seconds behind that before it could begin.
        read_tokens: How many tokens' KV came from SSD; without any, that was no read.
        first_token: Seconds from submit to the first token.
        total: Seconds from submit to the end.
    """
    recorded = {interval.lane for interval in intervals}
    began = queue + load_wait
    work = [i.start for i in intervals if i.lane not in ("queue", "decode")]
    rough: list[Interval] = []
    if "queue" not in recorded:
        rough.append(Interval("queue", None, 0.0, queue))
    if read_tokens and "read" not in recorded:
        # Waiting between layers is not told apart: the wait before the first counts.
        rough.append(Interval("read", None, queue, min([began, *work]), read_tokens))
    if not work:
        rough.append(Interval("compute", None, began, first_token))
    if "decode" not in recorded:
        rough.append(Interval("decode", None, first_token, total))
    return (*intervals, *(i for i in rough if i.start < i.stop))
