"""In which order documents go into a prompt. Pure functions."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

Order = Literal["retrieval", "stable", "cache"]
Permutation = tuple[int, ...]

_MOST_KNOWN = 3
"""Earlier sequences of documents that are tried."""


def arrange(
    wish: Callable[[int], Any], scores: Sequence[float | None], tolerance: float | None
) -> Permutation:
    """Sort documents by a wish, within a tolerance of their scores.

    Args:
        wish: Sort key of a document, by its index.
        scores: Scores of the documents, the higher the better.
        tolerance: No document is placed in front of one whose score is higher by more
            than this. ``None`` leaves the scores out of account.

    Returns:
        Indices in their new order; the old order if a tolerance is given and a score
        is missing.
    """
    if tolerance is None:
        return tuple(sorted(range(len(scores)), key=wish))
    known = [score for score in scores if score is not None]
    if len(known) < len(scores):
        return tuple(range(len(scores)))
    left, order = list(range(len(known))), []
    while left:
        best = max(known[index] for index in left)
        order.append(min((i for i in left if best - known[i] <= tolerance), key=wish))
        left.remove(order[-1])
    return tuple(order)


def by_text(texts: Sequence[str]) -> Callable[[int], bytes]:
    """Return the wish of the stable order: by a digest of the text."""
    digests = [
        hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        for text in texts
    ]
    return lambda index: digests[index]


def candidates(
    texts: Sequence[str],
    earlier: Iterable[Sequence[str]],
    scores: Sequence[float | None],
    tolerance: float | None,
) -> list[Permutation]:
    """Return the orders that may have a longer cached prefix than the given one.

    These are the given order, then the earlier sequences with which most documents
    can be put in front; without any, each document in front once.

    Args:
        texts: Documents in the given order.
        earlier: Sequences of documents in earlier prompts, newest first.
        scores: See ``arrange``.
        tolerance: See ``arrange``.
    """
    at = {text: index for index, text in reversed(list(enumerate(texts)))}
    heads = [head for one in earlier if (head := _known_head(one, at))]
    heads.sort(key=len, reverse=True)  # of equal length, the newest stays first
    orders = {tuple(range(len(texts))): None}
    for head in heads or [[index] for index in range(len(texts))]:
        orders.setdefault(arrange(_behind(head), scores, tolerance))
        if heads and len(orders) > _MOST_KNOWN:
            break
    return list(orders)


def _behind(head: Sequence[int]) -> Callable[[int], tuple[int, int]]:
    """The wish for some documents in front, and the others as they were."""
    rank = {index: place for place, index in enumerate(head)}
    return lambda index: (rank.get(index, len(rank)), index)


def _known_head(sequence: Sequence[str], at: dict[str, int]) -> list[int]:
    head: list[int] = []
    for text in sequence:
        index = at.get(text)
        if index is None or index in head:
            break
        head.append(index)
    return head
