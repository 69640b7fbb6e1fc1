"""Random jobs, faults and reopenings of two tenants' stores, against a plain dict.

The model knows paths of small numbers instead of keys, and says for every group what
must come of each job and what must be in the folder afterwards.
"""

from __future__ import annotations

import copy
import errno
import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from pcr_core.tiers import ChunkStore
from pcr_core.tiers.jobs import (
    DeleteJob,
    DocumentJob,
    ForgetJob,
    ReadJob,
    TouchJob,
    WriteJob,
    WriteOutcome,
    fail,
)
from pcr_core.tiers.store.chunk_file import ReadOutcome

Chunks = tuple[int, ...]
PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple)
BACK = st.integers(0, 2)
"""How many epochs behind a job was queued."""
TENANTS = (b"", b"t" * 16)
FAULTS = {
    "open_new": errno.EROFS,
    "writev": errno.ENOSPC,
    "fsync": errno.EIO,
    "replace": errno.EACCES,
    "fsync_folder": errno.EIO,
    "unlink": errno.EACCES,
}
WRITE = st.tuples(st.just("write"), PATHS, BACK)
ORDER = st.one_of(
    WRITE,
    WRITE,
    st.tuples(st.just("delete"), PATHS),
    st.tuples(st.just("touch"), PATHS),
    st.tuples(st.just("see"), st.integers(0, 2), PATHS, BACK),
    st.tuples(st.just("forget"), st.integers(0, 2), st.none() | PATHS),
)


def prefixes(path: Chunks) -> set[Chunks]:
    return {path[: end + 1] for end in range(len(path))}


def head_of(path: Chunks, document: int) -> set[Chunks]:
    """The first chunk of a path that has any of the document."""
    if document not in path:
        return set()
    return {path[: path.index(document) + 1]}


class Model:
    """What a folder holds. Room is counted in files."""

    def __init__(self) -> None:
        self.stored: dict[Chunks, tuple[int, int]] = {}  # stamp, tenant
        self.files: set[Chunks] = set()
        self.heads: dict[int, set[Chunks]] = {}
        self.log: list[tuple[int | None, set[Chunks]]] = []
        self.written: set[Chunks] = set()
        self.flushes = False

    @property
    def bare(self) -> set[Chunks]:
        above = set().union(*(prefixes(path) for path in self.stored))
        return above - set(self.stored)

    @property
    def stray(self) -> set[Chunks]:
        return self.files - set(self.stored)

    def room(self, budget: int, tenant: int, quota: int | None) -> int:
        mine = sum(owner == tenant for _, owner in self.stored.values())
        free = budget - len(self.stored) - self.surplus
        return free if quota is None else min(free, quota - mine)

    def begin(self, broken: str | None) -> None:
        self.broken, self.written, self.flushes = broken, set(), False
        self.sweep()

    def sweep(self) -> None:
        if self.broken != "unlink":
            self.files -= self.stray
        self.surplus = len(self.stray)

    def write(self, path, stamp, epoch, limits) -> WriteOutcome:
        gone = set().union(*(heads for _, heads in self.log[epoch:]))
        if gone & prefixes(path):
            return WriteOutcome.FORGOTTEN
        if path in self.stored:
            return WriteOutcome.STORED
        if self.room(*limits) < 1:
            return WriteOutcome.NO_ROOM
        if self.broken in ("open_new", "writev", "fsync", "replace"):
            return WriteOutcome.FAILED
        self.stored[path] = stamp, limits[1]
        self.files.add(path)
        self.written.add(path)
        self.flushes = True
        return WriteOutcome.STORED

    def delete(self, path) -> None:
        if path in self.stored and self.broken != "unlink":
            del self.stored[path]
            self.files.discard(path)

    def see(self, document, heads, epoch) -> None:
        if any(document == past for past, _ in self.log[epoch:]):
            self.remove(None, heads)
        else:
            self.heads.setdefault(document, set()).update(heads)

    def remove(self, document, heads) -> set[Chunks]:
        """Forget; return the chunks whose records are in the receipt."""
        known = self.bare.union(self.stored)
        gone = {path for path in known if heads & prefixes(path)}
        for path in gone & set(self.stored):
            del self.stored[path]
        self.log.append((document, heads))
        self.flushes = True
        self.sweep()
        return gone

    def undo(self, tried: Model) -> None:
        """The index refused: files that were removed are gone all the same."""
        self.files = tried.files - tried.written

    def recover(self) -> None:
        self.stored = {p: one for p, one in self.stored.items() if p in self.files}
        known = self.bare.union(self.stored)
        self.heads = {d: heads & known for d, heads in self.heads.items()}

    def shrink(self, budget, tenant, quota) -> None:
        for most, owner in ((quota, tenant), (budget, None)):
            by_age = sorted(
                path for path in self.stored if owner in (None, self.stored[path][1])
            )
            by_age.sort(key=lambda path: self.stored[path])
            for path in (
                by_age[: max(0, len(by_age) - most)] if most is not None else ()
            ):
                del self.stored[path]
        self.files = set(self.stored)


class StoreMachine(RuleBasedStateMachine):
    def __init__(self, kit) -> None:
        super().__init__()
        self.kit = kit
        self.folder = Path(tempfile.mkdtemp(dir=kit.folder.parent))
        self.files = kit.FaultyFiles()
        self.model = Model()
        self.stamp = 0
        self.stores: list[ChunkStore] = []

    @initialize(budget=st.integers(2, 8), quota=st.integers(0, 4))
    def start(self, budget, quota):
        self.limits = [(budget, 0, None), (budget, 1, quota)]
        # What each store tries to register again after a group was refused.
        self.unregistered = [[], []]
        size = self.kit.file_nbytes
        for most, tenant, own in self.limits:
            store = ChunkStore(
                self.folder,
                most * size,
                tenant=TENANTS[tenant],
                quota_bytes=None if own is None else own * size,
                files=self.files,
            )
            self.stores.append(store)

    @rule(budget=st.integers(2, 8), quota=st.integers(0, 4))
    def reopen(self, budget, quota):
        self.files.broken.clear()
        self.close()
        self.start(budget, quota)
        self.model.recover()
        for limits in self.limits:
            self.model.shrink(*limits)

    def close(self):
        while self.stores:
            self.stores.pop().close()

    def teardown(self):
        self.close()
        shutil.rmtree(self.folder)

    @rule(call=st.sampled_from(sorted(FAULTS)))
    def break_call(self, call):
        self.files.broken = {call: FAULTS[call]}

    @rule()
    def repair_calls(self):
        self.files.broken.clear()

    # --- jobs ---

    @rule(orders=st.lists(ORDER, min_size=1, max_size=4), tenant=st.integers(0, 1))
    def commit(self, orders, tenant):
        tried = copy.deepcopy(self.model)
        tried.begin(next(iter(self.files.broken), None))
        for seen in self.unregistered[tenant]:
            tried.see(*seen)
        jobs, wanted = [], []
        for name, *details in orders:
            job, want = getattr(self, name)(tried, self.limits[tenant], *details)
            if name == "see":
                self.unregistered[tenant].append(self.seen)
            jobs.append(job)
            wanted.append(want)
        refused = tried.flushes and tried.broken == "fsync_folder"
        try:
            self.stores[tenant].commit(jobs)
        except OSError as error:
            assert refused
            fail(jobs, error)
            self.model.undo(tried)
            wanted = [self.refused] * len(jobs)
        else:
            assert not refused
            self.model = tried
            self.unregistered[tenant] = []
        for job, want in zip(jobs, wanted, strict=True):
            want(job)

    @staticmethod
    def refused(job):
        if isinstance(job, WriteJob):
            assert job.outcome is WriteOutcome.FAILED
        elif isinstance(job, ForgetJob):
            assert (job.epoch, job.keys) == (0, ())
        assert job.error is not None

    def write(self, tried, limits, path, back):
        self.stamp += 1
        epoch = max(0, len(tried.log) - back)
        outcome = tried.write(path, self.stamp, epoch, limits)
        tokens = self.kit.prompt(*path)
        chunk = self.kit.chunk_id(tokens, len(path) - 1)
        view = memoryview(self.kit.content(chunk.key))
        job = WriteJob(self.kit.format, chunk, view, self.stamp, epoch=epoch)
        job.ancestors = self.kit.keys_of(tokens)

        def check(job):
            assert job.outcome is outcome

        return job, check

    def delete(self, tried, limits, path):
        tried.delete(path)
        return DeleteJob([self.key(path)]), lambda job: None

    def touch(self, tried, limits, path):
        self.stamp += 1
        if path in tried.stored:
            tried.stored[path] = self.stamp, tried.stored[path][1]
        return TouchJob({self.key(path): self.stamp}), lambda job: None

    def see(self, tried, limits, document, path, back):
        epoch = max(0, len(tried.log) - back)
        heads = head_of(path, document)
        self.seen = document, heads, epoch
        tried.see(*self.seen)
        keys = [self.key(head) for head in heads]
        return DocumentJob({self.digest(document): keys}, epoch), lambda job: None

    def forget(self, tried, limits, document, path):
        extra = head_of(path, document) if path is not None else set()
        heads = tried.heads.pop(document, set()) | extra
        sizes = {path for path in tried.stored if heads & prefixes(path)}
        present = sizes & tried.files
        gone = tried.remove(document, heads)
        epoch = len(tried.log)
        removed = sizes - tried.files
        kept = present & tried.files

        def check(job):
            assert set(job.keys) == {self.key(path) for path in gone}
            assert set(job.files) == {self.name(path) for path in removed}
            assert job.nbytes == len(removed) * self.kit.file_nbytes
            # A later job of the group may have written one of them anew.
            left = {self.name(path) for path in kept & self.model.stray}
            assert left <= set(job.left)
            assert job.epoch == epoch

        keys = [self.key(head) for head in extra]
        return ForgetJob(self.digest(document), keys), check

    def digest(self, document):
        return bytes([document]) * 16

    def key(self, path):
        return self.kit.keys_of(self.kit.prompt(*path))[-1]

    def name(self, path):
        return f"{self.key(path).hex()}.safetensors"

    # --- what must hold ---

    @rule(path=PATHS)
    def read(self, path):
        self.files.broken.clear()
        chunk = self.kit.chunk_id(self.kit.prompt(*path), len(path) - 1)
        view = memoryview(bytearray(self.kit.layout.nbytes))
        job = ReadJob(self.kit.format, chunk, view)
        self.stores[0].read(job)
        if path in self.model.stored and path in self.model.files:
            assert job.outcome is ReadOutcome.OK
            assert bytes(view) == self.kit.content(chunk.key)
        else:
            assert job.outcome is ReadOutcome.MISSING

    @invariant()
    def the_index_is_what_the_model_says(self):
        if not self.stores:
            return
        model = self.model
        contents = self.stores[1].contents()
        stored = {key: (one.stamp, one.tenant) for key, one in contents.stored.items()}
        assert stored == {
            self.key(path): (stamp, TENANTS[tenant])
            for path, (stamp, tenant) in model.stored.items()
        }
        assert set(contents.bare) == {self.key(path) for path in model.bare}
        size = self.kit.file_nbytes
        assert self.stores[0].used_bytes() == len(model.stored) * size
        for number, store in enumerate(self.stores):
            mine = [owner for _, owner in model.stored.values() if owner == number]
            assert store.tenant_bytes() == len(mine) * size
        for epoch in range(len(model.log) + 1):
            heads = set().union(*(heads for _, heads in model.log[epoch:]))
            documents = {one for one, _ in model.log[epoch:] if one is not None}
            assert self.stores[0].forgotten_since(epoch) == (
                len(model.log),
                {self.key(head) for head in heads},
                {self.digest(one) for one in documents},
            )

    @invariant()
    def the_folder_is_what_the_model_says(self):
        if not self.stores:
            return
        found = {path.name for path in self.kit.chunk_files(self.folder)}
        assert found == {self.name(path) for path in self.model.files}
        assert len(found) <= self.limits[0][0]

    @invariant()
    def the_audit_finds_lost_and_stray_files_and_nothing_else(self):
        if not self.stores:
            return
        missing = set(self.model.stored) - self.model.files
        assert set(self.stores[0].audit(fix=False)) == {
            *(f"chunk {self.name(p)[:12]}: its file is missing" for p in missing),
            *(f"file {self.name(p)}: belongs to no chunk" for p in self.model.stray),
        }


def test_machine(kit):
    run_state_machine_as_test(
        lambda: StoreMachine(kit),
        settings=settings(max_examples=60, stateful_step_count=30, deadline=None),
    )
