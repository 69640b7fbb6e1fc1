"""Processes that use one cache folder at the same time, and may be killed.

This process imports what is slow to import. For each line ``["start", WORK, SETTINGS]``
on standard input it forks a process that does that work, and answers its pid; for
``["wait", PID]`` it answers the exit code. A process tells what it sees by lines of
JSON in the file ``SETTINGS["log"]``.

Documents are numbers from ``FIRST_DOCUMENT``; a prompt is a prefix, a document and a
question, one chunk each. A document that was forgotten is never used again by anybody
who can know of it, so it must not come back.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import sys
import time
from pathlib import Path

spec = importlib.util.spec_from_file_location(
    "tier_kit", Path(__file__).with_name("conftest.py")
)
assert spec is not None
assert spec.loader is not None
kit = importlib.util.module_from_spec(spec)
sys.modules["tier_kit"] = kit
spec.loader.exec_module(kit)

from pcr_core.tiers.jobs import (  # noqa: E402
    DeleteJob,
    DocumentJob,
    ForgetJob,
    ReadJob,
    WriteJob,
    WriteOutcome,
)
from pcr_core.tiers.store.chunk_file import ReadOutcome  # noqa: E402
from pcr_core.tiers.store.locks import FolderLock, WriteLock  # noqa: E402

FIRST_DOCUMENT = 1000
PREFIXES, QUESTIONS = 3, 4


def digest(document: int) -> bytes:
    return document.to_bytes(16, "big")


class Watching(kit.Files):
    """Adds up the folder's bytes after every call that makes them more.

    Only the process whose turn it is to write changes the folder, so that this sees
    every moment.
    """

    def __init__(self, folder: Path, budget: int, tell) -> None:
        self.folder, self.budget, self.tell = folder, budget, tell

    def _watch(self, result):
        used = sum(path.stat().st_size for path in self.folder.iterdir())
        if used > self.budget:
            self.tell(["bad", f"{used} bytes in a folder for {self.budget}"])
        return result

    def open_new(self, path):
        return self._watch(super().open_new(path))

    def writev(self, fd, buffers):
        return self._watch(super().writev(fd, buffers))

    def replace(self, source, target):
        return self._watch(super().replace(source, target))


class Worker:
    """Reads, writes, evicts and forgets at random."""

    def __init__(self, settings: dict) -> None:
        self.random = random.Random(settings["seed"])
        self.log = os.open(settings["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.documents = settings["documents"]
        folder, budget = Path(settings["folder"]), settings["chunks"] * kit.FILE_BYTES
        self.chunks = folder / "chunks"
        files = Watching(self.chunks, budget, self.tell)
        tenant = settings.get("tenant", "").encode()
        quota = settings.get("quota")
        self.store = kit.ChunkStore(
            folder,
            budget,
            tenant=tenant,
            quota_bytes=quota and quota * kit.FILE_BYTES,
            files=files,
        )
        self.quota = quota
        self.epoch = 0
        self.forgotten: set[int] = set()

    def tell(self, what: list) -> None:
        os.write(self.log, json.dumps(what).encode() + b"\n")

    def step(self) -> None:
        self.epoch, _, documents = self.store.forgotten_since(self.epoch)
        self.forgotten |= {int.from_bytes(one, "big") for one in documents}
        alive = [
            FIRST_DOCUMENT + number
            for number in range(self.documents)
            if FIRST_DOCUMENT + number not in self.forgotten
        ]
        if not alive:
            return
        path = [
            self.random.randrange(PREFIXES),
            self.random.choice(alive),
            100 + self.random.randrange(QUESTIONS),
        ]
        chance = self.random.random()
        if chance < 0.55:
            self.write(path)
        elif chance < 0.95:
            self.read(path)
        else:
            self.forget(path[1])

    def write(self, path: list[int]) -> None:
        tokens = kit.prompt(*path)
        keys = kit.keys_of(tokens)
        jobs = [DocumentJob({digest(path[1]): [keys[1]]}, epoch=self.epoch)]
        for index in range(3):
            chunk = kit.chunk_id(tokens, index)
            view = memoryview(kit.content(chunk.key))
            job = WriteJob(kit.FORMAT, chunk, view, time.time_ns() - index)
            job.ancestors, job.epoch = keys, self.epoch
            jobs.append(job)
        # Others may forget the document now.
        time.sleep(self.random.random() * 0.002)
        self.store.commit(jobs)
        outcomes = [job.outcome for job in jobs[1:]]
        self.tell(["wrote", [one.value for one in outcomes]])
        if self.quota and self.store.tenant_bytes() > self.quota * kit.FILE_BYTES:
            self.tell(["bad", "a quota was passed"])
        if WriteOutcome.NO_ROOM in outcomes:
            records = self.store.records()
            by_age = sorted(records, key=lambda key: records[key].stamp)
            self.store.commit([DeleteJob(by_age[: self.random.randrange(1, 6)])])

    def read(self, path: list[int]) -> None:
        tokens = kit.prompt(*path)
        for index in range(3):
            chunk = kit.chunk_id(tokens, index)
            view = memoryview(bytearray(kit.LAYOUT.nbytes))
            job = ReadJob(kit.FORMAT, chunk, view)
            self.store.read(job)
            if job.outcome is ReadOutcome.OK and bytes(view) != kit.content(chunk.key):
                self.tell(["bad", f"wrong bytes of {path}"])
            if job.outcome in (ReadOutcome.CORRUPT, ReadOutcome.FAILED):
                self.tell(["bad", f"{job.outcome} for {path}: {job.error}"])
            self.tell(["read", job.outcome.value])

    def forget(self, document: int) -> None:
        job = ForgetJob(digest(document))
        self.store.commit([job])
        if job.left:
            self.tell(["bad", f"could not remove {job.left}"])
        self.tell(["forgot", document, len(job.keys)])
        for name in holders(self.chunks, document):
            self.tell(["bad", f"{name} holds document {document}"])


def holders(folder: Path, document: int) -> list[str]:
    """Files that hold tokens of a document, whatever their name."""
    tokens = kit.prompt(document)
    needle = b"".join(token.to_bytes(4, "little") for token in tokens).hex().encode()
    found = []
    for path in folder.iterdir():
        try:
            if needle in path.read_bytes():
                found.append(path.name)
        except FileNotFoundError:
            continue
    return found


def live(settings: dict) -> None:
    worker = Worker(settings)
    worker.tell(["begun"])
    for _ in range(settings["steps"]):
        worker.step()
    worker.store.close()
    worker.tell(["ended"])


def open_folder(settings: dict) -> None:
    """Open and read everything; an index cut short must not kill the process."""
    try:
        store = kit.ChunkStore(Path(settings["folder"]), 2**40)
        said = f"{len(store.records())} chunks, {len(store.audit(fix=False))} problems"
        store.close()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    Path(settings["log"]).write_text(said)


def hang(settings: dict) -> None:
    """Take the turn at writing, or hold the folder while opening it, and stay there."""
    folder, log = Path(settings["folder"]), Path(settings["log"])
    lock = FolderLock(folder) if settings["how"] == "opening" else WriteLock(folder)
    with lock.alone() if settings["how"] == "opening" else lock.turn():
        child = os.getpid()
        if settings["how"] == "turn with a child":
            child = os.fork() or os.getpid()
        if child != os.getpid() or settings["how"] != "turn with a child":
            half = log.with_suffix(".half")
            half.write_text(str(child))
            half.rename(log)
        time.sleep(600)


def count(settings: dict) -> None:
    """Add one to a number in a file, again and again, in turns."""
    lock = WriteLock(Path(settings["folder"]))
    number = Path(settings["log"])
    for _ in range(settings["steps"]):
        with lock.turn():
            number.write_text(str(int(number.read_text()) + 1))


WORK = {one.__name__: one for one in (live, open_folder, hang, count)}


def main() -> None:
    for line in iter(sys.stdin.readline, ""):
        order, *rest = json.loads(line)
        if order == "wait":
            _, status = os.waitpid(rest[0], 0)
            answer = os.waitstatus_to_exitcode(status)
        else:
            answer = os.fork()
            if answer == 0:
                code = 1
                try:
                    WORK[rest[0]](rest[1])
                    code = 0
                finally:
                    os._exit(code)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
