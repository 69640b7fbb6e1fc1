"""Recent prompts as token ids, kept to explain misses and for nothing else.

In memory of this process only, never on disk, and as ids, never as text.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pcr_core.documents import DocumentSpan
from pcr_core.prefix import shared_prefix

_WIDTH = array("I").itemsize
_WINDOW = 8
"""Tokens that must agree in a row to count as common text."""


@dataclass(frozen=True, slots=True)
class PastPrompt:
    """An earlier prompt, or as much of one as is known.

    Attributes:
        packed: Its token ids as machine integers, in bytes.
        spans: The documents that were found in it.
    """

    packed: bytes
    spans: tuple[DocumentSpan, ...] = ()

    @classmethod
    def of(
        cls, tokens: Iterable[int], spans: Iterable[DocumentSpan] = ()
    ) -> PastPrompt:
        """Pack token ids."""
        return cls(array("I", tokens).tobytes(), tuple(spans))

    def __len__(self) -> int:
        """Tokens."""
        return len(self.packed) // _WIDTH

    @property
    def tokens(self) -> list[int]:
        """Its token ids."""
        return array("I", self.packed).tolist()

    def shared_with(self, other: PastPrompt) -> int:
        """How many tokens both begin with."""
        return shared_prefix(self.packed, other.packed) // _WIDTH

    def resembles(self, other: PastPrompt) -> bool:
        """Whether half of the shorter one's text is also in the other, anywhere."""
        shorter, longer = sorted((self, other), key=len)
        windows, others = _windows(shorter.packed), set(_windows(longer.packed))
        return 0 < len(windows) <= 2 * sum(one in others for one in windows)


def _windows(packed: bytes) -> list[bytes]:
    """Each run of ``_WINDOW`` tokens."""
    size = _WINDOW * _WIDTH
    last = len(packed) - size
    return [packed[at : at + size] for at in range(0, last + 1, _WIDTH)]


@dataclass(frozen=True, slots=True)
class Sighting:
    """How a document was seen before.

    Attributes:
        order: Ids of the documents of that prompt, in order and each once; a prefix
            that ends with this document will do. ``None`` when nothing is known.
        text_digest: ``DocumentSpan.text_digest`` then, or ``b""`` when not known.
        here: Whether it is known to have begun in the same chunk, behind the same
            text, as it does now.
    """

    order: tuple[str, ...] | None = None
    text_digest: bytes = b""
    here: bool = False


def document_order(spans: Sequence[DocumentSpan]) -> tuple[str, ...]:
    """Ids of documents in the order in which they begin, each once."""
    ordered = sorted(spans, key=lambda span: span.first_token)
    return tuple(dict.fromkeys(span.document for span in ordered))


def sighting_in(prompt: PastPrompt, span: DocumentSpan) -> Sighting | None:
    """How a document stood in an earlier prompt, or ``None`` if it was not found there.

    Several texts may share an id; the same text is preferred.

    Args:
        prompt: The earlier prompt.
        span: The document, anywhere.
    """
    found = [one for one in prompt.spans if one.document == span.document]
    if not found:
        return None
    digests = {one.text_digest for one in found}
    digest = span.text_digest if span.text_digest in digests else found[0].text_digest
    return Sighting(document_order(prompt.spans), digest)


class PromptHistory:
    """The last prompts, bounded. Engine thread only.

    Sorted by their packed tokens: the prompt that shares the longest prefix with
    another is then next to where that one would stand, so it is found by bisection.

    Args:
        max_tokens: Tokens of all prompts together, 4 bytes each; a longer prompt is not
            kept.
        max_prompts: Number of prompts. The oldest go first.
    """

    def __init__(self, max_tokens: int = 2_000_000, max_prompts: int = 4096) -> None:
        self._max_bytes = max_tokens * _WIDTH
        self._max_prompts = max_prompts
        self._by_age: OrderedDict[bytes, PastPrompt] = OrderedDict()
        self._age: dict[bytes, int] = {}
        self._sorted: list[bytes] = []
        self._bytes = 0
        self._clock = 0

    def __len__(self) -> int:
        """Prompts."""
        return len(self._sorted)

    @property
    def tokens(self) -> int:
        """Tokens of all prompts together."""
        return self._bytes // _WIDTH

    def add(self, tokens: Sequence[int], spans: Iterable[DocumentSpan] = ()) -> None:
        """Remember a prompt; one known already becomes the newest.

        Without spans it keeps those it was known with.
        """
        prompt = PastPrompt.of(tokens, spans)
        known = self._by_age.get(prompt.packed)
        if known is not None:
            self._drop(known.packed)
            prompt = prompt if prompt.spans else known
        if not 0 < len(prompt.packed) <= self._max_bytes:
            return
        self._clock += 1
        self._by_age[prompt.packed] = prompt
        self._age[prompt.packed] = self._clock
        insort(self._sorted, prompt.packed)
        self._bytes += len(prompt.packed)
        while self._bytes > self._max_bytes or len(self) > self._max_prompts:
            self._drop(next(iter(self._by_age)))

    def nearest(self, tokens: Sequence[int]) -> PastPrompt | None:
        """Return the prompt that shares the longest prefix, the newest of several.

        ``None`` if no prompt begins with the same token. Costs some 100 microseconds.
        """
        packed = PastPrompt.of(tokens).packed
        at = bisect_left(self._sorted, packed)
        beside = self._sorted[max(0, at - 1) : at + 1]
        shared = max((shared_prefix(packed, one) for one in beside), default=0)
        shared -= shared % _WIDTH
        if not shared:
            return None
        first = bisect_left(self._sorted, packed[:shared])
        stop = bisect_right(self._sorted, packed[:shared], key=lambda one: one[:shared])
        return self._by_age[max(self._sorted[first:stop], key=self._age.__getitem__)]

    def holder(self, span: DocumentSpan) -> PastPrompt | None:
        """Return the newest prompt that holds a document.

        One that holds the same text is preferred to one with another text under its id.
        """
        other: PastPrompt | None = None
        for prompt in reversed(self._by_age.values()):
            found = sighting_in(prompt, span)
            if found is not None and found.text_digest == span.text_digest:
                return prompt
            if found is not None and other is None:
                other = prompt
        return other

    def forget_where(self, holds: Callable[[PastPrompt], bool]) -> int:
        """Drop every prompt that ``holds`` says yes to; return how many."""
        found = [packed for packed, prompt in self._by_age.items() if holds(prompt)]
        for packed in found:
            self._drop(packed)
        return len(found)

    def _drop(self, packed: bytes) -> None:
        del self._by_age[packed], self._age[packed]
        del self._sorted[bisect_left(self._sorted, packed)]
        self._bytes -= len(packed)
