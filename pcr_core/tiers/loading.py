"""Load or recompute: what a request reads, what it computes, and when it stops waiting.

Loading a chunk that is on SSD can cost more than computing it again (PCR's own SCCache
result), and the two use different hardware, so a run of such chunks is filled from both
ends: the front is computed while the back is read (Cake). The split comes from measured
rates and is looked at again whenever the front catches up with a read. Engine thread
only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import groupby

from pcr_core.index.node import Disk, Host, Node
from pcr_core.stats import StoreCounters
from pcr_core.tiers.dram import RUNNING, DramTier
from pcr_core.tiers.lease import Lease
from pcr_core.tiers.load_plan import LoadPlanner
from pcr_core.tiers.read_in import ReadIn, Reading
from pcr_core.tiers.stop_policy import StopPolicy
from pcr_core.tiers.store.chunk_file import ChunkFormat

_HANGS = 60.0
"""Seconds without any read of a request ending after which it waits no more."""

_GLANCE = 0.125
"""Seconds between two looks at whether it is still wanted."""


class Loading:
    """Lends slots to leases.

    Args:
        dram: Slots.
        reads: Reads.
        fmt: Size of a chunk and of its file.
        stop: How long requests wait for reads.
        planner: Says what to read and what to compute; also an attribute.
        barred: Whether a chunk must not be lent: it was forgotten.
        stats: Counters.
        poll: Takes in finished I/O.
        clock: Seconds.
    """

    def __init__(
        self,
        dram: DramTier,
        reads: ReadIn,
        fmt: ChunkFormat,
        stop: StopPolicy,
        planner: LoadPlanner,
        *,
        barred: Callable[[Node], bool],
        stats: StoreCounters,
        poll: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._dram = dram
        self._reads = reads
        self._format = fmt
        self._stop = stop
        self.planner = planner
        self._barred = barred
        self._stats = stats
        self._poll = poll
        self._clock = clock

    def lend(self, lease: Lease, usable: int) -> None:
        """Lend what is in DRAM, start reading what is on SSD, reserve the rest."""
        lease.patience = self._stop.patience
        nodes = [chunk.node for chunk in lease.path]
        for index, node in enumerate(nodes[:usable]):
            if self._barred(node):
                continue
            if index < lease.covered:
                self._spare_read(lease, index, node)
            elif node.host is Host.READY:
                tier = "ssd" if self._dram.take_fetched(node) else "dram"
                lease.add_source(index, self._dram.slot(node), tier)
            elif node.host is Host.FILLING:
                self._join(lease, index, node)
        stored = [i for i in range(lease.covered, usable) if _only_on_ssd(nodes[i])]
        for run in _runs(stored):
            self._start(lease, run, stored)
        for index, node in enumerate(nodes):
            if node.host is Host.NONE:
                slot = self._dram.reserve(node, lease.path[index].id)
                if slot is None:
                    self._stats.bypassed_inserts += 1
                else:
                    lease.add_sink(index, slot)

    def settle(self, lease: Lease, index: int) -> None:
        """Wait for a chunk, or take it back to be computed; see ``Lease.settle``."""
        self._poll()
        while index in lease.readings:
            if not self._take_back_front(lease, index):
                self._await(lease, index)
            self._poll()

    def leave(self, lease: Lease) -> None:
        """A lease ends with reads under way: undo them, or let them end for nobody."""
        for reading in lease.readings.values():
            if not self._reads.drop(reading):
                reading.reader = None
        lease.readings.clear()

    def _join(self, lease: Lease, index: int, node: Node) -> None:
        """Wait for a read that was started ahead."""
        reading = self._reads.find(node)
        if reading is None or reading.reader is not None:
            return  # another request fills this chunk: compute it, do not keep it
        self._stats.prefetch_late += 1
        reading.reader, reading.index = lease, index
        lease.readings[index] = reading
        self._reads.hurry(reading)

    def _spare_read(self, lease: Lease, index: int, node: Node) -> None:
        """Have a chunk copied from the device that was to be read ahead from SSD.

        A read that runs already is left alone: it ends, and the chunk is in DRAM.
        """
        reading = self._reads.find(node)
        if reading is None or reading.reader is not None:
            return
        if self._reads.take_back(reading):
            self._stats.prefetch_cancelled += 1
            lease.add_sink(index, self._dram.slot(node))

    def _start(self, lease: Lease, run: range, stored: Collection[int]) -> None:
        front = run.start
        while front > 0 and _is_missing(lease, front - 1, stored):
            front -= 1
        before = (run.start - front) * self._format.layout.chunk_tokens
        first = self._split(lease, run, stored, before, len(lease.readings))
        self._stats.recomputed += first - run.start
        back = range(first, run.stop)
        # With the front being computed, the reads come to meet it from the back.
        for index in back if first == run.start else reversed(back):
            chunk = lease.path[index]
            reading = self._reads.start(chunk.node, chunk.id, RUNNING)
            if reading is not None:
                reading.reader, reading.index = lease, index
                lease.readings[index] = reading

    def _split(
        self,
        lease: Lease,
        run: range,
        others: Collection[int],
        before: int,
        earlier: int,
    ) -> int:
        """Index of the first chunk of a run to read; those before it are computed.

        Args:
            lease: Whose chunks they are.
            run: Chunks that could be read.
            others: Chunks that will not be computed, beside sources and reads.
            before: Tokens directly before the run that are to be computed anyway.
            earlier: Reads that end before those of the run.
        """
        if not self._stop.recompute:
            return run.start
        tokens = self._format.layout.chunk_tokens
        after = run.stop
        while after < len(lease.path) and _is_missing(lease, after, others):
            after += 1
        end = lease.prompt_tokens if after == len(lease.path) else after * tokens
        return self.planner.split(
            run,
            before=before,
            after=end - run.stop * tokens,
            queued=earlier * self._format.file_nbytes,
        )

    def _take_back_front(self, lease: Lease, index: int) -> bool:
        """Compute what has become cheaper to compute; False if nothing has.

        Only reads that have not begun are compared: one that has will end, and what
        comes before it in the prompt gains nothing from throwing it away.
        """
        front = index
        while front in lease.readings and lease.readings[front].job.begun:
            front += 1  # to be waited for in any case, while the readers go on
        run = _run_from(front, lease.readings)
        if not run:
            return False
        taken, earlier = 0, self._reads.begun - (front - index)
        for at in range(front, self._split(lease, run, (), 0, earlier)):
            if not self._give_back(lease, at):
                break
            taken += 1
        self._stats.recomputed += taken
        return taken > 0

    def _await(self, lease: Lease, index: int) -> None:
        """Wait until any read has ended, as then there is something to decide anew."""
        started = self._clock()
        if self._wait(lease, min(_HANGS, lease.patience)):
            lease.patience = max(0.0, lease.patience - (self._clock() - started))
            return
        # Nor for the others from now on: each would hang as long again.
        lease.patience = 0.0
        self._stats.read_timeouts += 1
        if not self._give_back(lease, index):
            # It runs and does not end: its slot stays with it.
            lease.readings.pop(index).reader = None

    def _wait(self, lease: Lease, seconds: float) -> bool:
        """Wait in short pieces, because whoever asked may have gone meanwhile."""
        while not self._reads.wait_any(
            lease.readings.values(), max(0.0, min(seconds, _GLANCE))
        ):
            seconds -= _GLANCE
            if seconds <= 0.0:
                return False
            lease.checkpoint()
        return True

    def _give_back(self, lease: Lease, index: int) -> bool:
        """Turn a read that has not started into a sink."""
        reading = lease.readings[index]
        if not self._reads.take_back(reading):
            return False
        lease.failed(index, self._dram.slot(reading.node))
        return True


def _only_on_ssd(node: Node) -> bool:
    return node.host is Host.NONE and node.disk is Disk.STORED


def _is_missing(lease: Lease, index: int, others: Collection[int]) -> bool:
    """Whether a chunk has to be computed in any case."""
    places = (range(lease.covered), lease.sources, lease.readings, others)
    return not any(index in place for place in places)


def _runs(indices: Iterable[int]) -> Iterator[range]:
    """Maximal runs of consecutive indices."""
    for _, group in groupby(enumerate(indices), key=lambda item: item[1] - item[0]):
        members = [index for _, index in group]
        yield range(members[0], members[-1] + 1)


def _run_from(index: int, readings: Mapping[int, Reading]) -> range:
    """The run of reads that have not begun, from a chunk on; it may be empty."""
    stop = index
    while stop in readings and not readings[stop].job.begun:
        stop += 1
    return range(index, stop)
