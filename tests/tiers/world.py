"""A manager over a slow virtual disk, and requests that wait for it."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

from tests.tiers.conftest import FILE_BYTES, LAYOUT, keys_of, prompt
from tests.tiers.memory_store import MemoryStore
from tests.tiers.virtual import VirtualIo, VirtualTime

CHUNK_SECONDS = 1.0
BANDWIDTH = LAYOUT.nbytes / CHUNK_SECONDS


@dataclass(eq=False)
class Waiting:
    """A request in the queue."""

    tokens: list[int]

    @property
    def keys(self):
        return keys_of(self.tokens)

    @property
    def usable(self):
        return (len(self.tokens) - 1) // LAYOUT.chunk_tokens


def question(*chunks: int) -> Waiting:
    return Waiting([*prompt(*chunks), 1])


class World:
    """A manager over a slow virtual disk, with prompts that are on it already."""

    def __init__(self, kit, stored, *, slots=64, bandwidth=BANDWIDTH, **settings):
        self.kit = kit
        self.time = VirtualTime()
        store = MemoryStore(200 * FILE_BYTES)
        first = kit.manager(slots=64, store=store)
        for one in stored:
            kit.serve(first, one.tokens)
        first.close()
        made: list[VirtualIo] = []

        def io(store):
            made.append(VirtualIo(store, self.time, bandwidth=bandwidth))
            return made[-1]

        self.manager = kit.manager(
            slots=slots, store=store, io=io, timer=self.time, **settings
        )
        self.io = made[0]

    def look(self, *queue: Waiting) -> None:
        self.manager.poll()
        self.manager.look_ahead(queue)

    def run(self, request: Waiting, compute: float = 0.0) -> SimpleNamespace:
        """Serve a request; returns its tiers and the read time it was exposed to."""
        before = self.io.waited
        self.manager.poll()
        with self.manager.lease(request.keys, request.tokens, request.usable) as lease:
            lease.wait()
            for index, slot in lease.sources.items():
                assert bytes(slot.view) == self.kit.content(request.keys[index])
            for index, slot in lease.sinks.items():
                slot.view[:] = self.kit.content(request.keys[index])
                lease.filled(index)
            self.time.now += compute
            tiers = dict(lease.tiers)
        exposed = self.io.waited - before
        return SimpleNamespace(tiers=tiers, exposed=exposed)

    def in_dram(self, request: Waiting) -> list[bool]:
        self.manager.poll()
        return [state == "dram" for state in self.manager.match(request.keys)]
