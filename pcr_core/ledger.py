"""What prompts and documents have been here: noted, looked up, forgotten.

Stands between the engine's loop and the tiers. Holds token ids of recent prompts in
memory, for ``explain``; never text, and nothing of it reaches a disk. Engine thread
only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pcr_core.documents import ForgetReceipt
from pcr_core.errors import StoreError
from pcr_core.explain.history import PastPrompt, PromptHistory
from pcr_core.explain.lookup import Lookup
from pcr_core.request import Request
from pcr_core.tiers import ForgetJob, Removed, TierManager


class Ledger:
    """Notes prompts and documents, and knows what became of them.

    Args:
        tiers: Where chunks are.
    """

    def __init__(self, tiers: TierManager) -> None:
        self._tiers = tiers
        self._history = PromptHistory()

    def note(self, request: Request) -> None:
        """Remember a prompt and the documents in it, before it is computed."""
        self._tiers.register(request.heads)
        self._history.add(request.tokens, request.spans)

    def lookup(self, request: Request) -> Lookup:
        """All that is known about a prompt. Changes nothing."""
        states = self._tiers.match(request.keys)
        missing = [i for i, state in enumerate(states) if state == "none"]
        gone = {
            index: record
            for index in missing
            if (record := self._tiers.departures.find(request.keys[index])) is not None
        }
        usable = request.usable * self._tiers.chunk_tokens
        return Lookup(
            request.tokens,
            self._tiers.chunk_tokens,
            states,
            must_compute=len(request.tokens) - usable,
            spans=request.spans,
            earlier=self._earlier(request, missing),
            sightings=[self._history.sighting(span) for span in request.spans],
            gone=gone,
        )

    def catch_up(self, waiting: Iterable[Request]) -> None:
        """Drop what any process has had forgotten; it is not stored again by those.

        Args:
            waiting: Requests in the queue.
        """
        removed = self._tiers.catch_up()
        if removed is not None:
            self._strike(removed, waiting)

    def begin_forget(self, document: bytes) -> ForgetJob:
        """See ``TierManager.begin_forget``."""
        return self._tiers.begin_forget(document)

    def end_forget(
        self, document: str, job: ForgetJob, waiting: Iterable[Request]
    ) -> ForgetReceipt:
        """Finish what ``begin_forget`` began.

        Args:
            document: Its id.
            job: What the store did.
            waiting: Requests in the queue: they will not store the document again.

        Raises:
            StoreError: If the store refused.
        """
        removed = self._tiers.end_forget(job)
        prompts = self._history.forget(document)
        prompts += self._strike(removed, waiting)
        if job.error is not None:
            raise StoreError(
                f"document {document!r} is gone from memory but could not be removed "
                f"from the cache folder ({job.error}); check the disk and call forget "
                "again, or delete the folder"
            ) from job.error
        return ForgetReceipt(
            document=document,
            keys=tuple(sorted(key.hex() for key in {*job.keys, *removed.dram})),
            files=tuple(job.files),
            left=tuple(job.left),
            ssd_bytes=job.nbytes,
            dram_chunks=len(removed.dram),
            prompts=prompts,
            epoch=job.epoch,
        )

    def _strike(self, removed: Removed, waiting: Iterable[Request]) -> int:
        """Take what was forgotten out of the queue's and the history's keys."""
        for request in waiting:
            # Also where it begins behind a prefix that has never been computed.
            named = {h for doc, h in request.heads.items() if removed.names(doc)}
            kept = 0
            for key in request.keys:
                if key in named or removed.covers(key):
                    break
                kept += 1
            request.keys = request.keys[:kept]
            request.usable = min(request.usable, kept)
        return self._history.forget_where(
            lambda tokens: any(map(removed.covers, self._tiers.keys_of(tokens)))
        )

    def _earlier(self, request: Request, missing: Sequence[int]) -> list[PastPrompt]:
        """Earlier prompts like this one: remembered, or told by stored chunks."""
        nearest = self._history.nearest(request.tokens)
        found = [nearest] if nearest is not None else []
        if missing:
            start = missing[0] * self._tiers.chunk_tokens
            beside = self._tiers.sibling_tokens(request.keys, missing[0])
            if beside:
                found.append(PastPrompt.of([*request.tokens[:start], *beside]))
        return found
