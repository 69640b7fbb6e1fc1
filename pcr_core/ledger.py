"""What prompts and documents have been here: noted, looked up, forgotten.

Stands between the engine's loop and the tiers. Holds token ids of recent prompts in
memory, for ``explain``; never text, and nothing of it reaches a disk. Engine thread
only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from pcr_core.document_use import DocumentTally, DocumentTotals, DocumentUse
from pcr_core.documents import DocumentSpan, ForgetReceipt, head_chunk
from pcr_core.errors import StoreError
from pcr_core.explain.history import (
    PastPrompt,
    PromptHistory,
    Sighting,
    sighting_in,
)
from pcr_core.explain.lookup import Lookup
from pcr_core.index.chunk import ChunkKey
from pcr_core.request import Request
from pcr_core.tiers import ForgetJob, Removed, TierManager


@dataclass(slots=True, eq=False)
class Removal:
    """A document that is being forgotten.

    Attributes:
        job: What the store does.
        dram: Chunks that had a copy in DRAM.
        prompts: Remembered prompts that were dropped.
    """

    job: ForgetJob
    dram: set[ChunkKey] = field(default_factory=set)
    prompts: int = 0


class Ledger:
    """Notes prompts and documents, and knows what became of them.

    Args:
        tiers: Where chunks are.
        forget_rows: Drops what the device holds, whatever that is.
    """

    def __init__(self, tiers: TierManager, forget_rows: Callable[[], None]) -> None:
        self._tiers = tiers
        self._forget_rows = forget_rows
        self._history = PromptHistory()
        self._tally = DocumentTally()

    @property
    def documents(self) -> tuple[DocumentTotals, ...]:
        """What finished requests have reused of each document, the latest first."""
        return self._tally.totals()

    def admit(self, request: Request) -> None:
        """Apply to a request what was forgotten on its way from the caller's thread."""
        removed = self._tiers.forgotten_since(request.epoch)
        if removed is not None:
            self._strike(removed, [request])

    def note(self, request: Request) -> None:
        """Remember a prompt and the documents in it, before it is computed."""
        self._tiers.register(self._heads(request))
        if request.remembered:
            self._history.add(request.tokens, request.spans)

    def count(self, request: Request, uses: Iterable[DocumentUse]) -> None:
        """Add up what a finished request has reused of its documents.

        Not of one from whose prompt something was forgotten meanwhile: it would bring
        the document's name back.
        """
        if request.remembered:
            digests = {span.document: span.digest for span in request.spans}
            for use in uses:
                self._tally.add(digests[use.id], use)

    def lookup(self, request: Request, must_compute: int, resident: int) -> Lookup:
        """All that is known about a prompt. Changes nothing.

        Args:
            request: The prompt.
            must_compute: Tokens at its end that run in any case.
            resident: Leading tokens that the device holds.
        """
        states = self._tiers.match(request.keys)
        missing = [i for i, state in enumerate(states) if state == "none"]
        gone = {
            index: record
            for index in missing
            if (record := self._tiers.departures.find(request.keys[index])) is not None
        }
        holders = [self._history.holder(span) for span in request.spans]
        return Lookup(
            request.tokens,
            self._tiers.chunk_tokens,
            states,
            must_compute=must_compute,
            spans=request.spans,
            earlier=self._earlier(request, missing, holders),
            sightings=list(
                map(partial(self._sighting, request), request.spans, holders)
            ),
            gone=gone,
            dram_chunks=self._tiers.dram_chunks,
            resident=resident,
            heads=self._tiers.heads(
                request.keys, request.tokens, request.usable, resident
            ),
        )

    def catch_up(self, waiting: Iterable[Request]) -> None:
        """Drop what any process has had forgotten; it is not stored again by those.

        Args:
            waiting: Requests in the queue.
        """
        removed = self._tiers.catch_up()
        if removed is not None:
            self._tally.forget_where(removed.names)
            self._strike(removed, waiting)

    def begin_forget(self, document: bytes, waiting: Sequence[Request]) -> Removal:
        """Forget a document in memory, and have the store start on it.

        Whoever asked may be interrupted now: the rest follows with ``catch_up``.

        Args:
            document: Its digest.
            waiting: Requests in the queue: they will not store the document again.
        """
        found = map(self._heads, waiting)
        heads = [heads[document] for heads in found if document in heads]
        removal = Removal(self._tiers.begin_forget(document, heads))
        self._carry_out(removal, waiting)
        return removal

    def end_forget(
        self, document: str, removal: Removal, waiting: Sequence[Request]
    ) -> ForgetReceipt:
        """Forget what the finished job has brought to light.

        Args:
            document: Its id.
            removal: What ``begin_forget`` returned.
            waiting: Requests in the queue.

        Raises:
            StoreError: If the store refused.
        """
        self._carry_out(removal, waiting)
        job = removal.job
        if job.error is not None:
            raise StoreError(
                f"document {document!r} is gone from memory but could not be removed "
                f"from the cache folder ({job.error}); check the disk and call forget "
                "again, or delete the folder"
            ) from job.error
        return ForgetReceipt(
            document=document,
            keys=tuple(sorted(key.hex() for key in {*job.keys, *removal.dram})),
            files=tuple(job.files),
            left=tuple(job.left),
            ssd_bytes=job.nbytes,
            dram_chunks=len(removal.dram),
            prompts=removal.prompts,
            epoch=job.epoch,
        )

    def _carry_out(self, removal: Removal, waiting: Sequence[Request]) -> None:
        removed = self._tiers.end_forget(removal.job)
        removal.dram.update(removed.dram)
        self._tally.forget_where(removed.names)
        removal.prompts += self._strike(removed, waiting)

    def _strike(self, removed: Removed, waiting: Iterable[Request]) -> int:
        """Take what was forgotten out of the queue, the device and the history."""
        self._forget_rows()
        for request in waiting:
            kept = self._kept(request, removed)
            if kept is not None:
                request.keys = request.keys[:kept]
                request.usable = min(request.usable, kept)
                request.remembered = False

        def holds(prompt: PastPrompt) -> bool:
            if any(removed.names(span.digest) for span in prompt.spans):
                return True
            # Keys are computed anew, some 100 ns a token: not for nothing.
            known = removed.heads is None or removed.heads
            return bool(known) and any(
                map(removed.covers, self._tiers.keys_of(prompt.tokens))
            )

        return self._history.forget_where(holds)

    def _kept(self, request: Request, removed: Removed) -> int | None:
        """How many chunks precede what was forgotten; ``None`` if nothing was."""
        covered = (i for i, key in enumerate(request.keys) if removed.covers(key))
        first = [
            *(
                head_chunk(s, self._tiers.chunk_tokens)
                for s in request.spans
                if removed.names(s.digest)
            ),
            *islice(covered, 1),
        ]
        return min(first, default=None)

    def _heads(self, request: Request) -> dict[bytes, ChunkKey]:
        """First chunk of each document; none if it begins behind the last chunk."""
        heads: dict[bytes, ChunkKey] = {}
        for span in sorted(request.spans, key=lambda span: span.first_token):
            at = head_chunk(span, self._tiers.chunk_tokens)
            if at < len(request.keys):
                heads.setdefault(span.digest, request.keys[at])
        return heads

    def _sighting(
        self, request: Request, span: DocumentSpan, holder: PastPrompt | None
    ) -> Sighting | None:
        """How a document was seen: in a remembered prompt, or as the folder knows."""
        if holder is not None:
            return sighting_in(holder, span)
        heads = self._tiers.heads_of(span.digest)
        at = head_chunk(span, self._tiers.chunk_tokens)
        here = at < len(request.keys) and request.keys[at] in heads
        return Sighting(here=here) if heads else None

    def _earlier(
        self,
        request: Request,
        missing: Sequence[int],
        holders: Iterable[PastPrompt | None],
    ) -> list[PastPrompt]:
        """Earlier prompts like this one: remembered, or told by stored chunks."""
        found = [self._history.nearest(request.tokens), *holders]
        if missing:
            start = missing[0] * self._tiers.chunk_tokens
            beside = self._tiers.sibling_tokens(request.keys, missing[0])
            if beside:
                found.append(PastPrompt.of([*request.tokens[:start], *beside]))
        return [prompt for prompt in found if prompt is not None]
