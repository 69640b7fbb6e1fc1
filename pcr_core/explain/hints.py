"""Where two prompts part, as text; and what will part them again next time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence

from pcr_core.explain.explanation import Difference
from pcr_core.explain.lookup import Lookup
from pcr_core.explain.volatile import Volatile, VolatileKind, find_volatile

Decode = Callable[[Sequence[int]], str]

_BEFORE, _AFTER = 12, 8
"""Tokens of context that are shown."""
_WINDOW = 64
"""Tokens on each side of a difference that are searched for a date or an id."""
_EARLY = 1024
"""Most tokens in front of the first document that are searched."""
_MOST_HINTS = 3
_UNFINISHED = "\ufffd"
_NAMES: dict[VolatileKind, str] = {
    "date": "a date",
    "time": "a time",
    "id": "an id",
    "counter": "a counter",
}


# --- the first differing token ---


def find_difference(
    tokens: Sequence[int], earlier: Sequence[int], index: int, decode: Decode
) -> Difference:
    """Text around the first token in which two prompts differ.

    Args:
        tokens: This prompt.
        earlier: The other.
        index: The first differing token; the other prompt may end there.
        decode: Text of token ids.
    """
    margins = [_margin(one, index, decode) for one in (tokens, earlier)]
    first = index - max(left for left, _ in margins)
    stop, other_stop = (index + 1 + right for _, right in margins)
    return Difference(
        index=index,
        before=_between(tokens, max(0, first - _BEFORE), first, decode),
        now=_between(tokens, first, stop, decode),
        then=_between(earlier, first, other_stop, decode)
        if index < len(earlier)
        else "",
        after_now=_between(tokens, stop, stop + _AFTER, decode),
        after_then=_between(earlier, other_stop, other_stop + _AFTER, decode),
    )


def _margin(tokens: Sequence[int], index: int, decode: Decode) -> tuple[int, int]:
    """Neighbours, left and right, to add so that no character is cut."""
    for size in range(7):
        for left in range(max(0, size - 3), min(size, 3, index) + 1):
            right = size - left
            piece = decode(tokens[index - left : index + 1 + right])
            if _UNFINISHED not in piece:
                return left, right
    return 0, 0  # it is no text


def _between(tokens: Sequence[int], first: int, stop: int, decode: Decode) -> str:
    """Text of some tokens; some tokenizers drop the blank of the first one decoded."""
    start = max(0, first - _BEFORE)
    return decode(tokens[start:stop])[len(decode(tokens[start:first])) :]


# --- hints ---


def find_hints(
    lookup: Lookup,
    difference: Difference | None,
    earlier: Sequence[int],
    decode: Decode,
) -> list[str]:
    """Say what looks volatile where a change costs reuse, and what to do.

    Two places count: the first differing token, and the text in front of the first
    document (without documents: the first two chunks).

    Args:
        lookup: The prompt.
        difference: Where it leaves ``earlier``, if anywhere.
        earlier: Tokens of the earlier prompt; may be empty.
        decode: Text of token ids.
    """
    if not lookup.usable:
        return []
    hints: list[str] = []
    changed = ""
    if difference is not None:
        hints, changed = _changed(lookup, difference, earlier, decode)
    hints += _early(lookup, difference, changed, decode)
    return hints[:_MOST_HINTS]


def _changed(
    lookup: Lookup, at: Difference, earlier: Sequence[int], decode: Decode
) -> tuple[list[str], str]:
    """What changed since the earlier prompt, and that text alone."""
    if not _costs_reuse(lookup, at.index):
        return [], ""
    if _same_text(at):
        return [_other_split(at)], ""
    now = _volatile_at(lookup.tokens, at.index, decode)
    then = _volatile_at(earlier, at.index, decode)
    if now is None:
        return [], ""
    was = f" (it was {then.text!r})" if then and then.kind == now.kind else ""
    return [
        f"the prompt changes at token {at.index}, in what looks like "
        f"{_NAMES[now.kind]}: {now.text!r}{was}; {_remedy(lookup)}"
    ], now.text


def _early(
    lookup: Lookup, at: Difference | None, changed: str, decode: Decode
) -> Iterator[str]:
    limit = min(_early_limit(lookup), len(lookup.tokens))
    for one in find_volatile(decode(lookup.tokens[:limit])):
        first, last = (
            bisect_right(
                range(limit), place, key=lambda k: len(decode(lookup.tokens[:k]))
            )
            - 1
            for place in (one.start, one.stop - 1)
        )
        # Equal in another request: it stays, unless it is the date of the same day.
        steady = at is not None and bool(at.then) and last < at.index
        if one.text == changed or (steady and one.kind != "date"):
            continue
        yield (
            f"{one.text!r} at token {first} looks like {_NAMES[one.kind]}: when it "
            f"changes, everything behind it is computed again; {_remedy(lookup)}"
        )


def _early_limit(lookup: Lookup) -> int:
    two_chunks = 2 * lookup.chunk_tokens
    if not lookup.spans:
        return two_chunks
    head = min(span.first_token for span in lookup.spans)
    return min(head, max(two_chunks, _EARLY))


def _costs_reuse(lookup: Lookup, index: int) -> bool:
    """Whether something that could be reused stands behind a token."""
    if not lookup.spans:
        return index // lookup.chunk_tokens + 1 < lookup.usable
    inside = any(s.first_token <= index < s.stop_token for s in lookup.spans)
    return not inside and any(index < span.first_token for span in lookup.spans)


def _volatile_at(tokens: Sequence[int], index: int, decode: Decode) -> Volatile | None:
    """What looks volatile and holds the token."""
    start = max(0, index - _WINDOW)
    place = len(decode(tokens[start:index]))
    stop = max(place + 1, len(decode(tokens[start : index + 1])))
    for one in find_volatile(decode(tokens[start : index + _WINDOW])):
        if one.start < stop and one.stop > place:
            return one
    return None


def _same_text(at: Difference) -> bool:
    """Whether other tokens spell the same text."""
    size = min(len(at.now + at.after_now), len(at.then + at.after_then))
    return (
        size >= len(at.now) > 0
        and size >= len(at.then) > 0
        and ((at.now + at.after_now)[:size] == (at.then + at.after_then)[:size])
    )


def _other_split(at: Difference) -> str:
    return (
        f"the same text was cut into other tokens at token {at.index}; give prompts as "
        "text or messages, tokenised as a whole, or always cut them the same way"
    )


def _remedy(lookup: Lookup) -> str:
    place = "behind the documents" if lookup.spans else "to the end of the prompt"
    return f"move it {place}"
