"""Random requests, faults, damage and restarts against a plain-dict model.

The model remembers the bytes each key must have. Whatever happens, a slot that is lent
for reading has exactly these bytes, the budgets hold in real bytes, and the audit finds
the damage done on purpose and nothing else.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
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

from pcr_core.index.prefix_tree import Host
from pcr_core.tiers import ChunkStore, HostPool, InlineIo, NoStore, TierManager
from pcr_core.tiers.store.chunk_file import chunk_path

CHUNKS = st.lists(st.integers(0, 2), min_size=0, max_size=4)
FAULTS = {
    "open_new": errno.EACCES,
    "writev": errno.ENOSPC,
    "fsync": errno.EIO,
    "replace": errno.EROFS,
    "fsync_folder": errno.EIO,
    "open_read": errno.EMFILE,
    "preadv": errno.EIO,
}


class TierMachine(RuleBasedStateMachine):
    def __init__(self, kit) -> None:
        super().__init__()
        self.kit = kit
        self.folder = Path(tempfile.mkdtemp(dir=kit.folder.parent))
        self.files = kit.FaultyFiles()
        self.clock = kit.Clock()
        self.bytes: dict[bytes, bytes] = {}
        self.open: list = []
        self.budget = 0
        self.manager: TierManager | None = None

    # --- life ---

    @initialize(slots=st.integers(1, 6), ssd=st.integers(0, 6))
    def start(self, slots, ssd):
        pool = HostPool(self.kit.layout, slots * self.kit.layout.nbytes)
        self.budget = ssd * self.kit.file_nbytes
        store = NoStore()
        if ssd:
            store = ChunkStore(self.folder, self.budget, files=self.files)
        self.manager = TierManager(
            self.kit.layout,
            self.kit.namespace,
            pool,
            store,
            InlineIo(store),
            clock=self.clock,
        )

    @rule(slots=st.integers(1, 6), ssd=st.integers(0, 6))
    def restart(self, slots, ssd):
        self.end_all()
        self.manager.close()
        self.start(slots, ssd)

    def end_all(self):
        while self.open:
            self.end(0)

    def teardown(self):
        self.files.broken.clear()
        if self.manager is not None:
            self.end_all()
            self.manager.close()
        shutil.rmtree(self.folder)

    # --- requests ---

    def expected(self, key) -> bytes:
        return self.bytes.setdefault(key, self.kit.content(key))

    def begin(self, chunks, usable):
        tokens = [*self.kit.prompt(*chunks), 9]
        keys = self.kit.keys_of(tokens)
        before = self.manager.match(keys)
        assert self.manager.match(keys) == before
        lease = self.manager.lease(keys, tokens, min(usable, len(keys)))
        lease.wait()
        for index, tier in lease.tiers.items():
            assert before[index] == tier
        for index in lease.sources:
            assert index < usable
            assert index not in lease.sinks
        self.open.append((lease, keys))
        self.read_all(lease, keys)
        return lease, keys

    def read_all(self, lease, keys):
        for index, slot in lease.sources.items():
            assert bytes(slot.view) == self.expected(keys[index])

    def end(self, which, filled=None):
        lease, keys = self.open.pop(which)
        self.read_all(lease, keys)
        for index, slot in lease.sinks.items():
            slot.view[:] = self.expected(keys[index])
            if filled is None or index < filled:
                lease.filled(index)
            else:
                slot.view[:10] = b"unfinished"
        lease.close()

    @rule(chunks=CHUNKS, usable=st.integers(0, 4))
    def open_lease(self, chunks, usable):
        if len(self.open) < 3:
            self.begin(chunks, usable)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), filled=st.none() | st.integers(0, 4))
    def end_lease(self, data, filled):
        self.end(data.draw(st.integers(0, len(self.open) - 1)), filled)

    @rule(chunks=CHUNKS)
    def serve(self, chunks):
        self.begin(chunks, 4)
        self.end(len(self.open) - 1)

    @precondition(lambda self: not self.open)
    @rule(chunks=CHUNKS)
    def serve_twice(self, chunks):
        for _ in range(2):
            lease, _ = self.begin(chunks, 4)
            held = min(len(chunks), self.manager._pool.capacity)
            tiers = list(lease.tiers.values())
            self.end(0)
        assert tiers.count("dram") >= held

    @rule(chunks=CHUNKS)
    def leave_without_waiting(self, chunks):
        tokens = [*self.kit.prompt(*chunks), 9]
        keys = self.kit.keys_of(tokens)
        self.manager.lease(keys, tokens, len(keys)).close()

    # --- what disks do ---

    @rule(call=st.sampled_from(sorted(FAULTS)))
    def break_call(self, call):
        self.files.broken[call] = FAULTS[call]

    @rule()
    def repair_calls(self):
        self.files.broken.clear()

    @precondition(lambda self: self.stored())
    @rule(data=st.data(), how=st.sampled_from(["flip", "cut", "delete", "swap"]))
    def damage(self, data, how):
        path = data.draw(st.sampled_from(self.stored()))
        if how == "delete":
            path.unlink()
        elif how == "cut":
            size = path.stat().st_size
            os.truncate(path, data.draw(st.integers(0, max(0, size - 1))))
        elif how == "swap":
            path.write_bytes(data.draw(st.sampled_from(self.stored())).read_bytes())
        elif path.stat().st_size:
            raw = bytearray(path.read_bytes())
            raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1
            path.write_bytes(raw)

    @rule()
    def fix(self):
        self.manager.check(fix=True)
        assert self.manager.check().ok
        assert self.damaged() == set()

    def stored(self) -> list[Path]:
        folder = self.folder / "chunks"
        return sorted(folder.iterdir()) if folder.exists() else []

    def damaged(self) -> set[str]:
        """Chunks whose file is not exactly what this library would write."""
        if self.manager._store is None:
            return set()
        names = set()
        fmt = self.kit.format
        for key in self.manager._store.records():
            path = chunk_path(self.folder / "chunks", key)
            raw = path.read_bytes() if path.exists() else b""
            head, data = raw[: fmt.header_nbytes], raw[fmt.header_nbytes :]
            good = data == self.expected(key) and key.hex().encode() in head
            if not (good and head == self.header(key, data, head)):
                names.add(key.hex()[:12])
        return names

    def header(self, key, data, head) -> bytes:
        for chunks in self.known_paths():
            tokens = self.kit.prompt(*chunks)
            if self.kit.keys_of(tokens)[-1] == key:
                chunk = self.kit.chunk_id(tokens, len(chunks) - 1)
                return self.kit.format.header(chunk, self.kit.format.checksums(data))
        raise AssertionError("a chunk nobody asked for")

    def known_paths(self):
        paths = [[]]
        for _ in range(4):
            paths = [[*path, number] for path in paths for number in range(3)]
            yield from paths

    # --- what must hold ---

    @invariant()
    def audit_finds_the_damage_and_nothing_else(self):
        if self.manager is None:
            return
        report = self.manager.check()
        assert report.memory == []
        found = {line.split()[1].rstrip(":") for line in report.store}
        assert found == self.damaged()

    @invariant()
    def budgets_hold(self):
        if self.manager is None:
            return
        if isinstance(self.manager._store, ChunkStore):
            # Files that were cut short are smaller than what is counted.
            real = sum(path.stat().st_size for path in self.stored())
            assert real <= self.manager._store.used_bytes() <= self.budget
        stats = self.manager.snapshot()
        assert stats.dram_bytes <= stats.dram_budget
        assert stats.ssd_bytes <= stats.ssd_budget

    @invariant()
    def without_leases_nothing_is_pinned(self):
        if self.manager is not None and not self.open:
            nodes = list(self.manager._tree.nodes())
            assert all(node.pins == 0 for node in nodes)
            assert all(node.host is not Host.FILLING for node in nodes)


def test_machine(kit):
    run_state_machine_as_test(
        lambda: TierMachine(kit),
        settings=settings(max_examples=60, stateful_step_count=30, deadline=None),
    )
