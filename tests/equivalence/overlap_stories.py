"""Requests in a row on one runner, their chunks wherever chance has put them.

A story has one choice of streams. Each of its requests is a prompt; of its chunks some
are in the row already, some in DRAM, some arrive layer by layer, some are lost while
they do, some are being read, and some must be computed; some forwards break, and some
copies cannot be queued. Memory is used again as soon as it has been given back, and
poisoned before. Whatever happens, the bits are those of a run without any cache.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from random import Random
from typing import Any

import torch

from pcr_core.errors import ChunkLostError, ModelError
from pcr_core.model.chunk_io import ChunkIO, Head
from pcr_core.model.fingerprint import kv_bytes
from pcr_core.model.runner import Row, Runner
from pcr_core.model.streams import Copy, Lane, Streams
from pcr_core.tiers import CudaRegistrar, HostPool, SlabPlan
from pcr_core.tiers.pinning import BackgroundPinning

REQUESTS = 4
"""Requests in a story."""
_SLOTS = 90
_POISON = 0xFF  # NaN in fp32 and bf16
_STATES = ("dram", "dram", "arriving", "arriving", "lost", "reading", "hole", "no room")
_ENDS = ("dram", "arriving", "lost", "hole", "no room")
_BREAKS = 0.08
_NO_ROOM = 0.1


@dataclasses.dataclass(frozen=True)
class Truth:
    """What a prompt gives with no cache at all."""

    logits: bytes
    kv: list[bytes]
    chunks: list[bytes]


class Stage:
    """A prepared model, what it gives without a cache, and prompts to ask it.

    Args:
        world: See ``conftest``.

    Attributes:
        seen: How often what happened, in all stories.
    """

    def __init__(self, world: Any) -> None:
        self.world = world
        self.chunk = int(world.chunk)
        self.seen: Counter[str] = Counter()
        self.prompts = list(_prompts(self.chunk))
        self.truth = lru_cache(maxsize=None)(self._truth)

    def _truth(self, tokens: tuple[int, ...]) -> Truth:
        runner = self.world.runner
        row = runner.open_row(len(tokens))
        nothing = ChunkIO({}, {}, filled=lambda index: None, between=lambda: None)
        logits = runner.prefill(row, tokens, nothing).logits
        kv = kv_bytes(row.cache, len(tokens))
        chunks = [
            _chunk_bytes(row, index * self.chunk, self.chunk)
            for index in range(len(tokens) // self.chunk)
        ]
        runner.close_row(row)
        return Truth(_bits(logits), kv, chunks)


def _prompts(chunk: int) -> Sequence[tuple[int, ...]]:
    """Members of two families: shared beginnings, ends of their own."""
    rng = Random(chunk)
    streams = [rng.choices(range(8), k=640) for _ in range(3)]
    made = []
    for _ in range(40):
        length = rng.randint(1, 96 // chunk + 1) * chunk + rng.choice((-1, 0, 1, 7))
        shared = rng.randrange(length) if rng.random() < 0.7 else length
        first, second = rng.randrange(2), 2
        made.append((*streams[first][:shared], *streams[second][shared:length]))
    made.append(tuple(streams[0][:560]))  # past a key block
    return made


def _chunk_bytes(row: Row, start: int, count: int) -> bytes:
    """A chunk's KV as it is stored, taken from a row."""
    buffer = row.cache.buffer
    return b"".join(
        _bits(tensor[0, :, start : start + count])
        for pair in zip(buffer.keys, buffer.values, strict=True)
        for tensor in pair
    )


def _bits(tensor: torch.Tensor) -> bytes:
    raw = tensor.detach().cpu().contiguous().view(torch.uint8)
    return bytes(raw.numpy().tobytes())


class Arriving:
    """A chunk that is being read: its layers land when waited for, or by chance.

    Args:
        index: Of the chunk in the prompt.
        slot: Where it lands; poisoned.
        whole: All its bytes.
        layers: Where each layer begins, and the end.
        lost: The layer at which it turns out to be lost, if any.
        rng: Chance.
    """

    def __init__(
        self,
        index: int,
        slot: Any,
        whole: bytes,
        layers: Sequence[int],
        lost: int | None,
        rng: Random,
    ) -> None:
        self._index = index
        self._slot = slot
        self._whole = whole
        self._layers = layers
        self._rng = rng
        self._last = len(layers) - 1 if lost is None else lost
        self._landed = 0
        for _ in range(rng.randrange(len(layers))):
            self._lands()

    @property
    def layers(self) -> int:
        """See ``Arrival``."""
        if self._rng.random() < 0.3:
            self._lands()
        return self._landed

    def wait(self, layer: int, /) -> None:
        """See ``Arrival``."""
        while self._landed <= layer:
            if not self._lands():
                raise ChunkLostError(self._index, "by chance")

    def _lands(self) -> bool:
        if self._landed >= self._last:
            return False
        start, stop = self._layers[self._landed : self._landed + 2]
        self._slot.view[start:stop] = self._whole[start:stop]
        self._landed += 1
        return True


class Chunks:
    """Where the chunks of one request are, and what becomes of them."""

    def __init__(self, story: Story, tokens: tuple[int, ...]) -> None:
        self._story = story
        self._rng = story.rng
        self._truth = story.stage.truth(tokens)
        self._borrowed: list[Any] = []
        self.sources: dict[int, Any] = {}
        self.sinks: dict[int, Any] = {}
        self.arriving: dict[int, Arriving] = {}
        self.pending: set[int] = set()
        self.heads: dict[int, Head] = {}
        self.filled: set[int] = set()
        chunks = len(self._truth.chunks)
        usable = min(chunks, story.runner.usable_chunks(len(tokens)))
        states = _states(self._rng, chunks)
        for index, state in enumerate(states):
            self._becomes(index, state if index < usable else "hole")

    def io(self) -> ChunkIO:
        return ChunkIO(
            sources=self.sources,
            sinks=self.sinks,
            filled=self._filled,
            between=self._some_reads_end,
            pending=self.pending,
            settle=self._settle,
            arriving=self.arriving,
            lost=self._lost,
            heads=self.heads,
        )

    def check_sinks(self) -> None:
        """What was filled stays as it is."""
        for index in self.filled:
            assert bytes(self.sinks[index].view) == self._truth.chunks[index]

    def give_back(self) -> None:
        """All memory may be used by others."""
        self._story.take_back(self._borrowed)

    def _becomes(self, index: int, state: str) -> None:
        self._story.stage.seen[state] += 1
        if state == "reading":
            self.pending.add(index)
        elif state == "dram":
            self.sources[index] = slot = self._slot()
            slot.view[:] = self._truth.chunks[index]
        elif state in ("arriving", "lost"):
            self._arrives(index, lost=state == "lost")
        elif state == "hole":
            self.sinks[index] = self._slot()
            self._maybe_head(index)

    def _arrives(self, index: int, *, lost: bool) -> None:
        offsets = self._story.layer_offsets
        self.sources[index] = slot = self._slot()
        self.arriving[index] = Arriving(
            index,
            slot,
            self._truth.chunks[index],
            offsets,
            self._rng.randrange(len(offsets) - 1) if lost else None,
            self._rng,
        )

    def _maybe_head(self, index: int) -> None:
        """The chunk's first tokens are those of another that is stored."""
        tokens, align = self._story.stage.chunk, self._story.runner.cuts.align
        if align < tokens and self._rng.random() < 0.5:
            slot = self._slot()
            slot.view[:] = self._truth.chunks[index]
            for layer in range(len(self._story.layer_offsets) - 1):
                for part in slot.span(1, layer):
                    part[:, :, align:] = float("nan")  # another chunk's, from there on
            self.heads[index] = Head(slot, align)
            self._story.stage.seen["head"] += 1

    def _slot(self) -> Any:
        slot = self._story.lend()
        self._borrowed.append(slot)
        return slot

    def _filled(self, index: int) -> None:
        self.filled.add(index)
        self._story.stage.seen["filled"] += 1
        self.check_sinks()

    def _settle(self, index: int) -> None:
        self._some_reads_end()
        if index in self.pending:
            self._ends(index)

    def _some_reads_end(self) -> None:
        for index in [one for one in self.pending if self._rng.random() < 0.2]:
            self._ends(index)

    def _ends(self, index: int) -> None:
        self.pending.discard(index)
        self._becomes(index, self._rng.choice(_ENDS))

    def _lost(self, index: int) -> None:
        """Its memory goes to somebody else at once."""
        del self.arriving[index]
        slot = self.sources.pop(index)
        slot.view[:] = bytes([_POISON]) * len(slot.view)
        self._story.stage.seen["lost in a forward"] += 1
        self._becomes(index, self._rng.choice(("hole", "no room")))


def _states(rng: Random, count: int) -> list[str]:
    """Runs of chunks in the same state, as prefixes have them."""
    states: list[str] = []
    while len(states) < count:
        states += [rng.choice(_STATES)] * rng.randint(1, 4)
    return states[:count]


class Story:
    """One runner, and requests to it, one after the other.

    Args:
        stage: The model and its prompts.
        streams: Where copies run.
        rng: Chance.
        pinned: Whether DRAM is page-locked.
    """

    def __init__(
        self, stage: Stage, streams: Streams, rng: Random, *, pinned: bool = False
    ) -> None:
        loaded = stage.world.loaded
        self.stage = stage
        self.rng = rng
        self._luck = Luck(rng)
        lanes: Any = {
            "load": Unlucky(streams.load, self._luck),
            "offload": Unlucky(streams.offload, self._luck),
        }
        self.runner = Runner(
            loaded,
            stage.chunk,
            stage.world.runner.cuts,
            dataclasses.replace(streams, **lanes),
            resident_rows=rng.randrange(3),
        )
        layout = stage.world.layout
        self.layer_offsets = layout.layer_offsets  # the end among them
        pinning = None
        if pinned:
            pinning = BackgroundPinning(CudaRegistrar(loaded.device))
        plan = SlabPlan(_SLOTS, layout.nbytes)
        pool = HostPool(layout, plan, pinning=pinning)
        self._free: list[Any] = []
        self.take_back([pool.allocate() for _ in range(_SLOTS)])

    def tell(self, between: Callable[[], None] = lambda: None) -> None:
        """Serve some requests and check everything; ``between`` comes after each."""
        for _ in range(REQUESTS):
            tokens = self.rng.choice(self.stage.prompts)
            chunks = Chunks(self, tokens)
            try:
                self._serve(tokens, chunks)
            finally:
                chunks.give_back()
            between()
        self.runner.close()

    def _serve(self, tokens: tuple[int, ...], chunks: Chunks) -> None:
        row = self.runner.open_row(len(tokens) + 1, tokens)
        self._luck.draw()
        try:
            with Breaks(self.stage.world.loaded.model, self.rng) as breaks:
                try:
                    done = self.runner.prefill(row, tokens, chunks.io())
                except (ModelError, NoRoom) as error:
                    self._expect(error, breaks)
                    return
            self._check(row, tokens, done.logits)
            chunks.check_sinks()
            self.stage.seen["resident"] += done.resident > 0
            self.stage.seen["forwards"] += len(done.forwards)
        finally:
            self.runner.close_row(row)

    def _expect(self, error: Exception, breaks: Breaks) -> None:
        """A forward has failed, and not for a reason of its own."""
        no_room = NoRoom in (type(error), type(error.__cause__))
        assert no_room or breaks.happened
        self.stage.seen["no room for a copy" if no_room else "broken"] += 1

    def _check(self, row: Row, tokens: tuple[int, ...], logits: torch.Tensor) -> None:
        truth = self.stage.truth(tokens)
        assert _bits(logits) == truth.logits
        assert kv_bytes(row.cache, len(tokens)) == truth.kv

    def lend(self) -> Any:
        """A slot with garbage in it."""
        return self._free.pop(0)

    def take_back(self, slots: list[Any]) -> None:
        """Slots may be lent again; neighbours mostly together."""
        self._free = sorted([*self._free, *slots], key=lambda slot: int(slot.index))
        for slot in slots:
            slot.view[:] = bytes([_POISON]) * len(slot.view)
        if self.rng.random() < 0.3:
            self.rng.shuffle(self._free)


class NoRoom(RuntimeError):
    """A copy needs memory on the device that is not there."""


class Luck:
    """Which of a request's first copies fails, if any."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._left = -1

    def draw(self) -> None:
        """Another request begins."""
        unlucky = self._rng.random() < _NO_ROOM
        self._left = self._rng.choice((0, 1, 1, 1, 2, 3, 8)) if unlucky else -1

    def try_one(self) -> None:
        """A copy is about to be queued."""
        if self._left == 0:
            raise NoRoom("by chance")
        self._left -= 1


class Unlucky:
    """A lane to which some copies cannot be queued."""

    def __init__(self, lane: Lane, luck: Luck) -> None:
        self.ahead = lane.ahead
        self.fence, self.wait, self.drain = lane.fence, lane.wait, lane.drain
        self._copy = lane.copy
        self._luck = luck

    def copy(self, layer: int, copies: Sequence[Copy]) -> None:
        """See ``Lane``."""
        self._luck.try_one()
        self._copy(layer, copies)


class Breaks:
    """One of the forwards inside the block may fail in the middle of the model."""

    def __init__(self, model: Any, rng: Random) -> None:
        self._layer = rng.choice(list(model.model.layers))
        self._left = rng.randrange(3) if rng.random() < _BREAKS else -1
        self.happened = False

    def __enter__(self) -> Breaks:
        # Where the layer's keys and values exist already.
        self._hook = self._layer.register_forward_hook(self._reached)
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    def _reached(self, *_: Any) -> None:
        if self._left == 0:
            self.happened = True
            raise RuntimeError("broken on purpose")
        self._left -= 1
