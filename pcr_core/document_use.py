"""How much of each document in a prompt was cached: of one request, and in all.

Ranges of tokens in, counts out. No text, no tensors. Functions and frozen values: any
thread; ``DocumentTally``: one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

TokenRange = tuple[int, int]
"""First token, and the one behind the last."""


@dataclass(frozen=True, slots=True)
class DocumentUse:
    """One document in one prompt.

    A token that holds the end of one document and the beginning of the next counts for
    both, and a document inside another counts for itself, too.

    Attributes:
        id: ``Document.id``; texts that share an id count together.
        tokens: Prompt tokens that hold any of it, wherever it stands, each once.
        cached_tokens: Of these, the tokens whose KV was reused, from any tier.
    """

    id: str
    tokens: int
    cached_tokens: int

    @property
    def computed_tokens(self) -> int:
        """Of its tokens, those that went through the model."""
        return self.tokens - self.cached_tokens


@dataclass(frozen=True, slots=True)
class DocumentTotals:
    """One document in all requests since the engine was built.

    Attributes:
        id: ``Document.id``.
        requests: Finished requests that named it; each answer of ``n`` is one.
        tokens, cached_tokens: See ``DocumentUse``, added up.
    """

    id: str
    requests: int
    tokens: int
    cached_tokens: int

    def and_(self, use: DocumentUse) -> DocumentTotals:
        """Add one request."""
        return DocumentTotals(
            self.id,
            self.requests + 1,
            self.tokens + use.tokens,
            self.cached_tokens + use.cached_tokens,
        )


def document_uses(
    places: Mapping[str, Sequence[TokenRange]], computed: Sequence[TokenRange]
) -> tuple[DocumentUse, ...]:
    """Count the tokens of each document.

    Args:
        places: Where each document stands, by id; ranges may overlap.
        computed: Token ranges that went through the model; everything else was cached.
    """
    ran = _union(computed)
    uses = []
    for id, ranges in places.items():
        own = _union(ranges)
        tokens = sum(stop - start for start, stop in own)
        again = sum(
            max(0, min(stop, end) - max(start, begin))
            for start, stop in own
            for begin, end in ran
        )
        uses.append(DocumentUse(id, tokens, tokens - again))
    return tuple(uses)


def _union(ranges: Iterable[TokenRange]) -> list[TokenRange]:
    """The same tokens in ranges that do not overlap, in order."""
    found: list[TokenRange] = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return found


class DocumentTally:
    """Adds up what requests reused of each document. One thread.

    Args:
        capacity: Documents at most; the one used least recently leaves first.
    """

    def __init__(self, capacity: int = 1024) -> None:
        self._capacity = capacity
        self._totals: OrderedDict[bytes, DocumentTotals] = OrderedDict()

    def add(self, digest: bytes, use: DocumentUse) -> None:
        """Count one document of a finished request.

        Args:
            digest: Names the document, as in ``Removed``.
            use: What was reused of it.
        """
        known = self._totals.pop(digest, DocumentTotals(use.id, 0, 0, 0))
        self._totals[digest] = known.and_(use)
        if len(self._totals) > self._capacity:
            self._totals.popitem(last=False)

    def forget_where(self, forgotten: Callable[[bytes], bool]) -> None:
        """Leave out the documents whose digest says so."""
        for digest in [one for one in self._totals if forgotten(one)]:
            del self._totals[digest]

    def totals(self) -> tuple[DocumentTotals, ...]:
        """What is known, the document used last first."""
        return tuple(reversed(self._totals.values()))
