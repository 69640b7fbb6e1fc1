"""The DRAM tier: one slab cut into equal slots, one chunk each. Engine thread only."""

from __future__ import annotations

import torch
from torch import Tensor

from pcr_core.errors import ConfigError
from pcr_core.index.chunk import ChunkLayout
from pcr_core.memory import populate

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_PAGE = 4096


class Slot:
    """One chunk's worth of DRAM. Two slots never share bytes.

    Attributes:
        index: Its place in the slab.
        view: Its bytes, writable, exactly ``layout.nbytes`` long: for I/O.
    """

    __slots__ = ("_layers", "index", "view")

    def __init__(
        self, index: int, view: memoryview, layers: list[tuple[Tensor, Tensor]]
    ) -> None:
        self.index = index
        self.view = view
        self._layers = layers

    def layer(self, i: int) -> tuple[Tensor, Tensor]:
        """Keys and values of layer ``i``, as views into the slab.

        Returns:
            K of shape ``[kv_heads, chunk_tokens, k_dim]`` and V of shape
            ``[kv_heads, chunk_tokens, v_dim]`` in the layout's dtype, contiguous.
        """
        keys, values = self._layers[i]
        return keys[self.index], values[self.index]

    def span(self, count: int, i: int) -> tuple[Tensor, Tensor]:
        """Layer ``i`` of this slot and the ``count - 1`` after it, in one view each.

        Slots whose ``index`` follow each other are neighbours in memory, so a run of
        them is copied in one operation.

        Returns:
            K ``[count, kv_heads, chunk_tokens, k_dim]`` and V likewise.
        """
        keys, values = self._layers[i]
        stop = self.index + count
        return keys[self.index : stop], values[self.index : stop]

    def __repr__(self) -> str:
        return f"Slot({self.index})"


class HostPool:
    """Equal slots under a hard byte budget. Never blocks, never evicts.

    The slab is not touched when it is made, so that the process grows only with the
    slots that are used; freed slots are handed out again before fresh ones.

    Args:
        layout: What one slot holds.
        budget_bytes: Hard limit. The capacity is the whole chunks that fit.
        pin_memory: Page-lock the slab for copies to a GPU.

    Attributes:
        capacity: Slots altogether.

    Raises:
        ConfigError: If the budget holds no chunk.
    """

    def __init__(
        self, layout: ChunkLayout, budget_bytes: int, *, pin_memory: bool = False
    ) -> None:
        self.capacity = budget_bytes // layout.nbytes
        if self.capacity < 1:
            raise ConfigError(
                f"dram_bytes is {budget_bytes} bytes but one chunk of "
                f"{layout.chunk_tokens} tokens of this model takes {layout.nbytes}; "
                f"set dram_bytes to at least {layout.nbytes}, better 100 times that"
            )
        self._nbytes = layout.nbytes
        size = self.capacity * layout.nbytes
        try:
            raw = torch.empty(size + _PAGE, dtype=torch.uint8, pin_memory=pin_memory)
        except (RuntimeError, TypeError) as error:
            raise ConfigError(
                f"dram_bytes: {size} bytes cannot be had ({error}); use a smaller one"
            ) from error
        start = -raw.data_ptr() % _PAGE
        slab = raw[start : start + size]
        self._bytes = slab.numpy().data
        self._layers = _layer_views(slab, layout, self.capacity)
        self._address = slab.data_ptr()
        self._fresh = 0
        self._populated = self.capacity if pin_memory else 0
        self._freed: list[int] = []
        self._lent = bytearray(self.capacity)

    @property
    def free_count(self) -> int:
        """Slots that ``allocate`` can still hand out."""
        return self.capacity - self._fresh + len(self._freed)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots together; at most the budget."""
        return self.capacity * self._nbytes

    def allocate(self) -> Slot | None:
        """Hand out a slot, or ``None`` when all are in use. Its bytes are arbitrary."""
        if self._freed:
            index = self._freed.pop()
        elif self._fresh < self.capacity:
            index = self._fresh
            self._fresh += 1
        else:
            return None
        self._lent[index] = 1
        start = index * self._nbytes
        return Slot(index, self._bytes[start : start + self._nbytes], self._layers)

    def populate_next(self, ahead: int) -> bool:
        """Have the kernel back one more slot with memory, ahead of its first use.

        The first write to a page costs a fault; for the KV of a prompt that adds up
        to several per cent of its prefill. Meant for idle moments.

        Args:
            ahead: Bytes beyond the slots in use that may be populated.

        Returns:
            Whether it did anything; ``False`` when enough is populated.
        """
        limit = min(self.capacity, self._fresh + ahead // self._nbytes)
        self._populated = max(self._populated, self._fresh)
        if self._populated >= limit:
            return False
        populate(self._address + self._populated * self._nbytes, self._nbytes)
        self._populated += 1
        return True

    def close(self) -> None:
        """Give the slab back, although somebody may still hold a closed engine.

        A slot that is still lent, to a thread that hangs in a system call, keeps it.
        """
        self._bytes = memoryview(b"")
        self._layers = []
        self._freed = []
        self._fresh = self._populated = self.capacity  # nothing can be handed out

    def free(self, slot: Slot) -> None:
        """Take a slot back.

        Raises:
            RuntimeError: If it is free already: a bug in this library.
        """
        if not self._lent[slot.index]:
            raise RuntimeError(f"slot {slot.index} was freed twice")
        self._lent[slot.index] = 0
        self._freed.append(slot.index)


def _layer_views(
    slab: Tensor, layout: ChunkLayout, capacity: int
) -> list[tuple[Tensor, Tensor]]:
    """Per layer, K and V of all slots: ``[capacity, kv_heads, chunk_tokens, dim]``."""
    flat = slab.view(_DTYPES[layout.dtype])
    base, stride = flat.storage_offset(), layout.nbytes // layout.itemsize
    views = []
    for index, shape in enumerate(layout.layers):
        start = layout.layer_offsets[index]
        pair = []
        for dim, at in (
            (shape.k_dim, start),
            (shape.v_dim, start + layout.k_bytes(index)),
        ):
            rows = (capacity, shape.kv_heads, layout.chunk_tokens, dim)
            steps = (stride, layout.chunk_tokens * dim, dim, 1)
            pair.append(flat.as_strided(rows, steps, base + at // layout.itemsize))
        views.append((pair[0], pair[1]))
    return views
