"""Everything that can happen to a folder and two managers on it, against a plain dict.

Tree, pool, store and managers are the real ones. Reads and writes end when the machine
says so, in an order it chooses, fail, hang, are taken back or dropped; files are
damaged; managers are restarted with other limits, or die. The model remembers of every
byte string what it stands for: a chunk, and the epoch of the request that computed it.

Document ``d`` is the chunk with the number ``d``. Forgetting it covers every chunk with
that number at or before it, as far as it was computed in an earlier epoch.
"""

from __future__ import annotations

import errno
import hashlib
import os
import random
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pcr_core.errors import CancelledError, ChunkLostError
from pcr_core.index.chunk import ChunkKey, Namespace, chunk_keys
from pcr_core.index.node import Disk, Host
from pcr_core.tiers import (
    WRITE_POLICIES,
    ChunkStore,
    ForgetJob,
    HostPool,
    InlineIo,
    Lease,
    NoStore,
    SlabPlan,
    TierManager,
    TierSettings,
    stop_policy,
)
from pcr_core.tiers.audit import audit_memory
from pcr_core.tiers.jobs import ReadJob
from pcr_core.tiers.store.chunk_file import ChunkFormat, ChunkId, chunk_key
from pcr_core.tiers.store.chunk_index import IndexTroubleError
from tests.tiers.conftest import (
    FILE_BYTES,
    LAYOUT,
    NAMESPACE,
    Clock,
    FaultyFiles,
)
from tests.tiers.stepwise import StepIo
from tests.tiers.virtual import VirtualTime

Chunks = tuple[int, ...]
USERS = st.integers(0, 1)
SEEDS = st.integers(0, 2**32)
"""Details of a step are drawn from one number: hypothesis is fond of small examples, in
which little happens."""
# Few, and with common beginnings, so that much is asked for again.
POPULAR = ((0, 1), (0, 1, 2), (0, 1, 2, 1), (0, 2, 1), (1, 0), (1, 0, 0, 2), (2,), ())
FAULTS = {
    "open_new": errno.EACCES,
    "writev": errno.ENOSPC,
    "fsync": errno.EIO,
    "replace": errno.EROFS,
    "fsync_folder": errno.EIO,
    "open_read": errno.EMFILE,
    "preadv": errno.EIO,
    "unlink": errno.EACCES,
    "index read": errno.EIO,
    "index write": errno.ENOSPC,
}
TENANTS = (b"", b"t" * 16)
NAMESPACES = (NAMESPACE, Namespace.of([("test", b"tiny"), ("tenant", b"t")]))
FORMATS = tuple(ChunkFormat(LAYOUT, namespace) for namespace in NAMESPACES)


@dataclass(frozen=True)
class Plan:
    """How a manager is set up. Sizes are in chunks; no SSD chunks is no SSD tier."""

    slots: int
    ssd: int
    quota: int | None
    tenant: int
    eviction: str
    write_policy: str
    stop: str
    stepwise: bool
    shortest_head: int | None

    @property
    def settings(self) -> TierSettings:
        return TierSettings(
            eviction=self.eviction,
            stop=stop_policy(self.stop, 2.5),
            write_policy=WRITE_POLICIES[self.write_policy](),
            tenant=TENANTS[self.tenant],
            quota_bytes=self.quota_bytes,
            shortest_head=self.shortest_head,
        )

    @property
    def quota_bytes(self) -> int | None:
        return None if self.quota is None else self.quota * FILE_BYTES


def any_path(draw: random.Random) -> Chunks:
    if draw.random() < 0.7:
        return draw.choice(POPULAR)
    return tuple(draw.randrange(3) for _ in range(draw.randint(1, 4)))


def any_document(draw: random.Random) -> int:
    return draw.choice([2, 2, 1, 0])


def any_plan(draw: random.Random) -> Plan:
    return Plan(
        slots=draw.choice([1, 2, 3, 5, 8, 8]),
        ssd=draw.choice([0, 1, 2, 3, 5, 8, 8, 8]),
        quota=draw.choice([None, None, 1, 2, 4]),
        tenant=draw.choice([0, 0, 1]),
        eviction=draw.choice(["lookahead-lru", "lru", "pgdsf", "adaptive"]),
        write_policy=draw.choice(["write_through", *WRITE_POLICIES]),
        stop=draw.choice(["best_effort", "wait_complete", "timeout", "off"]),
        stepwise=draw.random() < 0.8,
        shortest_head=draw.choice([None, 1]),
    )


def tokens_of(chunks: Chunks) -> list[int]:
    """All chunks begin alike, so that any may be a head."""
    return [token for number in chunks for token in (7, number, number, number)]


class Inline(InlineIo):
    """Every read takes a second."""

    def read(self, job: ReadJob) -> None:
        super().read(job)
        job.seconds = 1.0


class FaultyIndex:
    """The index of a store, refusing when told to; a write is undone at its end."""

    READS = ("lookup", "contents", "used_bytes", "tenant_bytes", "epoch")

    def __init__(self, index, files: FaultyFiles) -> None:
        self._index = index
        self._files = files

    def __getattr__(self, name: str):
        if name in self.READS or name == "forgotten_since":
            self._fail("index read")
        return getattr(self._index, name)

    @contextmanager
    def write(self) -> Iterator:
        with self._index.write() as txn:
            yield txn
            self._fail("index write")

    def _fail(self, what: str) -> None:
        if what in self._files.broken:
            raise IndexTroubleError(self._files.broken[what], "refused")


@dataclass(eq=False)
class Wanted:
    """A prompt in a queue."""

    keys: list[ChunkKey]
    tokens: list[int]
    usable: int


@dataclass(eq=False)
class Opened:
    """A lease, and the epoch in which its request began.

    Attributes:
        seen: Bytes of each chunk that counted as there, while it is lent.
    """

    lease: Lease
    epoch: int
    seen: dict[int, bytes] = field(default_factory=dict)


@dataclass(eq=False)
class User:
    """One manager, and what the machine is doing with it.

    Attributes:
        forgotten: Without a folder: the documents it has forgotten, in order.
    """

    plan: Plan
    manager: TierManager
    io: StepIo | InlineIo
    leases: list[Opened] = field(default_factory=list)
    forgetting: list[tuple[int, ForgetJob]] = field(default_factory=list)
    forgotten: list[int] = field(default_factory=list)

    @property
    def store(self) -> ChunkStore | None:
        store = self.manager._store
        return store if isinstance(store, ChunkStore) else None

    @property
    def epoch(self) -> int:
        return self.manager._writes.epoch if self.store else len(self.forgotten)

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is under way."""
        io = self.io
        waiting = isinstance(io, StepIo) and (io.reads or io.begun or io.writes)
        return not (waiting or io._done or self.leases or self.forgetting)


class TierMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.folder = Path(tempfile.mkdtemp(prefix="pcr-cache-", dir=memory))
        self.files = FaultyFiles()
        self.clock = Clock()
        self.time = VirtualTime()
        self.users: list[User] = []
        self.paths: dict[ChunkKey, tuple[int, Chunks]] = {}
        self.meaning: dict[bytes, tuple[ChunkKey, int]] = {}
        self.wholes: defaultdict[ChunkKey, list[bytes]] = defaultdict(list)
        self.forgotten: list[tuple[int, int]] = []  # epoch, document
        self.limit = 0
        self.quotas = {tenant: None for tenant in TENANTS}
        self.unlink_failed = False

    # --- life ---

    @initialize(seed=SEEDS)
    def start(self, seed):
        self.random = random.Random(seed)
        self.users = [self.opened(any_plan(self.random)) for _ in range(2)]

    def opened(self, plan: Plan) -> User:
        store: ChunkStore | NoStore = NoStore()
        if plan.ssd:
            store = ChunkStore(
                self.folder,
                plan.ssd * FILE_BYTES,
                tenant=TENANTS[plan.tenant],
                quota_bytes=plan.quota_bytes,
                files=self.files,
                least_read=1,
            )
            store._index = FaultyIndex(store._index, self.files)
            self.raise_limits(plan)
        io = (
            StepIo(store, self.time, self.random.randrange)
            if plan.stepwise
            else Inline(store)
        )
        manager = TierManager(
            LAYOUT,
            NAMESPACES[plan.tenant],
            HostPool(LAYOUT, SlabPlan(plan.slots, LAYOUT.nbytes)),
            store,
            io,
            plan.settings,
            clock=self.clock,
            timer=self.time,
        )
        if self.random.random() < 0.5:  # or nothing is known of speeds yet
            self.measure_speeds(manager)
        return User(plan, manager, io)

    def measure_speeds(self, manager: TierManager) -> None:
        token, read = (10 ** self.random.uniform(-4, 1) for _ in range(2))
        manager.prefill_times.observe(0, 8, token)
        manager._reads.times.observe(FILE_BYTES, read)

    def raise_limits(self, plan: Plan) -> None:
        """What the folder may hold is what the most generous user so far allowed."""
        self.limit = max(self.limit, plan.ssd * FILE_BYTES)
        mine = plan.quota_bytes or 10**9
        tenant = TENANTS[plan.tenant]
        self.quotas[tenant] = max(self.quotas[tenant] or 0, mine)

    @rule(which=st.sampled_from([(0,), (1,), (0, 1)]), seed=SEEDS, dies=st.booleans())
    def restart(self, which, seed, dies):
        draw = random.Random(seed)
        self.files.broken.clear()
        for number in which:
            self.end(self.users[number], dies=dies)
        if which == (0, 1):  # the first to open the folder cleans up in it
            self.limit = 0
            self.quotas = {tenant: None for tenant in TENANTS}
            self.unlink_failed = False
        for number in which:
            self.users[number] = self.opened(any_plan(draw))

    def end(self, user: User, *, dies: bool, drains: bool = False) -> None:
        if dies:  # its jobs, its slots and its leases die with it
            if user.store is not None:
                user.store.close()
            return
        for document, job in list(user.forgetting):
            self.finish(user, document, job)
        for opened in list(user.leases):
            self.end_lease(user, opened)
        if drains:
            while not user.is_quiet:
                user.manager.poll()
                if isinstance(user.io, StepIo):
                    user.io.run_all()
            self.nothing_is_left(user)
        user.manager.close()

    def teardown(self):
        try:
            self.files.broken.clear()
            for user in self.users:
                self.end(user, dies=False, drains=True)
            if self.users:
                store = ChunkStore(self.folder, 100 * FILE_BYTES)
                self.right_files_under_right_names(store)
                store.close()
        finally:
            for user in self.users:
                if user.store is not None:
                    user.store.close()
            shutil.rmtree(self.folder)

    def nothing_is_left(self, user: User) -> None:
        manager = user.manager
        assert not manager._forgetting._doomed
        assert not manager._writes._writing
        assert not manager._reads._readings
        assert not manager._room._deleting
        assert not manager._catalogue.leaving
        room = manager._room
        assert (room._coming, room._leaving, room._own_leaving) == (0, 0, 0)

    # --- the model ---

    def request(self, user: User, chunks: Chunks) -> Wanted:
        tokens = [*tokens_of(chunks), 7, 9]
        number = user.plan.tenant
        keys = chunk_keys(NAMESPACES[number], tokens, LAYOUT.chunk_tokens)
        for index, key in enumerate(keys):
            self.paths[key] = number, chunks[: index + 1]
        return Wanted(keys, tokens, len(keys))

    def bytes_of(self, key: ChunkKey, epoch: int) -> bytes:
        """What a request of that epoch computes."""
        name = key + epoch.to_bytes(4, "little")
        data = hashlib.shake_256(name).digest(LAYOUT.nbytes)
        self.meaning[data] = key, epoch
        self.wholes[key] = [*self.wholes[key], data]
        return data

    def last_forgotten(self, key: ChunkKey, events) -> int:
        """The last of some epochs in which a chunk was forgotten; 0 if in none."""
        _, chunks = self.paths[key]
        return max((epoch for epoch, d in events if d in chunks), default=0)

    def must_be_right(self, user: User, key: ChunkKey, data: bytes, known: int) -> None:
        """Bytes lent for a chunk to somebody who knew of so many epochs."""
        assert data in self.meaning, "garbage was lent"
        meant, epoch = self.meaning[data]
        assert meant == key, "another chunk was lent"
        events = self.forgotten
        if user.store is None:
            events = list(enumerate(user.forgotten, start=1))
        events = [(at, document) for at, document in events if at <= known]
        assert epoch >= self.last_forgotten(key, events), "a forgotten chunk was lent"

    def sources_are_right(self, user: User, opened: Opened) -> None:
        """What is lent, as far as it is there, and that it stays as it was."""
        lease, ends = opened.lease, LAYOUT.layer_offsets
        assert lease.arriving.keys() <= lease.sources.keys()
        assert lease.tiers.keys() == lease.sources.keys()
        for gone in opened.seen.keys() - lease.sources.keys():
            del opened.seen[gone]
        for index, slot in lease.sources.items():
            key, there = lease.keys[index], LAYOUT.nbytes
            if index in lease.arriving:
                there = ends[lease.arriving[index].layers]
            data = bytes(slot.view[:there])
            assert data.startswith(opened.seen.get(index, b"")), "lent bytes changed"
            opened.seen[index] = data
            if data:
                wholes = self.wholes[key]
                whole = next((one for one in wholes if one.startswith(data)), data)
                self.must_be_right(user, key, whole, opened.epoch)

    # --- requests ---

    @rule(which=USERS, seed=SEEDS)
    def open_lease(self, which, seed):
        draw = random.Random(seed)
        self.open(
            self.users[which], any_path(draw), usable=draw.choice([4, 4, 4, 2, 0])
        )

    def open(self, user: User, chunks: Chunks, usable: int = 4) -> Opened | None:
        """Do what the engine does before it computes; three at a time at most."""
        user.manager.catch_up()
        want = self.request(user, chunks)
        self.register(user, chunks, want)
        if len(user.leases) == 3:  # a request that is cancelled before it gets anything
            return None
        known = user.epoch
        usable = min(usable, len(want.keys))
        resident = self.random.choice([0, 0, self.random.randrange(len(want.tokens))])
        lease = user.manager.lease(want.keys, want.tokens, usable, resident)
        opened = Opened(lease, known)
        user.leases.append(opened)
        self.sources_are_right(user, opened)
        assert lease.covered == min(resident // LAYOUT.chunk_tokens, len(want.keys))
        self.heads_are_right(user, opened, want.tokens)
        return opened

    def heads_are_right(self, user: User, opened: Opened, tokens: list[int]) -> None:
        """They hold what the prompt has at their place, behind the same tokens."""
        for index, head in opened.lease.heads.items():
            self.must_be_right(user, head.node.key, bytes(head.slot.view), opened.epoch)
            start = index * LAYOUT.chunk_tokens
            _, chunks = self.paths[head.node.key]
            mine = tokens[: start + head.tokens]
            assert tokens_of(chunks)[: len(mine)] == mine
            assert len(chunks) == index + 1
            assert 0 < head.tokens < len(tokens) - start
            assert index not in opened.lease.sources
            assert index not in opened.lease.pending

    def register(self, user: User, chunks: Chunks, want: Wanted) -> None:
        heads = {bytes([d]) * 16: want.keys[chunks.index(d)] for d in set(chunks)}
        user.manager.register(heads)

    @precondition(lambda self: any(user.leases for user in self.users))
    @rule(seed=SEEDS)
    def settle(self, seed):
        draw = random.Random(seed)
        _, opened = self.any_lease(draw)
        for index in sorted(opened.lease.pending)[: draw.randint(1, 4)]:
            opened.lease.settle(index)
            assert index not in opened.lease.pending

    @precondition(lambda self: any(user.leases for user in self.users))
    @rule(seed=SEEDS)
    def forward(self, seed):
        """Go through some layers of all that is lent; one in eight is cancelled."""
        draw = random.Random(seed)
        user, opened = self.any_lease(draw)
        lease, looks = opened.lease, draw.choice([0, 1, *[10**6] * 6])

        def look():
            nonlocal looks
            looks -= 1
            if looks < 0:
                raise CancelledError("nobody waits any more")

        lease.checkpoint = look
        try:
            self.go_through(user, opened, draw.randint(1, len(LAYOUT.layers)))
        except CancelledError:
            self.end_lease(user, opened, filled=0, waits=False)

    def go_through(self, user: User, opened: Opened, layers: int) -> None:
        lease = opened.lease
        for layer in range(layers):
            for index in sorted(lease.arriving):
                try:
                    lease.arriving[index].wait(layer)
                except ChunkLostError as error:
                    lost = error.index
                    assert lost == index
                    lease.lost(lost)
                    assert index not in lease.sources
                    self.go_through(user, opened, layers)
                    return
                assert lease.arriving[index].layers > layer
            self.sources_are_right(user, opened)

    @precondition(lambda self: any(user.leases for user in self.users))
    @rule(seed=SEEDS)
    def end_any_lease(self, seed):
        draw = random.Random(seed)
        user, opened = self.any_lease(draw)
        self.end_lease(
            user,
            opened,
            filled=draw.choice([4, 4, 4, 2, 1, 0]),
            waits=draw.random() < 0.8,
        )

    @rule(seed=SEEDS)
    def serve(self, seed):
        """Some requests from beginning to end, and what happens meanwhile."""
        draw = random.Random(seed)
        for _ in range(draw.randint(3, 8)):
            which = draw.randrange(2)
            opened = self.open(self.users[which], any_path(draw))
            self.step(which, draw)
            if opened is not None:
                self.end_lease(self.users[which], opened)
                self.step(which, draw)

    @rule(seed=SEEDS)
    def serve_more(self, seed):
        self.serve(seed)

    def any_lease(self, draw: random.Random) -> tuple[User, Opened]:
        return draw.choice(
            [(user, opened) for user in self.users for opened in user.leases]
        )

    def end_lease(
        self, user: User, opened: Opened, *, filled: int = 4, waits: bool = True
    ) -> None:
        user.leases.remove(opened)
        lease = opened.lease
        if waits:
            lease.wait()
            assert not lease.pending
            assert not lease.arriving
        self.sources_are_right(user, opened)
        assert all(at >= lease.covered for at in lease.sources), "on the device"
        for at, slot in lease.sinks.items():
            assert at not in lease.sources
            assert at not in lease.pending
            slot.view[:] = self.bytes_of(lease.keys[at], opened.epoch)
            if at < filled:
                lease.filled(at)
            else:
                slot.view[:10] = b"unfinished"
        lease.close()
        lease.close()

    # --- the queue ---

    @rule(which=USERS, seed=SEEDS)
    def look_ahead(self, which, seed):
        draw, user = random.Random(seed), self.users[which]
        if draw.random() < 0.3:
            user.manager.hint(self.request(user, any_path(draw)))
        queue = [any_path(draw) for _ in range(draw.randint(0, 3))]
        user.manager.look_ahead([self.request(user, chunks) for chunks in queue])

    # --- documents ---

    @rule(which=USERS, seed=SEEDS)
    def forget(self, which, seed):
        draw, user = random.Random(seed), self.users[which]
        document = any_document(draw)
        job = user.manager.begin_forget(bytes([document]) * 16)
        user.forgetting.append((document, job))
        self.note_forgotten(user)
        user.manager.end_forget(job)  # as far as it is known by now
        if user.store is None:
            user.forgotten.append(document)
        if draw.random() < 0.5:
            self.finish(user, document, job)

    @precondition(lambda self: any(user.forgetting for user in self.users))
    @rule(seed=SEEDS)
    def end_forget(self, seed):
        all_ = [(user, *one) for user in self.users for one in user.forgetting]
        self.finish(*random.Random(seed).choice(all_))

    def finish(self, user: User, document: int, job: ForgetJob) -> None:
        user.manager.wait_for(job)
        self.note_forgotten(user)
        user.forgetting.remove((document, job))
        removed = user.manager.end_forget(job)
        assert len(set(removed.dram)) == len(removed.dram)

    def note_forgotten(self, user: User) -> None:
        """Take down what the store has forgotten by now."""
        for document, job in user.forgetting:
            if job.epoch and (job.epoch, document) not in self.forgotten:
                self.forgotten.append((job.epoch, document))

    @rule(which=USERS)
    def catch_up(self, which):
        user = self.users[which]
        user.manager.catch_up()
        if user.leases or not user.is_quiet:
            return
        for node in user.manager._tree.nodes():
            if node.host is Host.READY:
                data = bytes(user.manager._dram.view(node))
                self.must_be_right(user, node.key, data, user.epoch)

    # --- what the threads do ---

    @rule(which=USERS, seed=SEEDS)
    def some_steps(self, which, seed):
        draw = random.Random(seed)
        for _ in range(draw.randint(1, 6)):
            self.step(which, draw)

    def step(self, which: int, draw: random.Random) -> None:
        """One thing happens on another thread, or is heard of."""
        user, io = self.users[which], self.users[which].io
        number = draw.randrange(12)
        if number < 3:
            user.manager.poll()
        elif not isinstance(io, StepIo):
            return
        elif number < 5 and io.reads:
            io.begin_read(draw.randrange(len(io.reads)))
        elif number < 8 and io.begun:
            io.step_read(draw.randrange(len(io.begun)))
        else:
            io.run_writes(draw.randint(1, 5))
            self.note_forgotten(user)

    @rule(
        which=USERS, what=st.sampled_from(["hang", "go on", "measure", "flush", "fix"])
    )
    def upkeep(self, which, what):
        user = self.users[which]
        if what == "measure":
            self.measure_speeds(user.manager)
        elif what == "flush":
            assert user.manager.flush()
            self.note_forgotten(user)
        elif what == "fix" and user.store is not None:
            self.files.broken.clear()
            user.manager.check(fix=True)
            self.note_forgotten(user)
            assert user.store.audit(fix=False) == []
        elif isinstance(user.io, StepIo):
            user.io.hanging = what == "hang"

    # --- what disks do ---

    @rule(call=st.sampled_from(["damage", "damage", "repair", *FAULTS]), seed=SEEDS)
    def trouble(self, call, seed):
        if call == "repair":
            self.files.broken.clear()
        elif call in FAULTS:
            self.files.broken[call] = FAULTS[call]
            self.unlink_failed |= call == "unlink"
        elif paths := self.chunk_files():
            self.damage(random.Random(seed), paths)

    def damage(self, draw: random.Random, paths: list[Path]) -> None:
        path = draw.choice(paths)
        how = draw.choice(["flip", "cut", "delete", "swap"])
        raw = bytearray(path.read_bytes())
        if how == "delete" or not raw:
            path.unlink()
        elif how == "cut":
            os.truncate(path, draw.randrange(len(raw)))
        elif how == "swap":
            path.write_bytes(draw.choice(paths).read_bytes())
        else:
            raw[draw.randrange(len(raw))] ^= 1
            path.write_bytes(raw)

    # --- what must hold ---

    @contextmanager
    def calm(self) -> Iterator[None]:
        broken, self.files.broken = self.files.broken, {}
        yield
        self.files.broken = broken

    def chunk_files(self) -> list[Path]:
        folder = self.folder / "chunks"
        return sorted(folder.iterdir()) if folder.exists() else []

    @invariant()
    def memory_adds_up(self):
        for user in self.users:
            manager = user.manager
            held = sum(len(opened.lease.pinned) for opened in user.leases)
            slots = manager._dram.slots
            assert audit_memory(manager._tree, manager._pool, slots, held) == []
            assert len(slots) <= user.plan.slots
            writes, room = manager._writes, manager._room
            assert {node.key for node in manager._dram.siblings} == set(slots)
            for node in [*writes._unsaved, *writes._saved, *manager._dram.fetched]:
                assert node.host is Host.READY
            writing = {n for n in manager._tree.nodes() if n.disk is Disk.WRITING}
            assert set(writes._writing.values()) == writing
            assert room._coming == len(writing) * FILE_BYTES
            assert room._leaving == sum(size for size, _ in room._deleting.values())
            readings = manager._reads._readings.values()
            filling = {n for n in manager._tree.nodes() if n.host is Host.FILLING}
            assert {reading.node for reading in readings} <= filling

    @invariant()
    def every_copy_hangs_below_its_namespace(self):
        roots = {namespace.root for namespace in NAMESPACES}
        for user in self.users:
            for node in user.manager._tree.nodes():
                while node.parent is not None:
                    node = node.parent
                assert node.key in roots

    @invariant()
    def what_is_lent_stays_as_it_is(self):
        for user in self.users:
            for opened in user.leases:
                self.sources_are_right(user, opened)
                lease = opened.lease
                assert lease.sinks.keys().isdisjoint(lease.sources)
                assert lease.pending.isdisjoint([*lease.sources, *lease.sinks])
                for head in lease.heads.values():
                    key = head.node.key
                    self.must_be_right(user, key, bytes(head.slot.view), opened.epoch)

    @invariant()
    def nothing_doomed_stays(self):
        for user in self.users:
            if user.is_quiet:
                assert not user.manager._forgetting._doomed
                self.nothing_is_left(user)

    @invariant()
    def budgets_hold_in_real_bytes(self):
        stores = [user.store for user in self.users if user.store is not None]
        with self.calm():
            for store in stores:
                contents = store.contents()
                names = {key.hex() for key in contents.stored}
                files = {path.stem: path.stat().st_size for path in self.chunk_files()}
                real = sum(size for name, size in files.items() if name in names)
                # Files that were cut short are smaller than what is counted.
                assert real <= store.used_bytes() <= self.limit
                assert self.unlink_failed or sum(files.values()) <= self.limit
                for tenant, used in contents.totals().items():
                    assert used <= (self.quotas[tenant] or 10**9)

    @invariant()
    def what_is_on_disk_may_be_there(self):
        """Right bytes under right names, and none of a document that was forgotten."""
        stores = [user.store for user in self.users if user.store is not None]
        if stores:
            with self.calm():
                self.right_files_under_right_names(stores[0])

    def right_files_under_right_names(self, store: ChunkStore) -> None:
        records = store.records()
        found = {line.split()[1].rstrip(":") for line in store.audit(fix=False)}
        damaged = set()
        for path in self.chunk_files():
            key = chunk_key(path.name)
            raw = path.read_bytes()
            data = raw[FORMATS[0].header_nbytes :]
            meant, epoch = self.meaning.get(data, (None, 0))
            if key is None or key not in records:
                assert self.unlink_failed, f"{path.name} belongs to nobody"
                damaged.add(path.name)
                continue
            if meant != key or raw != self.file(key, data):
                damaged.add(path.name[:12])
                continue
            assert epoch >= self.last_forgotten(key, self.forgotten)
        names = {path.stem for path in self.chunk_files()}
        damaged |= {key.hex()[:12] for key in records if key.hex() not in names}
        assert found == damaged

    def file(self, key: ChunkKey, data: bytes) -> bytes:
        number, chunks = self.paths[key]
        tokens = tokens_of(chunks)
        keys = chunk_keys(NAMESPACES[number], tokens, LAYOUT.chunk_tokens)
        parent = keys[-2] if len(keys) > 1 else NAMESPACES[number].root
        chunk = ChunkId(key, parent, tokens[-LAYOUT.chunk_tokens :])
        fmt = FORMATS[number]
        return fmt.header(chunk, fmt.checksums(data)) + data


def test_machine():
    run_state_machine_as_test(
        TierMachine,
        settings=settings(max_examples=80, stateful_step_count=40, deadline=None),
    )
