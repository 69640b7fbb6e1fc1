"""Several processes on one folder: killed at random, and alive all at once."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from pcr_core.tiers import ChunkStore
from pcr_core.tiers.chunk_file import ReadOutcome
from pcr_core.tiers.jobs import ReadJob

SCRIPT = Path(__file__).with_name("store_crowd.py")
FIRST_DOCUMENT, PREFIXES, QUESTIONS = 1000, 3, 4


class Crowd:
    """Starts, kills and awaits processes; reads what they tell."""

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

    def start(self, work: str, **settings) -> int:
        return self._ask(["start", work, settings])

    def wait(self, pid: int) -> int:
        return self._ask(["wait", pid])

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        assert self.wait(pid) == -signal.SIGKILL

    def _ask(self, order: list) -> int:
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


@pytest.fixture(scope="module")
def crowd() -> Iterator[Crowd]:
    crowd = Crowd()
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
            folder=str(kit.folder),
            log=str(log.path),
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
        "folder": str(kit.folder),
        "log": str(log.path),
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
