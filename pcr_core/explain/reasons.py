"""Why a prompt would be reused as far as it would, and no further.

A pure function of plain values: what the tiers hold now, what earlier prompts were, and
how chunks were lost. Users of other caches had to guess this from a hit rate; most of
the time it is a date in the system prompt or another order of the documents.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timezone

from pcr_core.documents import DocumentSpan
from pcr_core.explain.explanation import (
    Difference,
    Explanation,
    Part,
    Verdict,
    counted,
)
from pcr_core.explain.hints import Decode, find_difference, find_hints
from pcr_core.explain.history import Sighting, document_order, sighting_in
from pcr_core.explain.lookup import Lookup
from pcr_core.explain.past import Past

Reason = tuple[Verdict, str]
_LIMITS = {
    "dram budget": "dram_bytes",
    "ssd budget": "ssd_bytes",
    "quota": "namespace_bytes",
}
"""Why a chunk had to go -> the setting that would have kept it."""
_LOST = "what was evicted or forgotten before a restart is not remembered"


def explain(lookup: Lookup, decode: Decode) -> Explanation:
    """Explain hits and misses of a prompt and of each document in it.

    Args:
        lookup: What is known about it.
        decode: Text of token ids, special tokens included and nothing cleaned up.
    """
    past = Past(lookup)
    earlier = past.nearest.tokens if past.nearest is not None else []
    difference = None
    if earlier and past.shared < len(lookup.tokens):
        difference = find_difference(lookup.tokens, earlier, past.shared, decode)
    reasons = _Reasons(lookup, past, difference)
    sightings = lookup.sightings or [None] * len(lookup.spans)
    documents = list(map(reasons.document, lookup.spans, sightings))
    documents.sort(key=lambda part: (part.first_token, part.stop_token))
    return Explanation(
        prompt=reasons.prompt(),
        documents=tuple(documents),
        chunk_tokens=lookup.chunk_tokens,
        difference=difference,
        hints=tuple(find_hints(lookup, difference, earlier, decode)),
    )


class _Reasons:
    """Finds the reason of the first missing chunk of a part; it speaks for the rest."""

    def __init__(
        self, lookup: Lookup, past: Past, difference: Difference | None
    ) -> None:
        self._look = lookup
        self._past = past
        self._difference = difference
        self._order = document_order(lookup.spans)

    def prompt(self) -> Part:
        """The prompt as a whole."""
        return self._part("prompt", 0, len(self._look.tokens), self._new_prompt)

    def document(self, span: DocumentSpan, seen: Sighting | None) -> Part:
        """One document, and how it was seen before."""

        def unseen(chunk: int) -> Reason:
            return self._new_document(span, seen, chunk)

        return self._part(span.document, span.first_token, span.stop_token, unseen)

    def _part(
        self, name: str, first: int, stop: int, unseen: Callable[[int], Reason]
    ) -> Part:
        size, held = self._look.chunk_tokens, self._look.in_place
        found = {"device": 0, "dram": 0, "ssd": 0}
        for begin, end, tier in self._look.reused():
            found[tier] += max(0, min(end, stop) - max(begin, first))
        chunks = range(
            max(first, held) // size, min(-(-stop // size), self._look.usable)
        )
        missing = [chunk for chunk in chunks if not self._is_stored(chunk)]
        rest = stop - first - sum(found.values())
        verdict, why = self._why(missing, rest, unseen)
        return Part(
            name,
            first,
            stop,
            device_tokens=found["device"],
            dram_tokens=found["dram"],
            ssd_tokens=found["ssd"],
            verdict=verdict,
            why=why,
        )

    def _why(
        self, missing: list[int], rest: int, unseen: Callable[[int], Reason]
    ) -> Reason:
        if rest == 0:
            return "reused", ""
        if not missing:
            return "end of prompt", (
                f"the last {_run(rest)}: a last partial chunk is not "
                "stored, and the last token is needed"
            )
        chunk = missing[0]
        if chunk in self._look.gone:
            return "gone", self._departure(missing)
        if (chunk + 1) * self._look.chunk_tokens <= self._past.known:
            return "not stored", self._not_stored()
        return unseen(chunk)

    def _departure(self, missing: list[int]) -> str:
        size, record = self._look.chunk_tokens, self._look.gone[missing[0]]
        when = datetime.fromtimestamp(record.when, timezone.utc).astimezone()
        cause = f"{record.reason}, for {record.by}" if record.by else record.reason
        text = (
            f"tokens {missing[0] * size} to {(missing[0] + 1) * size - 1} left "
            f"{record.tier.upper()} at {when.isoformat(' ', 'seconds')} ({cause})"
        )
        if len(missing) > 1:
            text += f", first of {counted(len(missing), 'missing chunk')}"
        if record.reason in _LIMITS:
            text += f"; a larger {_LIMITS[record.reason]} keeps more"
        return text

    def _not_stored(self) -> str:
        full, room = len(self._look.states), self._look.dram_chunks
        if room is not None and room < full:
            return (
                f"computed before, but there was no room: the prompt has "
                f"{counted(full, 'full chunk')}, and DRAM, which they all pass "
                f"through, holds {room}; raise dram_bytes"
            )
        return (
            "computed before, but in no tier: DRAM was in use by others, the request "
            "was cancelled or failed, or it left so long ago that nothing is noted"
        )

    def _new_prompt(self, chunk: int) -> Reason:
        at = self._difference
        if at is None and not any(state != "none" for state in self._look.states):
            return "not known", (
                "no remembered prompt and no stored chunk begins like this; " + _LOST
            )
        if at is None:
            start = chunk * self._look.chunk_tokens
            return "not known", (
                f"no remembered prompt and no stored chunk tells what followed "
                f"token {start - 1}; {_LOST}"
            )
        if not at.then:
            return "not known", (
                f"new from token {at.index} on, where the nearest earlier prompt ends"
            )
        return "text changed", (
            f"it differs from the nearest earlier prompt from token {at.index} on"
        )

    def _new_document(
        self, span: DocumentSpan, seen: Sighting | None, chunk: int
    ) -> Reason:
        if self._past.known >= span.stop_token:
            return self._shared_chunk(span, chunk)
        nearest = self._past.nearest
        near = sighting_in(nearest, span) if nearest is not None else None
        if near is not None and (seen is None or near.text_digest == span.text_digest):
            seen = near
        if seen and seen.text_digest and seen.text_digest != span.text_digest:
            return "text changed", "another text was seen under this id"
        if self._began_here(span, seen):
            return self._end_of_document(span, chunk)
        if seen is None:
            return "not known", (
                f"no remembered prompt and no stored chunk is known to hold it; {_LOST}"
            )
        if seen.order is None:
            return "other text before it", (
                "seen before, behind other text or documents; which ones is not kept "
                "on disk"
            )
        return self._compare_order(span, seen.order)

    def _began_here(self, span: DocumentSpan, seen: Sighting | None) -> bool:
        """Whether some of it was certainly computed behind this very text."""
        size = self._look.chunk_tokens
        own = range(-(-span.first_token // size), span.stop_token // size)
        return (
            (seen is not None and seen.here)
            or self._past.begins_alike(span)
            or any(i in self._look.gone or self._is_stored(i) for i in own)
        )

    def _is_stored(self, chunk: int) -> bool:
        return self._look.states[chunk] != "none"

    def _shared_chunk(self, span: DocumentSpan, chunk: int) -> Reason:
        start = max(span.first_token, chunk * self._look.chunk_tokens)
        rest = span.stop_token - start
        which = "token shares" if rest == 1 else f"{rest} tokens share"
        return "shared chunk", (
            f"its last {which} a chunk with the text behind it, which is new"
        )

    def _end_of_document(self, span: DocumentSpan, chunk: int) -> Reason:
        """Some of it was here, behind the same text, but not this chunk."""
        at = self._difference
        # The last token may hold some of the text behind the document.
        inside = at and span.first_token <= at.index < span.stop_token - 1
        if at and inside and at.then:
            return "text changed", (
                f"it differs from the nearest earlier prompt from token {at.index} on"
            )
        if span.stop_token < (chunk + 1) * self._look.chunk_tokens:
            return self._shared_chunk(span, chunk)
        return "not stored", (
            "it began like this before, but its rest is in no tier: evicted before "
            "this process started, never stored, or changed since"
        )

    def _compare_order(self, span: DocumentSpan, order: tuple[str, ...]) -> Reason:
        now, then = _before(span, self._order), _before(span, order)
        if now == then or self._is_repeated(span):
            return "other text before it", self._text_in_front(span)
        text = f"now it is behind {_names(now)}, then it was behind {_names(then)}"
        common = set(self._order) & set(order)
        kept = [one for one in self._order if one in common]
        if kept != [one for one in order if one in common]:
            return "order changed", f"{text}; a fixed order would be reused"
        return "other documents before it", text

    def _is_repeated(self, span: DocumentSpan) -> bool:
        """Whether it stands in the prompt before: an order names each document once."""
        return any(
            one.document == span.document and one.first_token < span.first_token
            for one in self._look.spans
        )

    def _text_in_front(self, span: DocumentSpan) -> str:
        at = self._difference
        if at is None or at.index >= span.first_token:
            if self._is_repeated(span):
                return "the same document already stands before it"
            return "seen before, behind other text"
        place = next(
            (
                f", in document {one.document!r}"
                for one in self._look.spans
                if one.first_token <= at.index < one.stop_token
            ),
            "",
        )
        return f"the text differs from token {at.index} on{place}"


def _run(rest: int) -> str:
    return "token always runs" if rest == 1 else f"{rest} tokens always run"


def _before(span: DocumentSpan, order: tuple[str, ...]) -> tuple[str, ...]:
    return order[: order.index(span.document)] if span.document in order else order


def _names(documents: tuple[str, ...]) -> str:
    if not documents:
        return "no document"
    shown = ", ".join(f"{one:.40}" for one in documents[-4:])
    return f"{len(documents) - 4} others, {shown}" if len(documents) > 4 else shown
