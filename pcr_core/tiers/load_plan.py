"""Load or recompute: which chunks of a run on SSD are read, which are computed.

Loading is not always faster (PCR, arXiv 2603.23049: with one of its models the SSD
makes things slower), and neither needs the whole run: computing from the front while
loading from the back is faster than either when they are of a speed (Cake, ICML 2025).
A run that is read whole, layer by layer, hides the forward behind it, or is hidden by
it, all but one layer. Pure decisions on measured rates. Engine thread only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from pcr_core.cost import PrefillTimes, ReadTimes

_TRIAL = 32
_WORTH = 0.9


class Behind(NamedTuple):
    """What the forward that needs a run computes.

    Attributes:
        cached: Tokens that are in place for it, the run included.
        new: Tokens that it computes.
    """

    cached: int
    new: int


@dataclass(slots=True)
class LoadPlanner:
    """Splits runs of chunks by what was measured.

    Attributes:
        prefill: What forwards take.
        reads: What reads take.
        chunk_tokens: Tokens per chunk.
        chunk_bytes: Bytes read per chunk.
        step: Longest forward in tokens, ``None`` for no limit.
        layers: Layers of the model.
    """

    prefill: PrefillTimes
    reads: ReadTimes
    chunk_tokens: int
    chunk_bytes: int
    step: int | None = None
    layers: int = 1
    _refused: int = field(default=0, init=False)

    def split(
        self,
        run: range,
        *,
        before: int = 0,
        after: int = 0,
        queued: int = 0,
        behind: Behind | None = None,
    ) -> int:
        """Where to cut a run of chunks that could be read.

        The chunks before the cut are to be computed while the others are read. Read
        them last chunk first, so that what is not yet begun when the front arrives
        lies before what is there, and split that again. Doing both must promise a
        tenth of the time: estimates err by a few per cent.

        Nothing measured yet: all are read. A rate that is not used is not measured
        again either; so the last chunk of every ``_TRIAL``-th run that would be
        computed whole is read all the same.

        Args:
            run: Indices of the chunks, at least one.
            before: Tokens directly before the run that are computed anyway.
            after: Tokens directly behind the run that are computed anyway.
            queued: Bytes whose reads come first and will be waited for.
            behind: The forward that begins with the first layers of the run, if it is
                read whole; ``None`` if it is waited for first.

        Returns:
            Index of the first chunk to read; ``run.stop`` to compute them all.
        """
        if not (self.prefill.ready and self.reads.ready):
            return run.start

        overlap = self._overlap(len(run), behind) if behind is not None else 0.0

        def total(cut: int) -> float:
            spent = self._total(run, cut, before, after, queued)
            return spent - overlap if cut == run.start else spent

        # Of equals the first, as reading leaves the processor free.
        best = min((run.start, run.stop), key=total)
        meet = self._meeting_point(run, before, queued)
        both = min((max(run.start, meet - 1), meet), key=total)
        if total(both) < _WORTH * total(best):
            best = both
        if best < run.stop:
            return best
        self._refused += 1
        return run.stop - 1 if self._refused % _TRIAL == 0 else run.stop

    def computing(self, cached: int, new: int) -> float:
        """Expected seconds to compute tokens; infinite while that is unknown."""
        return self._compute(cached, new) if self.prefill.ready else math.inf

    def crossover(self, limit: int) -> float | None:
        """Depth in tokens from which on reading a chunk beats computing it.

        Reading costs the same everywhere, computing grows with the prefix.

        Args:
            limit: Largest depth that matters: the context window.

        Returns:
            0 if reading always wins, ``inf`` if it never does below ``limit``,
            ``None`` while that is unknown. Rounded up to whole chunks.
        """
        if not (self.prefill.ready and self.reads.ready):
            return None
        read = self.reads.seconds(self.chunk_bytes)
        low, high = 0, limit // self.chunk_tokens + 1
        while low < high:
            middle = (low + high) // 2
            if self._compute(middle * self.chunk_tokens, self.chunk_tokens) < read:
                low = middle + 1
            else:
                high = middle
        depth = low * self.chunk_tokens
        return float(depth) if depth <= limit else math.inf

    def _total(
        self, run: range, cut: int, before: int, after: int, queued: int
    ) -> float:
        """Seconds until all of the run, and what is computed around it, is in place."""
        start, end = (index * self.chunk_tokens for index in (run.start, run.stop))
        front = before + cut * self.chunk_tokens - start
        if cut == run.stop and queued == 0:  # nothing to wait for: one forward
            return self._compute(start - before, front + after)
        read = self.reads.seconds(queued + (run.stop - cut) * self.chunk_bytes)
        computed = self._compute(start - before, front)
        return max(computed, read) + self._compute(end, after)

    def _overlap(self, chunks: int, behind: Behind) -> float:
        """Seconds in which a run is read and the forward behind it goes on, too.

        The shorter of both, but for the layer with which either begins.
        """
        read = self.reads.seconds(chunks * self.chunk_bytes)
        new = behind.new if self.step is None else min(behind.new, self.step)
        shorter = min(read, self._compute(behind.cached, new))
        return max(0.0, shorter - read / self.layers)

    def _meeting_point(self, run: range, before: int, queued: int) -> int:
        """The first cut at which computing the front takes as long as the reads."""
        low, high = run.start, run.stop
        while low < high:
            cut = (low + high) // 2
            front = before + (cut - run.start) * self.chunk_tokens
            read = self.reads.seconds(queued + (run.stop - cut) * self.chunk_bytes)
            if self._compute(run.start * self.chunk_tokens - before, front) < read:
                low = cut + 1
            else:
                high = cut
        return low

    def _compute(self, cached: int, new: int) -> float:
        """Seconds to compute tokens, in as many forwards as that takes."""
        if new <= 0:
            return 0.0
        if self.step is None or new <= self.step:
            return self.prefill.seconds(cached, new)
        steps, rest = divmod(new, self.step)
        middle = cached + (steps - 1) * self.step // 2  # time is affine in depth
        whole = steps * self.prefill.seconds(middle, self.step)
        return whole + self._compute(cached + steps * self.step, rest)
