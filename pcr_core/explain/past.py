"""Which earlier prompt a prompt is compared with, and what was certainly computed."""

from __future__ import annotations

from pcr_core.documents import DocumentSpan
from pcr_core.explain.history import PastPrompt, sighting_in
from pcr_core.explain.lookup import Lookup


class Past:
    """What is known to have been computed before.

    Attributes:
        nearest: The earlier prompt to compare with, if any is like this one.
        shared: Tokens that both begin with; 0 without one.
        known: Leading tokens that were certainly computed before, in this order.
    """

    def __init__(self, lookup: Lookup) -> None:
        now = PastPrompt.of(lookup.tokens)
        stored = [i for i, state in enumerate(lookup.states) if state != "none"]
        last = max([*stored, *lookup.gone], default=-1)
        proven = (last + 1) * lookup.chunk_tokens
        shared = map(now.shared_with, lookup.earlier)
        self.known = max([proven, lookup.resident, *shared])
        self.nearest = _nearest(lookup, now)
        self.shared = now.shared_with(self.nearest) if self.nearest is not None else 0
        if self.shared < proven:  # chunks prove that an unknown prompt shared more
            self.nearest, self.shared = None, 0

    def begins_alike(self, span: DocumentSpan) -> bool:
        """Whether ``nearest`` has a document of this id and text at the same place."""
        return (
            self.nearest is not None
            and self.shared > span.first_token
            and any(
                one.first_token == span.first_token and _same(one, span)
                for one in self.nearest.spans
            )
        )


def _nearest(lookup: Lookup, now: PastPrompt) -> PastPrompt | None:
    """The prompt with the longest common beginning, if it is like this one.

    Any two prompts may begin with the same few tokens. One that holds a document of
    this one is like it all the same: then what stands in front of that differs.
    """
    nearest = max(lookup.earlier, key=now.shared_with, default=None)
    if nearest is None:
        return None
    shared = now.shared_with(nearest)
    if shared >= lookup.chunk_tokens or _holds(lookup, nearest):
        return nearest
    holders = [prompt for prompt in lookup.earlier if _holds(lookup, prompt)]
    if holders:
        return max(holders, key=now.shared_with)
    return nearest if shared and now.resembles(nearest) else None


def _holds(lookup: Lookup, prompt: PastPrompt) -> bool:
    found = ((span, sighting_in(prompt, span)) for span in lookup.spans)
    return any(seen and seen.text_digest == span.text_digest for span, seen in found)


def _same(one: DocumentSpan, other: DocumentSpan) -> bool:
    return (one.document, one.text_digest) == (other.document, other.text_digest)
