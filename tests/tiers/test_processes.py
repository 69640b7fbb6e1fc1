"""Other processes: killed at the worst moment, alive on the same folder, forked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

CHILD = Path(__file__).with_name("store_child.py")


class Nursery:
    """Runs ``store_child.py``, which forks one process at a time."""

    def __init__(self) -> None:
        root = CHILD.parents[2]
        paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )

    def ask(self, order: object) -> object:
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def hear(self) -> object:
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


class Child:
    """One process on the folder."""

    def __init__(self, nursery: Nursery, folder: Path, *settings: object) -> None:
        self._nursery = nursery
        self.code: int | None = None
        self.pid = nursery.ask([str(folder), *settings])

    def ask(self, order: object) -> object:
        """Send one line; return the answer, or ``None`` if the child died of it."""
        answer = self._nursery.ask(order)
        return answer if not self._ended(answer) else None

    def end(self) -> int:
        if self.code is None:
            self._ended(self._nursery.ask("end"))
        return self.code

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self._ended(self._nursery.hear())

    def _ended(self, answer: object) -> bool:
        if isinstance(answer, dict):
            self.code = answer["exit"]
        return self.code is not None


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture
def child(kit, nursery) -> Iterator:
    made: list[Child] = []

    def start(chunks: int = 8, *death: object) -> Child:
        made.append(Child(nursery, kit.folder, chunks, *death))
        return made[-1]

    yield start
    for one in made:
        one.end()


PROMPTS = [[1, 2], [3], [1, 2, 4], [5, 6]]


@pytest.mark.parametrize(
    ("death", "left"),
    [
        (("open_new", 3, "after"), "temporary"),
        (("writev", 4, "middle"), "temporary"),
        (("fsync", 3, "after"), "temporary"),
        (("replace", 3, "before"), "temporary"),
        (("replace", 3, "after"), "orphan"),
        (("fsync_folder", 4, "after"), "orphan"),
        (("unlink", 1, "before"), "nothing"),
        (("unlink", 1, "after"), "record"),
    ],
)
def test_killed_at_the_worst_moment(kit, child, death, left):
    chunks = 3
    doomed = child(chunks, *death)
    for prompt in PROMPTS:
        if doomed.ask(prompt) is None:
            break
    assert doomed.end() == -signal.SIGKILL
    names = {path.suffix for path in kit.chunk_files(kit.folder)}
    assert (".tmp" in names) == (left == "temporary")
    files_before = len(kit.chunk_files(kit.folder))

    manager = kit.manager(ssd_chunks=chunks)
    report = manager.check()
    assert report.ok, str(report)
    used = manager._store.used_bytes()
    assert used == kit.file_bytes(kit.folder) <= chunks * kit.file_nbytes
    gone = files_before - len(kit.chunk_files(kit.folder))
    assert gone == (left in ("temporary", "orphan"))
    for prompt in PROMPTS:
        kit.serve(manager, [*kit.prompt(*prompt), 9])
    assert manager.snapshot().corrupt == 0
    assert manager.snapshot().missing == 0
    assert manager.check().ok


def test_another_process_reads_what_this_one_wrote(kit, child):
    other = child()
    assert other.ask([5]) == []
    manager = kit.manager()
    kit.serve(manager, [*kit.prompt(1, 2), 9])
    assert other.ask([1, 2]) == [[0, "ssd"], [1, "ssd"]]
    assert other.ask([3]) == []
    assert kit.serve(manager, [*kit.prompt(3), 9]).tiers == {0: "ssd"}
    assert other.end() == 0
    assert manager.check().ok


def test_eviction_by_another_process_is_a_miss(kit, child):
    other = child(2)
    assert other.ask([1]) == []
    assert other.ask([2]) == []
    manager = kit.manager(ssd_chunks=2)
    for number in (1, 2):
        assert manager.match(kit.keys_of(kit.prompt(number))) == ["ssd"]
    assert other.ask([3]) == []
    assert other.ask([4]) == []
    served = kit.serve(manager, [*kit.prompt(1), 9])
    assert (served.tiers, served.sinks) == ({}, [0])
    assert manager.snapshot().missing == 1
    assert kit.file_bytes(kit.folder) <= 2 * kit.file_nbytes
    assert manager.check().ok
    assert other.end() == 0


def test_files_without_record_go_although_others_are_alive(kit, child):
    # Whoever has the turn at writing knows that nobody else is about to name them.
    other = child()
    assert other.ask([1]) == []
    (good,) = kit.chunk_files(kit.folder)
    orphan = good.with_name("ab" * 32 + ".safetensors")
    writing = good.with_name(f"{good.stem}.{other.pid}.0.tmp")
    foreign = good.with_name("notes.txt")
    for path in (orphan, writing, foreign):
        path.write_bytes(b"?")
    kit.manager().close()
    assert kit.chunk_files(kit.folder) == sorted([good, foreign])
    assert other.ask([1]) == [[0, "dram"]]


def test_a_forked_child_is_told_so(child):
    answer = child().ask("fork")
    assert answer.startswith("StoreError")
    assert "spawn" in answer
