"""Several processes on one folder: killed at random, all at once, one at a time."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from pcr_core.errors import StoreError
from pcr_core.tiers import ChunkStore
from pcr_core.tiers.jobs import ReadJob, WriteJob, WriteOutcome, finish_group
from pcr_core.tiers.store import locks
from pcr_core.tiers.store.chunk_file import ReadOutcome

SCRIPT = Path(__file__).with_name("store_crowd.py")
FIRST_DOCUMENT, PREFIXES, QUESTIONS = 1000, 3, 4


class Nursery:
    """Runs ``store_crowd.py``, which forks."""

    def __init__(self) -> None:
        root = SCRIPT.parents[2]
        paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, SCRIPT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )

    def ask(self, order: list) -> int:
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


class Crowd:
    """The processes of one test on its folder; what is left of them is killed."""

    def __init__(self, nursery: Nursery, folder: Path, logs: Path) -> None:
        self._nursery, self._folder, self._logs = nursery, folder, logs
        self._alive: list[int] = []

    def start(self, work: str, log: str = "log", **settings) -> int:
        settings |= {"folder": str(self._folder), "log": str(self._logs / log)}
        self._alive.append(self._nursery.ask(["start", work, settings]))
        return self._alive[-1]

    def wait(self, pid: int) -> int:
        self._alive.remove(pid)
        return self._nursery.ask(["wait", pid])

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        assert self.wait(pid) == -signal.SIGKILL

    def open_folder(self) -> str:
        assert self.wait(self.start("open_folder")) == 0
        return (self._logs / "log").read_text()

    def hang(self, how: str) -> int:
        """Have a process take a lock and keep it."""
        pid = self.start("hang", how=how)
        while not (self._logs / "log").exists():
            time.sleep(0.001)
        return pid

    def close(self) -> None:
        for pid in list(self._alive):
            self.kill(pid)


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture
def crowd(nursery, kit, tmp_path) -> Iterator[Crowd]:
    crowd = Crowd(nursery, kit.folder, tmp_path)
    yield crowd
    crowd.close()


class Log:
    """What processes have told so far."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def lines(self) -> list[list]:
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def grow(self, lines: int) -> None:
        """Wait until there are this many more."""
        wanted = len(self.lines()) + lines
        while len(self.lines()) < wanted:
            time.sleep(0.001)

    def of(self, kind: str) -> list[list]:
        return [line[1:] for line in self.lines() if line[0] == kind]


@pytest.fixture
def check(kit, tmp_path):
    """Open the folder and compare everything with everything."""

    def check(chunks: int, documents: int, log: Log) -> Counter:
        assert log.of("bad") == []
        forgotten = {document for document, _ in log.of("forgot")}
        numbers = range(FIRST_DOCUMENT, FIRST_DOCUMENT + documents)
        budget = chunks * kit.file_nbytes
        store = ChunkStore(kit.folder, budget)
        try:
            assert store.audit(fix=False) == []
            assert store.used_bytes() == kit.file_bytes(kit.folder) <= budget
            records = store.records()
            served = 0
            for path in itertools.product(range(PREFIXES), numbers, range(QUESTIONS)):
                tokens = kit.prompt(path[0], path[1], 100 + path[2])
                for index, key in enumerate(kit.keys_of(tokens)):
                    if key in records:
                        assert index == 0 or path[1] not in forgotten
                        assert read(kit, store, tokens, index) == kit.content(key)
                        served += 1
            # A kill may come between a removal and the line that tells of it.
            known = store.forgotten_since(0).documents
            assert {number.to_bytes(16, "big") for number in forgotten} <= known
        finally:
            store.close()
        return Counter(itertools.chain.from_iterable(log.of("read")))

    return check


def read(kit, store, tokens, index) -> bytes:
    chunk = kit.chunk_id(tokens, index)
    job = ReadJob(kit.format, chunk, memoryview(bytearray(kit.layout.nbytes)))
    store.read(job)
    assert job.outcome is ReadOutcome.OK
    return bytes(job.view)


@pytest.mark.parametrize("kills", [8, pytest.param(100, marks=pytest.mark.stress)])
def test_killed_at_random_moments(kit, crowd, check, tmp_path, kills):
    chance = random.Random(kills)
    log = Log(tmp_path / "log")
    for seed in range(kills):
        pid = crowd.start(
            "live",
            seed=seed,
            chunks=20,
            documents=40 + 10 * seed,
            steps=10**9,
        )
        log.grow(chance.randrange(2, 60))
        time.sleep(chance.random() * 0.01)
        crowd.kill(pid)
        check(20, 40 + 10 * seed, log)
    assert log.of("forgot")
    assert log.of("read").count(["ok"]) > 0


@pytest.mark.parametrize(
    ("processes", "steps"),
    [(2, 120), pytest.param(4, 2500, marks=pytest.mark.stress)],
)
def test_all_at_once(kit, crowd, check, tmp_path, processes, steps):
    """One of them is killed on the way, and one has a quota of its own."""
    log = Log(tmp_path / "log")
    documents = 30 + steps // 4
    common = {
        "chunks": 24,
        "documents": documents,
    }
    pids = [
        crowd.start("live", seed=seed, steps=steps, **common)
        for seed in range(processes - 1)
    ]
    pids.append(
        crowd.start("live", seed=98, steps=steps, tenant="t" * 16, quota=6, **common)
    )
    doomed = crowd.start("live", seed=99, steps=10**9, **common)
    log.grow(20 * processes)
    crowd.kill(doomed)
    assert [crowd.wait(pid) for pid in pids] == [0] * processes
    outcomes = check(24, documents, log)
    assert outcomes["ok"] > 0
    assert outcomes["missing"] > 0
    written = Counter(itertools.chain.from_iterable(w for (w,) in log.of("wrote")))
    assert written["stored"] > 0
    assert written["no room"] > 0
    assert log.of("forgot")


# --- one at a time ---


@pytest.fixture
def store(kit):
    made = []

    def make(chunks: int = 16, **settings) -> ChunkStore:
        made.append(ChunkStore(kit.folder, chunks * kit.file_nbytes, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def job(kit):
    def job(*path, **more) -> WriteJob:
        tokens = kit.prompt(*path)
        chunk = kit.chunk_id(tokens, len(path) - 1)
        view = memoryview(kit.content(chunk.key))
        return WriteJob(
            kit.format, chunk, view, 1, ancestors=kit.keys_of(tokens), **more
        )

    return job


def key(kit, *path):
    return kit.keys_of(kit.prompt(*path))[-1]


def test_a_process_that_hangs_in_its_turn(kit, store, job, crowd, monkeypatch):
    monkeypatch.setattr(locks, "WAIT_SECONDS", 0.05)
    one = store()
    one.commit([job(1)])
    pid = crowd.hang("turn")
    finish_group(one, [late := job(2)])
    assert late.outcome is WriteOutcome.FAILED
    assert f"process {pid} does not finish" in str(late.error)
    # Reading goes on, and so does closing; opening says whom to end.
    assert set(one.lookup([key(kit, 1)])) == {key(kit, 1)}
    with pytest.raises(StoreError, match=f"process {pid}"):
        one.audit(fix=False)
    one.close()
    with pytest.raises(StoreError, match=f"process {pid}"):
        store()
    crowd.kill(pid)
    two = store()
    two.commit([again := job(2)])
    assert again.outcome is WriteOutcome.STORED


def test_a_process_that_hangs_while_it_opens(kit, store, crowd, monkeypatch):
    store().close()
    monkeypatch.setattr(locks, "WAIT_SECONDS", 0.05)
    pid = crowd.hang("opening")
    with pytest.raises(StoreError, match="is opening it does not finish"):
        store()
    crowd.kill(pid)
    store()


def test_a_process_that_dies_in_its_turn(kit, store, job, crowd):
    """The next writer of any process removes what it left, before it adds to it."""
    one = store(1)
    pid = crowd.hang("turn")
    left = kit.folder / "chunks" / f"{key(kit, 9).hex()}.{pid}.0.tmp"
    left.write_bytes(bytes(kit.file_nbytes))
    crowd.kill(pid)
    one.commit([good := job(1)])
    assert good.outcome is WriteOutcome.STORED
    assert kit.file_bytes(kit.folder) == kit.file_nbytes


def test_another_engine_of_this_process_that_hangs(kit, store, job, monkeypatch):
    monkeypatch.setattr(locks, "WAIT_SECONDS", 0.05)
    entered, go = threading.Event(), threading.Event()

    class Slow(kit.FaultyFiles):
        def fsync(self, fd):
            entered.set()
            assert go.wait(60)
            super().fsync(fd)

    slow, other = store(files=Slow()), store()
    first = job(1)
    thread = threading.Thread(target=slow.commit, args=[[first]])
    thread.start()
    assert entered.wait(60)
    finish_group(other, [late := job(2)])
    assert "another engine of this process" in str(late.error)
    # Opening needs no turn when there is nothing to remove.
    assert store().records() == {}
    go.set()
    thread.join(60)
    assert first.outcome is WriteOutcome.STORED
    assert other.audit(fix=False) == []


def test_turns_exclude_each_other(kit, store, crowd, tmp_path):
    store()
    (tmp_path / "number").write_text("0")
    pids = [crowd.start("count", log="number", steps=100) for _ in range(3)]
    assert [crowd.wait(pid) for pid in pids] == [0, 0, 0]
    assert (tmp_path / "number").read_text() == "300"


def test_a_turn_ends_with_its_process_although_a_child_lives_on(
    kit, store, job, crowd, tmp_path
):
    one = store()
    pid = crowd.hang("turn with a child")
    crowd.kill(pid)
    one.commit([good := job(1)])
    assert good.outcome is WriteOutcome.STORED
    os.kill(int((tmp_path / "log").read_text()), signal.SIGKILL)


# --- an index that somebody cut short ---


def test_an_index_cut_short_is_an_error_and_not_a_signal(kit, store, job, crowd):
    one = store(10**6)
    for number in range(40):
        one.commit([job(number, 1, 2), job(number, 3)])
    one.close()
    data = kit.folder / "index" / "data.mdb"
    whole = data.read_bytes()
    said = {}
    for length in range(0, len(whole), 4096):
        data.write_bytes(whole[:length])
        said[length] = crowd.open_folder()
    assert said.pop(0) == "0 chunks, 0 problems"
    assert all("cannot be opened" in text for text in said.values())
    assert len(said) > 10
