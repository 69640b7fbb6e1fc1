"""The DRAM tier's memory: slabs cut into equal slots, one chunk each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pcr_core.index.chunk import ChunkLayout
from pcr_core.memory import populate
from pcr_core.tiers.pinning import NoPinning, Pinning
from pcr_core.tiers.reserves import Reserves
from pcr_core.tiers.slabs import Slab, SlabPlan

_log = logging.getLogger("pcr_core.tiers")
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

LayerViews = Sequence[tuple[Tensor, Tensor]]


class Slot:
    """One chunk's worth of DRAM. Two slots never share bytes.

    Its views keep their slab mapped, also beyond the pool's end.

    Attributes:
        index: Its number. Slots whose numbers follow each other are neighbours in
            memory: between the last slot of a slab and the first of the next, one
            number is left out.
        view: Its bytes, writable, exactly ``layout.nbytes`` long: for I/O.
    """

    __slots__ = ("_layers", "_place", "index", "view")

    def __init__(
        self, index: int, place: int, view: memoryview, layers: LayerViews
    ) -> None:
        self.index = index
        self.view = view
        self._place = place
        self._layers = layers

    def layer(self, i: int) -> tuple[Tensor, Tensor]:
        """Keys and values of layer ``i``, as views into the slab.

        Returns:
            K of shape ``[kv_heads, chunk_tokens, k_dim]`` and V of shape
            ``[kv_heads, chunk_tokens, v_dim]`` in the layout's dtype, contiguous.
        """
        keys, values = self._layers[i]
        return keys[self._place], values[self._place]

    def span(self, count: int, i: int) -> tuple[Tensor, Tensor]:
        """Layer ``i`` of this slot and the ``count - 1`` after it, in one view each.

        The slots are those with the next indices, so a run of neighbours is copied in
        one operation. Never beyond a slab, so the view is pinned as a whole or not.

        Returns:
            K ``[count, kv_heads, chunk_tokens, k_dim]`` and V likewise.
        """
        keys, values = self._layers[i]
        stop = self._place + count
        return keys[self._place : stop], values[self._place : stop]

    def __repr__(self) -> str:
        return f"Slot({self.index})"


class HostPool:
    """Equal slots under a hard byte budget. Never blocks, never evicts.

    A slab is mapped when the first slot of it is needed, and not touched then: the
    process grows only with the slots that are used. Freed slots are handed out again
    before fresh ones. If the system gives no further slab, the pool stays as large as
    it is. Engine thread only.

    Args:
        layout: What one slot holds.
        plan: How many slots, and how many to a slab.
        pinning: Page-locks each slab for copies to a GPU.
        new_slab: Gives memory, or raises ``OSError``.

    Attributes:
        capacity: Slots altogether.
        reserves: How they are shared out.
    """

    def __init__(
        self,
        layout: ChunkLayout,
        plan: SlabPlan,
        *,
        pinning: Pinning | None = None,
        new_slab: Callable[[int], Slab] = Slab,
    ) -> None:
        self.capacity = plan.capacity
        self.reserves = Reserves.of(plan.capacity, plan.slot_bytes)
        self._layout = layout
        self._plan = plan
        self._pinning = pinning or NoPinning()
        self._new_slab = new_slab
        self._slabs: list[tuple[Slab, LayerViews]] = []
        self._fresh = 0
        self._populated = 0
        self._freed: list[int] = []
        self._lent: set[int] = set()

    @property
    def free_count(self) -> int:
        """Slots that ``allocate`` can still hand out."""
        return self.capacity - self._fresh + len(self._freed)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots together; at most the budget."""
        return self.capacity * self._plan.slot_bytes

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the slabs that are mapped now; at most the budget."""
        return sum(slab.nbytes for slab, _ in self._slabs)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of them that are page-locked by now."""
        return self._pinning.nbytes

    @property
    def pin_errors(self) -> int:
        """Slabs that could not be page-locked."""
        return self._pinning.errors

    def allocate(self) -> Slot | None:
        """Hand out a slot, or ``None`` when all are in use. Its bytes are arbitrary."""
        if self._freed:
            return self._lend(self._freed.pop())
        if self._fresh == self.capacity or not self._is_mapped(self._fresh):
            return None
        self._fresh += 1
        return self._lend(self._index(self._fresh - 1))

    def populate_next(self, ahead: int) -> bool:
        """Have the kernel back one more slot with memory, ahead of its first use.

        The first write to a page costs a fault; for the KV of a prompt that adds up
        to several per cent of its prefill. Meant for idle moments.

        Args:
            ahead: Bytes beyond the slots in use that may be populated.

        Returns:
            Whether it did anything; ``False`` when enough is populated.
        """
        size = self._plan.slot_bytes
        limit = min(self.capacity, self._fresh + ahead // size)
        number = self._populated = max(self._populated, self._fresh)
        if number >= limit or not self._is_mapped(number):
            return False
        slab, place = divmod(number, self._plan.per_slab)
        populate(self._slabs[slab][0].address + place * size, size)
        self._populated += 1
        return True

    def free(self, slot: Slot) -> None:
        """Take a slot back.

        Raises:
            RuntimeError: If it is free already: a bug in this library.
        """
        if slot.index not in self._lent:
            raise RuntimeError(f"slot {slot.index} was freed twice")
        self._lent.remove(slot.index)
        self._freed.append(slot.index)

    def close(self, timeout: float = 10.0) -> None:
        """Let go of all memory, although somebody may still hold a closed engine.

        A slab goes back to the system with the last view of it. A slot that is still
        lent, to a thread that hangs in a system call, keeps its own.

        Args:
            timeout: Seconds to wait until everything is unpinned.
        """
        self._slabs = []
        self._freed = []
        self._fresh = self._populated = self.capacity  # nothing can be handed out
        self._pinning.close(timeout)

    def _index(self, number: int) -> int:
        """Index of the slot that is the ``number``-th in memory; see ``Slot``."""
        return number + number // self._plan.per_slab

    def _lend(self, index: int) -> Slot:
        self._lent.add(index)
        number, place = divmod(index, self._plan.per_slab + 1)
        slab, views = self._slabs[number]
        size = self._plan.slot_bytes
        return Slot(index, place, slab.bytes[place * size : (place + 1) * size], views)

    def _is_mapped(self, number: int) -> bool:
        """Whether a slot has memory; it gets some if need be.

        Called for each slot before the first of the next slab.
        """
        if number // self._plan.per_slab < len(self._slabs):
            return True
        size = self._plan.size(len(self._slabs))
        try:
            slab = self._new_slab(size)
        except OSError as error:
            self.capacity = len(self._slabs) * self._plan.per_slab
            _log.warning(
                "the system gives no further %d bytes for the DRAM tier: %s; it stays "
                "at %d chunks",
                size,
                error,
                self.capacity,
            )
            return False
        slots = self._plan.slots(len(self._slabs))
        self._slabs.append((slab, _layer_views(slab.tensor, self._layout, slots)))
        self._pinning.add(slab)
        return True


def _layer_views(memory: Tensor, layout: ChunkLayout, slots: int) -> LayerViews:
    """Per layer, K and V of some slots: ``[slots, kv_heads, chunk_tokens, dim]``."""
    flat = memory[: slots * layout.nbytes].view(_DTYPES[layout.dtype])
    stride = layout.nbytes // layout.itemsize
    views = []
    for index, shape in enumerate(layout.layers):
        start = layout.layer_offsets[index]
        pair = []
        for dim, at in (
            (shape.k_dim, start),
            (shape.v_dim, start + layout.k_bytes(index)),
        ):
            rows = (slots, shape.kv_heads, layout.chunk_tokens, dim)
            steps = (stride, layout.chunk_tokens * dim, dim, 1)
            pair.append(flat.as_strided(rows, steps, at // layout.itemsize))
        views.append((pair[0], pair[1]))
    return views
