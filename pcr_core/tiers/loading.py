"""Load or recompute: what a request reads, what it computes, and when it stops waiting.

Loading a chunk that is on SSD can cost more than computing it again (PCR's own SCCache
result), and the two use different hardware, so a run of such chunks is filled from both
ends: the front is computed while the back is read (Cake). The split comes from measured
rates and is looked at again whenever the front catches up with a read. Chunks that the
first forward needs and that are all read come layer by layer instead (``Convoy``): it
begins with the first layer of each. Engine thread only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby

from pcr_core.errors import ChunkLostError
from pcr_core.index.node import Disk, Host, Node
from pcr_core.stats import StoreCounters
from pcr_core.tiers.convoy import GLANCE, HANGS, Arrival, Convoy
from pcr_core.tiers.dram import RUNNING, DramTier
from pcr_core.tiers.lease import Lease
from pcr_core.tiers.load_plan import Behind, LoadPlanner
from pcr_core.tiers.outline import Outline
from pcr_core.tiers.read_in import ReadIn, Reading
from pcr_core.tiers.stop_policy import StopPolicy
from pcr_core.tiers.store.chunk_file import ChunkFormat


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
        self._read(
            lease, [i for i in range(lease.covered, usable) if _only_on_ssd(nodes[i])]
        )
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

    def is_late(self, lease: Lease, index: int) -> bool:
        """Whether to wait for a chunk, without doing so; see ``Lease.is_late``."""
        self._poll()
        while index in lease.readings and self._take_back_front(lease, index):
            self._poll()
        arriving = next(iter(lease.arriving.values()), None)
        if index not in lease.readings and arriving is None:
            lease.late_since = None
            return False
        now = self._clock()
        if lease.late_since is None:
            lease.late_since = now
        if now - lease.late_since >= min(HANGS, lease.patience):
            lease.patience = 0.0  # whoever waits for it now gives it up at once
            return False
        return arriving is None or arriving.convoy.is_awaited()

    def complete(self, lease: Lease, index: int) -> None:
        """Wait until an arriving chunk is there, or lost; see ``Lease.wait``."""
        arrival = lease.arriving[index]
        try:
            arrival.wait(len(self._format.layout.layers) - 1)
        except ChunkLostError:
            self.lose(lease, index)
        else:
            self._reads.wait_any([arrival.reading], GLANCE)
            self._poll()

    def lose(self, lease: Lease, index: int) -> None:
        """Give up a chunk that will not come; see ``Lease.lost``."""
        self._poll()
        arrival = lease.arriving.get(index)
        if arrival is None:
            if index in lease.sources:  # it has come after all
                lease.withdraw(index)
            return
        late = list(lease.arriving) if arrival.convoy.given_up else [index]
        if arrival.convoy.hangs:  # nor is anything else waited for from now on
            lease.patience = 0.0
            self._stats.read_timeouts += len(late)
        elif arrival.convoy.slow:
            self._stats.recomputed += len(late)
        for one in late:
            self._abandon(lease, one)

    def leave(self, lease: Lease) -> None:
        """A lease ends with reads under way: undo them, or let them end for nobody."""
        for reading in lease.readings.values():
            if not self._reads.drop(reading):
                reading.reader = None
        lease.readings.clear()
        self._poll()
        for index, arrival in list(lease.arriving.items()):
            lease.withdraw(index)
            if not self._reads.drop(arrival.reading):
                self._reads.disown(arrival.reading)

    def _join(self, lease: Lease, index: int, node: Node) -> None:
        """Wait for a read that was started ahead, if it has begun."""
        reading = self._reads.find(node)
        if reading is None or reading.reader is not None:
            return  # another request fills this chunk: compute it, do not keep it
        self._stats.prefetch_late += 1
        if math.isinf(lease.patience) and self._reads.drop(reading):
            return  # it can be read with the others that are on SSD
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

    def _read(self, lease: Lease, stored: Sequence[int]) -> None:
        """Start reading what is on SSD, as far as that promises to pay."""
        outline = self._outline(lease, stored)
        convoy, apart = list[int](), list[range]()
        patient = math.isinf(lease.patience)  # chunk by chunk, more is there in time
        for run in _runs(stored):
            # Nothing before it is computed, so the first forward needs it.
            by_layer = outline.gap(0) >= run.stop and not apart and patient
            earlier = len(convoy) + len(lease.readings) + sum(map(len, apart))
            before = outline.computed_before(run.start)
            first = self._split(run, outline, before, earlier, by_layer=by_layer)
            self._stats.recomputed += first - run.start
            if first == run.start and by_layer:
                convoy += run
            elif first == run.start:
                apart.append(run)
            else:  # with the front being computed, reads come to meet it from the back
                apart.append(range(run.stop - 1, first - 1, -1))
        self._start_convoy(lease, convoy)
        for index in chain.from_iterable(apart):
            chunk = lease.path[index]
            reading = self._reads.start(chunk.node, chunk.id, RUNNING)
            if reading is not None:
                reading.reader, reading.index = lease, index
                lease.readings[index] = reading

    def _start_convoy(self, lease: Lease, indices: Sequence[int]) -> None:
        """Have chunks read side by side, and lend them at once."""
        chunks = [(lease.path[i].node, lease.path[i].id) for i in indices]
        started = zip(indices, self._reads.start_layers(chunks), strict=True)
        readings = {index: one for index, one in started if one is not None}
        if not readings:
            return
        tokens, worth = self._format.layout.chunk_tokens, math.inf
        if self._stop.recompute:
            first, stop = min(readings), max(readings) + 1
            worth = self.planner.computing(first * tokens, (stop - first) * tokens)
        convoy = Convoy(readings, self._reads, lease, worth, self._clock)
        for index, reading in readings.items():
            reading.reader, reading.index = lease, index
            slot = self._dram.slot(reading.node)
            lease.add_arrival(index, slot, Arrival(convoy, index))

    def _outline(self, lease: Lease, others: Container[int]) -> Outline:
        """The prompt, with chunks that will not be computed beside what is lent."""
        there = (range(lease.covered), lease.sources, lease.readings, others)
        tokens = self._format.layout.chunk_tokens
        return Outline(there, len(lease.path), lease.prompt_tokens, tokens)

    def _split(
        self,
        run: range,
        outline: Outline,
        before: int,
        earlier: int,
        *,
        by_layer: bool = False,
    ) -> int:
        """Index of the first chunk of a run to read; those before it are computed.

        Args:
            run: Chunks that could be read.
            outline: The prompt that has them.
            before: Tokens directly before the run that are to be computed anyway.
            earlier: Reads that end before those of the run.
            by_layer: Whether the run, if all of it is read, comes layer by layer.
        """
        if not self._stop.recompute:
            return run.start
        gap = outline.gap(run.stop)
        behind = Behind(gap * outline.chunk_tokens, outline.computed_from(gap))
        return self.planner.split(
            run,
            before=before,
            after=outline.computed_from(run.stop),
            queued=earlier * self._format.file_nbytes,
            behind=behind if by_layer else None,
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
        for at in range(front, self._split(run, self._outline(lease, ()), 0, earlier)):
            if not self._give_back(lease, at):
                break
            taken += 1
        self._stats.recomputed += taken
        return taken > 0

    def _await(self, lease: Lease, index: int) -> None:
        """Wait until any read has ended, as then there is something to decide anew."""
        started = self._clock()
        if self._wait(lease, min(HANGS, lease.patience)):
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
            lease.readings.values(), max(0.0, min(seconds, GLANCE))
        ):
            seconds -= GLANCE
            if seconds <= 0.0:
                return False
            lease.checkpoint()
        return True

    def _abandon(self, lease: Lease, index: int) -> None:
        """Wait for an arriving chunk no more; if it runs, its slot stays with it."""
        reading = lease.arriving[index].reading
        if self._reads.take_back(reading):
            lease.failed(index, self._dram.slot(reading.node))
        else:
            lease.withdraw(index)
            self._reads.disown(reading)

    def _give_back(self, lease: Lease, index: int) -> bool:
        """Turn a read that has not started into a sink."""
        reading = lease.readings[index]
        if not self._reads.take_back(reading):
            return False
        lease.failed(index, self._dram.slot(reading.node))
        return True


def _only_on_ssd(node: Node) -> bool:
    return node.host is Host.NONE and node.disk is Disk.STORED


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
