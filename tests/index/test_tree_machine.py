"""Tree, queues and policies against a model that scans all nodes for its victims."""

from __future__ import annotations

import hashlib
from collections import OrderedDict

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pcr_core.index.chunk import ChunkKey
from pcr_core.index.eviction import LookAheadLru, Lru, Pgdsf
from pcr_core.index.prefix_tree import (
    DISK_TRANSITIONS,
    HOST_TRANSITIONS,
    Disk,
    Event,
    Host,
    PrefixTree,
)

TENANTS = (b"x", b"y")


class Turning:
    """A policy that turns around, as an adaptive one does."""

    def __init__(self) -> None:
        self.epoch = 0

    def rank(self, node):
        return (node.last_used if self.epoch % 2 == 0 else -node.last_used,)

    def used(self, node):
        pass

    evicted = used


POLICIES = {
    "lru": Lru,
    "look-ahead": LookAheadLru,
    "pgdsf": Pgdsf,
    "turning": Turning,
}


def path_keys(tenant: bytes, names: str) -> list[ChunkKey]:
    path, parent = [], tenant
    for name in names:
        parent = hashlib.sha256(parent + name.encode()).digest()
        path.append(ChunkKey(parent))
    return path


class Record:
    """A chunk of the model. Looks like a node to a policy."""

    def __init__(self, key: ChunkKey, tenant: bytes) -> None:
        self.key, self.tenant = key, tenant
        self.parent: ChunkKey | None = None
        self.host, self.disk = Host.NONE, Disk.NONE
        self.nbytes = self.pins = 0
        self.last_used = self.uses = self.misses = 0
        self.cost_sum = 0.0
        self.reserved: int | None = None


class Model:
    """The same rules with no counters, no queues, no links: everything is a scan."""

    def __init__(self, host_policy, disk_policy, remembered: int) -> None:
        self.host_policy, self.disk_policy = host_policy, disk_policy
        self.remembered = remembered
        self.records: dict[ChunkKey, Record] = {}
        self.ghosts: OrderedDict[ChunkKey, tuple] = OrderedDict()
        self.reserved: dict[ChunkKey, int] = {}
        self.clock = 0

    def get(self, key: ChunkKey, tenant: bytes) -> Record:
        if key not in self.records:
            record = self.records[key] = Record(key, tenant)
            counts = self.ghosts.pop(key, (0, 0, 0.0))
            record.uses, record.misses, record.cost_sum = counts
        return self.records[key]

    def link(self, key: ChunkKey, parent: ChunkKey, tenant: bytes) -> Record:
        record = self.get(key, tenant)
        if record.parent is None:
            record.parent = self.get(parent, tenant).key
        return record

    def commit(self, keys, missed, cost: float) -> None:
        for index in missed:
            self.records[keys[index]].misses += 1
            self.records[keys[index]].cost_sum += cost
        for key in reversed(keys):
            record = self.records[key]
            self.clock += 1
            record.last_used = self.clock
            record.uses += 1
            self.host_policy.used(record)
            self.disk_policy.used(record)

    def settle(self) -> None:
        """After each step: forget what nothing needs, rank what can be evicted."""
        for record in self.records.values():
            record.reserved = self.reserved.get(record.key)
        gone = True
        while gone:
            parents = {record.parent for record in self.records.values()}
            gone = [
                record
                for record in self.records.values()
                if record.host is Host.NONE
                and record.disk is Disk.NONE
                and not record.pins
                and record.key not in parents
            ]
            for record in gone:
                self.forget(record)
        self.host_candidates()
        self.disk_candidates()

    def forget(self, record: Record) -> None:
        del self.records[record.key]
        if record.uses and self.remembered:
            counts = (record.uses, record.misses, record.cost_sum)
            self.ghosts[record.key] = counts
            if len(self.ghosts) > self.remembered:
                self.ghosts.popitem(last=False)

    def host_candidates(self) -> dict[ChunkKey, tuple]:
        inner = {r.parent for r in self.records.values() if r.host is not Host.NONE}
        return {
            r.key: self.host_policy.rank(r)
            for r in self.records.values()
            if r.host is Host.READY
            and r.disk is not Disk.WRITING
            and not r.pins
            and r.key not in inner
        }

    def disk_candidates(self, tenant: bytes | None = None) -> dict[ChunkKey, tuple]:
        inner = {r.parent for r in self.records.values() if r.disk is not Disk.NONE}
        return {
            r.key: self.disk_policy.rank(r)
            for r in self.records.values()
            if r.disk is Disk.STORED
            and not r.pins
            and r.key not in inner
            and tenant in (None, r.tenant)
        }


PATHS = st.tuples(st.sampled_from(TENANTS), st.text("ab", min_size=1, max_size=4))


class TreeMachine(RuleBasedStateMachine):
    """Leases, copies, evictions, reservations and losses in any order."""

    @initialize(
        host=st.sampled_from(sorted(POLICIES)),
        disk=st.sampled_from(sorted(POLICIES)),
        remembered=st.sampled_from((0, 2, 50)),
    )
    def start(self, host, disk, remembered):
        self.policies = [POLICIES[host](), POLICIES[disk]()]
        self.tree = PrefixTree(*self.policies, remembered=remembered)
        self.model = Model(POLICIES[host](), POLICIES[disk](), remembered)
        self.leases: list[list[ChunkKey]] = []

    def node(self, key: ChunkKey):
        (node,) = self.tree.match([key])
        assert node is not None
        return node

    @rule(path=PATHS)
    def lease(self, path):
        tenant, names = path
        keys = path_keys(tenant, names)
        self.tree.pin(self.tree.grow(tenant, keys, tenant))
        for parent, key in zip([ChunkKey(tenant), *keys], keys, strict=False):
            self.model.link(key, parent, tenant).pins += 1
        self.leases.append(keys)
        self.model.settle()

    @rule(data=st.data(), event=st.sampled_from(Event))
    def advance(self, data, event):
        if not self.leases:
            return
        key = data.draw(st.sampled_from(data.draw(st.sampled_from(self.leases))))
        record, node = self.model.records[key], self.node(key)
        host = HOST_TRANSITIONS.get((record.host, event))
        disk = DISK_TRANSITIONS.get((record.disk, event))
        if host is not None and record.disk is not Disk.WRITING:
            self.tree.advance_host(node, event)
            record.host = host
            if event is Event.EVICT:
                self.model.host_policy.evicted(record)
        elif disk is not None and (
            event is not Event.WRITE or record.host is Host.READY
        ):
            self.tree.advance_disk(node, event, 3)
            record.disk = disk
            record.nbytes = 3 if disk is Disk.STORED else 0
            if event is Event.EVICT:
                self.model.disk_policy.evicted(record)
        self.model.settle()

    @rule(path=PATHS, cost=st.sampled_from((0.5, 1.0, 3.0)), write=st.booleans())
    def request(self, path, cost, write):
        """A whole request at once, the common case: most chunks end up evictable."""
        self.lease(path)
        keys = self.leases.pop()
        missed = []
        for index, key in enumerate(keys):
            record, node = self.model.records[key], self.node(key)
            if record.host is Host.NONE and record.disk is not Disk.WRITING:
                missed.append(index)
                self.tree.advance_host(node, Event.RESERVE)
                self.tree.advance_host(node, Event.FILL)
                record.host = Host.READY
            if write and record.host is Host.READY and record.disk is Disk.NONE:
                self.tree.advance_disk(node, Event.WRITE)
                record.disk = Disk.WRITING
        self.end(keys, missed, cost)

    @rule()
    def written(self):
        """Writes end when no lease holds the chunk any more."""
        for record in list(self.model.records.values()):
            if record.disk is Disk.WRITING:
                self.tree.advance_disk(self.node(record.key), Event.STORE, 5)
                record.disk, record.nbytes = Disk.STORED, 5
        self.model.settle()

    @rule(data=st.data(), cost=st.sampled_from((0.5, 1.0, 3.0)))
    def release(self, data, cost):
        if not self.leases:
            return
        keys = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        missed = data.draw(st.sets(st.integers(0, len(keys) - 1)))
        self.end(keys, missed, cost)

    def end(self, keys, missed, cost):
        nodes = [self.node(key) for key in keys]
        self.tree.commit(nodes, 0, missed=missed, cost=cost)
        self.model.commit(keys, missed, cost)
        self.tree.unpin(nodes)
        for key in keys:
            self.model.records[key].pins -= 1
        self.model.settle()

    @rule(path=PATHS, missed=st.booleans())
    def use(self, path, missed):
        """Commit what is known of a path without pinning it."""
        found = [node for node in self.tree.match(path_keys(*path)) if node is not None]
        indices = range(len(found)) if missed else ()
        self.tree.commit(found, 0, missed=indices, cost=0.25)
        self.model.commit([node.key for node in found], indices, 0.25)
        self.model.settle()

    @rule(path=PATHS, stamp=st.integers(0, 50))
    def find(self, path, stamp):
        """Another process has stored the last chunk of a path."""
        tenant, names = path
        *above, key = [ChunkKey(tenant), *path_keys(tenant, names)]
        self.tree.add_stored(key, above[-1], 7, stamp, tenant)
        record = self.model.get(key, tenant)
        if record.disk is Disk.NONE:
            self.model.link(key, above[-1], tenant)
            record.disk, record.nbytes = Disk.STORED, 7
            record.last_used = max(record.last_used, stamp)
            self.model.clock = max(self.model.clock, stamp)
        self.model.settle()

    @rule(path=PATHS)
    def know(self, path):
        tenant, names = path
        *above, key = [ChunkKey(tenant), *path_keys(tenant, names)]
        self.tree.add_known(key, above[-1], tenant)
        self.model.link(key, above[-1], tenant)
        self.tree.prune()
        self.model.settle()

    @rule(window=st.lists(PATHS, max_size=3))
    def reserve(self, window):
        positions = {
            key: position
            for position, path in reversed(list(enumerate(window)))
            for key in path_keys(*path)
        }
        self.tree.reserve(positions)
        self.model.reserved = positions
        self.model.settle()

    @rule()
    def evict_host(self):
        node = self.tree.host_victim()
        if node is not None:
            record = self.model.records[node.key]
            self.tree.advance_host(node, Event.EVICT)
            record.host = Host.NONE
            self.model.host_policy.evicted(record)
            self.model.settle()

    @rule(tenant=st.sampled_from((None, *TENANTS)))
    def evict_disk(self, tenant):
        node = self.tree.disk_victim(tenant)
        if node is not None:
            record = self.model.records[node.key]
            self.tree.advance_disk(node, Event.EVICT)
            record.disk, record.nbytes = Disk.NONE, 0
            self.model.disk_policy.evicted(record)
            self.model.settle()

    @rule(data=st.data(), tier=st.sampled_from(("host", "disk")))
    def lose(self, data, tier):
        """A copy goes for another reason than room, wherever in the tree it is."""
        lost = {
            record.key
            for record in self.model.records.values()
            if (tier == "disk" and record.disk is Disk.STORED)
            or (
                tier == "host"
                and record.host is Host.READY
                and record.disk is not Disk.WRITING
            )
        }
        if not lost:
            return
        key = data.draw(st.sampled_from(sorted(lost)))
        record = self.model.records[key]
        if tier == "host":
            self.tree.advance_host(self.node(key), Event.REMOVE)
            record.host = Host.NONE
        else:
            self.tree.advance_disk(self.node(key), Event.REMOVE)
            record.disk, record.nbytes = Disk.NONE, 0
        self.model.settle()

    @rule(which=st.sampled_from((0, 1)))
    def turn(self, which):
        policy = self.policies[which]
        if isinstance(policy, Turning):
            policy.epoch += 1
            own = self.model.disk_policy if which else self.model.host_policy
            own.epoch += 1
            self.model.settle()

    @invariant()
    def nodes_agree(self):
        assert self.tree.audit() == []
        nodes = {node.key: node for node in self.tree.nodes()}
        assert nodes.keys() == self.model.records.keys()
        for key, record in self.model.records.items():
            node = nodes[key]
            for field in ("tenant", "host", "disk", "pins", "last_used", "uses"):
                assert getattr(node, field) == getattr(record, field), field
            for field in ("misses", "cost_sum", "reserved"):
                assert getattr(node, field) == getattr(record, field), field
            assert (node.parent and node.parent.key) == record.parent

    @invariant()
    def victims_agree(self):
        self.compare(self.tree.host_victim(), self.model.host_candidates())
        for tenant in (None, *TENANTS):
            expected = self.model.disk_candidates(tenant)
            self.compare(self.tree.disk_victim(tenant), expected)

    @invariant()
    def bytes_agree(self):
        total = dict.fromkeys(TENANTS, 0)
        for record in self.model.records.values():
            total[record.tenant] += record.nbytes
        assert {tenant: self.tree.tenant_bytes(tenant) for tenant in TENANTS} == total
        assert self.tree.disk_bytes == sum(total.values())

    def compare(self, victim, candidates: dict[ChunkKey, tuple]) -> None:
        """Of chunks with the same rank (never used, say) either may go."""
        if victim is None:
            assert not candidates
        else:
            assert candidates[victim.key] == min(candidates.values())


TestTreeMachine = TreeMachine.TestCase
TestTreeMachine.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None
)
