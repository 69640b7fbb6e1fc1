"""Threads of the SSD tier: order, bounds, dying workers, closing. No sleeps."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict

import pytest

from pcr_core.tiers import InlineIo, IoPool
from pcr_core.tiers.jobs import (
    DeleteJob,
    ReadJob,
    TouchJob,
    WriteJob,
    WriteOutcome,
)
from pcr_core.tiers.read_queue import Busy
from pcr_core.tiers.store.chunk_file import ReadOutcome
from tests.tiers.conftest import LAYOUT
from tests.tiers.virtual import VirtualTime


class Gate:
    """A backend that works only while it is open, and may be told to raise."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.entered = threading.Semaphore(0)
        self.groups: list[list] = []
        self.reads: list[ReadJob] = []
        self.error: BaseException | None = None

    def _pass(self) -> None:
        self.entered.release()
        assert self.open.wait(60)
        if self.error is not None:
            raise self.error

    def read(self, job):
        self._pass()
        self.reads.append(job)
        job.outcome = ReadOutcome.OK

    def commit(self, jobs):
        self._pass()
        self.groups.append(list(jobs))
        for job in jobs:
            if isinstance(job, WriteJob):
                job.outcome = WriteOutcome.STORED


@pytest.fixture
def gate():
    gate = Gate()
    yield gate
    gate.open.set()


@pytest.fixture
def pool(gate):
    made = []

    def make(**limits) -> IoPool:
        made.append(IoPool(gate, **limits))
        return made[-1]

    yield make
    gate.open.set()
    for one in made:
        one.close()


def write_job(kit, number: int) -> WriteJob:
    chunk = kit.chunk_id(kit.prompt(number), 0)
    view = memoryview(bytearray(kit.layout.nbytes))
    return WriteJob(kit.format, chunk, view, stamp=number)


def read_job(kit, number: int = 0) -> ReadJob:
    chunk = kit.chunk_id(kit.prompt(number), 0)
    return ReadJob(kit.format, chunk, memoryview(bytearray(kit.layout.nbytes)))


def test_reads_start_in_order_and_wait_covers_them(kit, gate, pool):
    io = pool(readers=1)
    gate.open.set()
    jobs = [read_job(kit, number) for number in range(20)]
    for job in jobs:
        io.read(job)
    io.wait(jobs)
    assert gate.reads == jobs
    assert io.poll() == jobs
    assert io.poll() == []


class OneByOne(Gate):
    """Lets one read through for each ticket."""

    def __init__(self) -> None:
        super().__init__()
        self.tickets = threading.Semaphore(0)

    def read(self, job):
        assert self.tickets.acquire(timeout=60)
        job.outcome = ReadOutcome.OK


def test_waiting_for_any_ends_with_the_first(kit):
    backend = OneByOne()
    io = IoPool(backend, readers=1)
    jobs = [read_job(kit, number) for number in range(3)]
    for job in jobs:
        io.read(job)
    assert not io.wait_any(jobs, 0.01)
    assert not any(job.begun for job in jobs[1:])
    for job in jobs:
        backend.tickets.release()
        assert io.wait_any([job for job in jobs if job.outcome is None], 60)
    assert io.poll() == jobs
    assert all(job.begun for job in jobs)
    assert io.wait_any(jobs, 0.0)  # they have ended
    io.close()


def test_nobody_waits_for_a_read_whose_reader_died(kit, gate, pool):
    io = pool(readers=1)
    gate.error = SystemExit("a bug")
    jobs = [read_job(kit), read_job(kit)]
    for job in jobs:
        io.read(job)
    gate.open.set()
    assert io.wait_any(jobs, 60)
    assert io.wait(jobs, 60)


# --- reads layer by layer ---

LAYERS = len(LAYOUT.layers)


class LayerByLayer(Gate):
    """One layer of a leg goes through for each ticket of its first chunk.

    Attributes:
        legs: What each reader was given, by its first chunk.
    """

    def __init__(self) -> None:
        super().__init__()
        self.open.set()
        self.legs: dict[bytes, list[ReadJob]] = {}
        self.tickets: defaultdict[bytes, threading.Semaphore] = defaultdict(
            lambda: threading.Semaphore(0)
        )
        self.dies: BaseException | None = None
        self.lost: set[ReadJob] = set()

    def read_layers(self, jobs):
        first = jobs[0].chunk.key
        self.legs[first] = list(jobs)
        self.entered.release()
        for layer in range(LAYERS):
            assert self.tickets[first].acquire(timeout=60)
            if self.dies is not None:
                raise self.dies
            for job in jobs:
                if job.outcome is None and not job.wanted:
                    job.outcome = ReadOutcome.DROPPED
                elif job in self.lost:
                    job.outcome = ReadOutcome.CORRUPT
                elif job.outcome is None:
                    job.layers = layer + 1
            if layer == LAYERS - 1:
                for job in jobs:
                    job.outcome = job.outcome or ReadOutcome.OK
            yield

    def let(self, job: ReadJob, layers: int = 1) -> None:
        """Let the leg that a job is the first of come so many layers further."""
        for _ in range(layers):
            self.tickets[job.chunk.key].release()


@pytest.fixture
def legs():
    return LayerByLayer()


@pytest.fixture
def layered(legs):
    made = []

    def make(readers: int) -> IoPool:
        made.append(IoPool(legs, readers=readers))
        return made[-1]

    yield make
    for leg in list(legs.legs.values()):
        legs.let(leg[0], LAYERS)
    for one in made:
        one.close()


def test_layers_are_shared_out_among_the_readers(kit, legs, layered):
    io = layered(2)
    jobs = [read_job(kit, number) for number in range(5)]
    io.read_layers(jobs)
    for _ in range(2):
        assert legs.entered.acquire(timeout=60)
    assert legs.legs == {
        jobs[0].chunk.key: jobs[0::2],
        jobs[1].chunk.key: jobs[1::2],
    }
    assert not io.wait_layer(jobs[0], 0, 0.01)
    legs.let(jobs[0])
    assert io.wait_layer(jobs[0], 0, 60)
    assert io.wait_layer(jobs[4], 0, 60)
    assert not io.wait_layer(jobs[1], 0, 0.01)
    assert not io.wait_layer(jobs[0], 1, 0.01)
    assert io.poll() == []
    legs.let(jobs[0], LAYERS)
    assert io.wait(jobs[0::2], 60)
    assert io.poll() == jobs[0::2]
    legs.let(jobs[1], LAYERS)
    assert io.wait(jobs, 60)
    assert {job.outcome for job in jobs} == {ReadOutcome.OK}
    assert all(1.0 <= job.parallel <= 2.0 for job in jobs)


def test_a_chunk_that_is_lost_is_handed_over_at_once(kit, legs, layered):
    io = layered(1)
    jobs = [read_job(kit, number) for number in range(3)]
    legs.lost.add(jobs[1])
    io.read_layers(jobs)
    legs.let(jobs[0])
    assert io.wait_layer(jobs[1], LAYERS - 1, 60)
    assert io.poll() == [jobs[1]]
    assert [job.outcome for job in jobs] == [None, ReadOutcome.CORRUPT, None]
    legs.let(jobs[0], LAYERS)
    assert io.wait(jobs, 60)
    assert io.poll() == [jobs[0], jobs[2]]


@pytest.mark.parametrize("error", [SystemExit("a bug"), ValueError("a bug")])
def test_a_leg_whose_reader_dies_or_fails(kit, legs, layered, error):
    io = layered(2)
    jobs = [read_job(kit, number) for number in range(4)]
    io.read_layers(jobs)
    for _ in range(2):
        assert legs.entered.acquire(timeout=60)
    legs.let(jobs[0])
    assert io.wait_layer(jobs[2], 0, 60)
    legs.dies = error
    legs.let(jobs[0])
    assert io.wait_layer(jobs[0], LAYERS - 1, 60)
    assert io.wait(jobs[0::2], 60)
    assert {job.outcome for job in jobs[0::2]} == {ReadOutcome.FAILED}
    assert {job.error for job in jobs[0::2]} == {error}
    assert [job.layers for job in jobs] == [1, 0, 1, 0]
    legs.dies = None
    legs.let(jobs[1], LAYERS)
    assert io.wait(jobs, 60)
    assert {job.outcome for job in jobs[1::2]} == {ReadOutcome.OK}
    again = [read_job(kit, number) for number in range(5, 7)]
    io.read_layers(again)  # by as many readers as there are left
    for job in again:
        legs.let(job, LAYERS)
    assert io.wait(again, 60)


def test_without_a_reader_layers_fail_at_once(kit, legs, layered):
    io = layered(1)
    legs.dies = SystemExit("a bug")
    first, second = read_job(kit, 1), read_job(kit, 2)
    io.read_layers([first])
    legs.let(first)
    assert io.wait([first], 60)
    io.read_layers([second])
    assert second.outcome is ReadOutcome.FAILED
    assert io.wait_layer(second, 0, 0.0)


def test_what_has_not_begun_of_them_is_taken_back(kit, legs, layered):
    io = layered(1)
    running, *jobs = [read_job(kit, number) for number in range(4)]
    io.read_layers([running])
    assert legs.entered.acquire(timeout=60)
    io.read_layers(jobs)
    assert not io.cancel(running)
    assert io.cancel(jobs[0])
    assert not io.cancel(jobs[0])
    legs.let(running, LAYERS)
    legs.let(jobs[1], LAYERS)
    assert io.wait([running, *jobs], 60)
    assert legs.legs[jobs[1].chunk.key] == jobs[1:]
    assert all(io.cancel(job) is False for job in jobs)


def test_layers_go_before_reads_made_ahead(kit, legs, layered):
    io = layered(1)
    running, job, ahead = [read_job(kit, number) for number in range(3)]
    io.read_layers([running])
    assert legs.entered.acquire(timeout=60)
    ahead.urgent = False
    io.read(ahead)
    io.read_layers([job])
    legs.let(running, LAYERS)
    assert legs.entered.acquire(timeout=60)
    assert not ahead.begun
    legs.let(job, LAYERS)
    assert io.wait([ahead], 60)


def test_closing_ends_them_with_their_next_layer(kit, legs, layered):
    io = layered(1)
    jobs = [read_job(kit, number) for number in range(2)]
    io.read_layers(jobs)
    legs.let(jobs[0])
    assert io.wait_layer(jobs[1], 0, 60)
    closer = threading.Thread(target=io.close)
    closer.start()
    while jobs[0].wanted:
        threading.Event().wait(0.001)
    legs.let(jobs[0], LAYERS)
    closer.join()
    assert {job.outcome for job in jobs} == {ReadOutcome.DROPPED}
    late = read_job(kit, 5)
    io.read_layers([late])
    assert late.outcome is ReadOutcome.FAILED


def test_how_many_readers_are_busy_on_average():
    time = VirtualTime()
    busy = Busy(time)
    mark = busy.change(1)
    assert busy.mean(mark) == 1.0  # no time has passed
    time.now = 1.0
    busy.change(1)
    time.now = 3.0
    assert busy.mean(mark) == pytest.approx((1 + 2 * 2) / 3)
    busy.change(-1)
    time.now = 5.0
    assert busy.mean(mark) == pytest.approx((1 + 2 * 2 + 2) / 5)


# --- writes ---


def test_waiting_writes_are_grouped(kit, gate, pool):
    io = pool(group=3)
    jobs = [write_job(kit, number) for number in range(5)]
    io.write(jobs[0])
    assert gate.entered.acquire(timeout=60)
    for job in jobs[1:]:
        io.write(job)
    gate.open.set()
    assert io.flush(60)
    assert gate.groups == [jobs[:1], jobs[1:4], jobs[4:]]


def test_all_jobs_of_the_writer_keep_their_place(kit, gate, pool):
    io = pool()
    io.write(write_job(kit, 1))
    assert gate.entered.acquire(timeout=60)
    jobs = [write_job(kit, 2), DeleteJob([]), TouchJob(), write_job(kit, 1)]
    for job in jobs:
        io.write(job)
    gate.open.set()
    assert io.flush(60)
    assert gate.groups[1] == jobs


def test_flush_gives_up_at_the_timeout(kit, gate, pool):
    io = pool()
    io.write(write_job(kit, 1))
    assert not io.flush(0.01)
    gate.open.set()
    assert io.flush(60)


@pytest.mark.parametrize("io_class", [IoPool, InlineIo])
def test_an_exception_fails_its_jobs_only(kit, gate, io_class):
    gate.open.set()
    gate.error = ValueError("bug")
    io = io_class(gate)
    read, write, delete = read_job(kit), write_job(kit, 1), DeleteJob([])
    io.read(read)
    io.write(write)
    io.write(delete)
    io.wait([read])
    assert io.flush(60)
    assert read.outcome is ReadOutcome.FAILED
    assert write.outcome is WriteOutcome.FAILED
    assert read.error is write.error is delete.error is gate.error
    gate.error = None
    again = read_job(kit)
    io.read(again)
    io.wait([again])
    assert again.outcome is ReadOutcome.OK
    io.close()


def test_a_dead_reader_leaves_the_work_to_the_others(kit, gate, pool, caplog):
    io = pool(readers=2)
    gate.error = SystemExit("killed")
    dying = read_job(kit)
    io.read(dying)
    assert gate.entered.acquire(timeout=60)
    with caplog.at_level(logging.CRITICAL, logger="pcr_core.tiers"):
        gate.open.set()
        io.wait([dying])
    assert dying.outcome is ReadOutcome.FAILED
    assert "reader thread died" in caplog.text
    gate.error = None
    later = read_job(kit)
    io.read(later)
    io.wait([later])
    assert later.outcome is ReadOutcome.OK


def test_the_last_dead_reader_fails_everything(kit, gate, pool):
    io = pool(readers=1)
    gate.error = SystemExit("killed")
    waiting = [read_job(kit, number) for number in range(3)]
    for job in waiting:
        io.read(job)
    gate.open.set()
    io.wait(waiting)
    late = read_job(kit)
    io.read(late)
    io.wait([late])
    assert {job.outcome for job in [*waiting, late]} == {ReadOutcome.FAILED}
    assert io.poll() == [*waiting, late]


def test_a_dead_writer_fails_everything(kit, gate, pool):
    io = pool(group=1)
    gate.error = SystemExit("killed")
    jobs = [write_job(kit, number) for number in range(3)]
    for job in jobs:
        io.write(job)
    gate.open.set()
    assert io.flush(60)
    late = write_job(kit, 9)
    io.write(late)
    assert {job.outcome for job in [*jobs, late]} == {WriteOutcome.FAILED}
    assert io.poll() == [*jobs, late]


def test_close_finishes_what_is_queued(kit, gate):
    io = IoPool(gate)
    gate.open.set()
    jobs = [write_job(kit, number) for number in range(40)]
    for job in jobs:
        io.write(job)
    io.close()
    assert {job.outcome for job in jobs} == {WriteOutcome.STORED}


def test_close_drops_what_does_not_fit_into_its_time(kit, gate):
    io = IoPool(gate, group=1)
    jobs = [write_job(kit, number) for number in range(3)]
    for job in jobs:
        io.write(job)
    assert gate.entered.acquire(timeout=60)
    closer = threading.Thread(target=io.close, args=(0.01,))
    closer.start()
    io.wait(jobs[1:])
    gate.open.set()
    closer.join()
    assert [job.outcome for job in jobs] == [
        WriteOutcome.STORED,
        WriteOutcome.DROPPED,
        WriteOutcome.DROPPED,
    ]
    late = write_job(kit, 9)
    io.write(late)
    assert late.outcome is WriteOutcome.FAILED


def test_threads_are_named(gate):
    before = set(threading.enumerate())
    io = IoPool(gate, readers=2)
    names = {thread.name for thread in set(threading.enumerate()) - before}
    assert names == {"pcr-read-0", "pcr-read-1", "pcr-write"}
    io.close()
