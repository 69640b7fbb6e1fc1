"""SSD -> DRAM: which reads are under way, for whom, and what came of them.

A read is started for a request that runs, or ahead of one that waits; the first can
join the second. A chunk that cannot be read becomes a hole, never an error. Engine
thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from pcr_core.cost import ReadTimes
from pcr_core.index.node import Event, Node
from pcr_core.index.prefix_tree import PrefixTree
from pcr_core.stats import StoreCounters
from pcr_core.tiers.dram import RUNNING, DramTier
from pcr_core.tiers.host_pool import Slot
from pcr_core.tiers.jobs import Io, ReadJob, ReadSpan
from pcr_core.tiers.store.chunk_file import ChunkFormat, ChunkId, ReadOutcome
from pcr_core.tiers.trouble import TroubleLog


class Reader(Protocol):
    """Who waits for a read; ``Lease`` is one.

    Attributes:
        reads: Filled with the times of its reads as they end.
    """

    reads: list[ReadSpan]

    def arrived(self, index: int, slot: Slot) -> None:
        """The chunk is complete and verified."""

    def failed(self, index: int, slot: Slot) -> None:
        """The chunk cannot be read; its slot may be filled instead."""


@dataclass(slots=True, eq=False)
class Reading:
    """One read under way.

    Attributes:
        node: The chunk.
        job: The job.
        reader: Who waits for it, if anybody does.
        index: The chunk's index in the reader's prompt.
    """

    node: Node
    job: ReadJob
    reader: Reader | None = None
    index: int = 0


class ReadIn:
    """Reads under way.

    Args:
        tree: States.
        dram: Slots to read into.
        io: Runs the reads.
        fmt: What a chunk file looks like.
        stats: Where outcomes are counted.
        trouble: Where failures are logged.
        lost: Called with each chunk that could not be read, and how it was lost.

    Attributes:
        times: How long reads take, measured.
        nbytes: Bytes of the slots that are being filled.
    """

    def __init__(
        self,
        tree: PrefixTree,
        dram: DramTier,
        io: Io,
        fmt: ChunkFormat,
        stats: StoreCounters,
        trouble: TroubleLog,
        lost: Callable[[Node, ReadOutcome], None],
    ) -> None:
        self.times = ReadTimes()
        self._tree = tree
        self._dram = dram
        self._io = io
        self._format = fmt
        self._stats = stats
        self._trouble = trouble
        self._lost = lost
        self._readings: dict[ReadJob, Reading] = {}
        self._by_node: dict[Node, Reading] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the slots that are being filled."""
        return len(self._readings) * self._format.layout.nbytes

    @property
    def begun(self) -> int:
        """Reads that cannot be taken back any more."""
        return sum(job.begun for job in self._readings)

    def __iter__(self) -> Iterator[Reading]:
        return iter(list(self._readings.values()))

    def find(self, node: Node) -> Reading | None:
        """The read of a chunk, if one is under way."""
        return self._by_node.get(node)

    def start(self, node: Node, chunk: ChunkId, position: int) -> Reading | None:
        """Start reading a stored chunk.

        Args:
            node: The chunk; stored, and without a copy in DRAM.
            chunk: Its identity.
            position: Queue position of the request that wants it; ``RUNNING`` is
                urgent.

        Returns:
            The read, or ``None`` if there is no slot for it.
        """
        reading = self._prepare(node, chunk, position)
        if reading is not None:
            self._io.read(reading.job)
        return reading

    def start_layers(
        self, chunks: Sequence[tuple[Node, ChunkId]]
    ) -> list[Reading | None]:
        """Start reading stored chunks side by side, layer by layer, for a request.

        Returns:
            A read for each; ``None`` where there is no slot.
        """
        readings = [self._prepare(node, chunk, RUNNING) for node, chunk in chunks]
        jobs = [reading.job for reading in readings if reading is not None]
        if jobs:
            self._io.read_layers(jobs)
        return readings

    def hurry(self, reading: Reading) -> None:
        """Have a read go before those that nobody waits for yet."""
        self._io.hurry(reading.job)

    def take_back(self, reading: Reading) -> bool:
        """Undo a read that has not started; the slot stays with the caller.

        Returns:
            False if it runs already, or has ended.
        """
        if reading.job not in self._readings or not self._io.cancel(reading.job):
            return False
        self._remove(reading)
        return True

    def drop(self, reading: Reading) -> bool:
        """Undo a read that has not started and that nobody needs any more."""
        if not self.take_back(reading):
            return False
        self._dram.free(reading.node, Event.RELEASE)
        return True

    def disown(self, reading: Reading) -> None:
        """Let a read that has begun end for nobody, soon if it goes layer by layer."""
        reading.reader = None
        reading.job.wanted = False

    def wait_any(self, readings: Iterable[Reading], timeout: float) -> bool:
        """Block until one of some reads has ended; it is still to be taken in.

        Returns:
            False if ``timeout`` seconds passed first.
        """
        return self._io.wait_any([reading.job for reading in readings], timeout)

    def wait_layer(self, reading: Reading, layer: int, timeout: float) -> bool:
        """Block until a layer of a chunk is in place, or its read has ended.

        Returns:
            False if ``timeout`` seconds passed first.
        """
        return self._io.wait_layer(reading.job, layer, timeout)

    def apply(self, job: ReadJob) -> None:
        """Take in a finished read: publish it, or make a hole of it."""
        reading = self._readings[job]
        self._remove(reading)
        node, reader = reading.node, reading.reader
        self._measure(job)
        if reader is not None:
            reader.reads += job.spans
        if job.outcome is ReadOutcome.OK:
            self._stats.read += 1
            self._stats.read_bytes += self._format.file_nbytes
            self._tree.advance_host(node, Event.FILL)
            if reader is not None:
                reader.arrived(reading.index, self._dram.slot(node))
            elif not job.urgent:
                self._dram.fetched.add(node)
            return
        if job.outcome is not ReadOutcome.DROPPED:
            self._count_lost(job)
            self._lost(node, job.outcome or ReadOutcome.FAILED)
        if reader is not None:
            reader.failed(reading.index, self._dram.slot(node))
        else:
            self._dram.free(node, Event.RELEASE)

    def _prepare(self, node: Node, chunk: ChunkId, position: int) -> Reading | None:
        """Make a read that is still to be queued, if there is a slot for it."""
        # Making room may bring news of another process, such as that the chunk is gone.
        self._tree.pin([node])
        slot = self._dram.reserve(node, chunk, position)
        self._tree.unpin([node])
        if slot is None:
            return None
        job = ReadJob(self._format, chunk, slot.view, urgent=position == RUNNING)
        reading = self._readings[job] = self._by_node[node] = Reading(node, job)
        return reading

    def _measure(self, job: ReadJob) -> None:
        """Learn from what was read, be it a part."""
        if job.outcome in (ReadOutcome.OK, ReadOutcome.DROPPED):
            layers = len(self._format.layout.layers)
            size = self._format.file_nbytes * job.layers // layers
            self.times.observe(size, job.seconds, parallel=job.parallel)

    def _remove(self, reading: Reading) -> None:
        del self._readings[reading.job]
        del self._by_node[reading.node]

    def _count_lost(self, job: ReadJob) -> None:
        name = job.chunk.key.hex()[:12]
        if job.outcome is ReadOutcome.CORRUPT:
            self._stats.corrupt += 1
            self._trouble.once("corrupt", f"chunk {name} is damaged and was removed")
        elif job.outcome is ReadOutcome.MISSING:
            self._stats.missing += 1
            self._trouble.once("missing", f"the file of chunk {name} is gone")
        else:
            self._stats.read_errors += 1
            self._trouble.once("read", f"chunk {name} cannot be read", job.error)
