"""Memory of the DRAM tier: a few large pieces, whole pages straight from the kernel.

Not from torch: its allocator of pinned memory rounds up to powers of two and keeps what
is freed, so that a budget would not count what is really taken. Knows nothing of what
the memory is for.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import numpy as np
import torch

from pcr_core.errors import ConfigError

PAGE = mmap.PAGESIZE
SLAB_BYTES = 256 * 2**20
"""Aimed at. Large enough that few runs of chunks are cut at a border, small enough that
page-locking one holds up nobody for long (a tenth of a second or so)."""


@dataclass(frozen=True, slots=True)
class SlabPlan:
    """How many slots there are, and how they are spread over slabs.

    Every slab but the last has the same number of slots, one at least. A slab is a
    whole number of pages; what is left of its last one is in no slot.

    Attributes:
        capacity: Slots altogether.
        slot_bytes: Bytes of one.
        slab_bytes: Bytes that the slots of one slab may take.
    """

    capacity: int
    slot_bytes: int
    slab_bytes: int = SLAB_BYTES

    @classmethod
    def within(
        cls, budget_bytes: int, slot_bytes: int, slab_bytes: int = SLAB_BYTES
    ) -> SlabPlan:
        """As many slots as fit a budget, page rounding included.

        Args:
            budget_bytes: Hard limit on the bytes of all slabs.
            slot_bytes: Bytes of one slot.
            slab_bytes: Bytes that the slots of one slab may take.

        Raises:
            ConfigError: If the budget holds no slot.
        """
        one = cls(1, slot_bytes, slab_bytes)
        slabs, rest = divmod(budget_bytes, _pages(one.per_slab * slot_bytes))
        capacity = slabs * one.per_slab + rest // PAGE * PAGE // slot_bytes
        if capacity < 1:
            least = _pages(slot_bytes)
            raise ConfigError(
                f"dram_bytes is {budget_bytes} bytes but one chunk of this model takes "
                f"{least}; set dram_bytes to at least {least}, better 100 times that"
            )
        return cls(capacity, slot_bytes, slab_bytes)

    @property
    def per_slab(self) -> int:
        """Slots of each slab but the last."""
        return max(1, self.slab_bytes // self.slot_bytes)

    @property
    def slabs(self) -> int:
        """How many slabs it takes."""
        return -(-self.capacity // self.per_slab)

    @property
    def nbytes(self) -> int:
        """Bytes of all slabs."""
        return (self.slabs - 1) * self.size(0) + self.size(self.slabs - 1)

    def slots(self, slab: int) -> int:
        """Slots in one slab."""
        return min(self.per_slab, self.capacity - slab * self.per_slab)

    def size(self, slab: int) -> int:
        """Bytes of one slab: whole pages."""
        return _pages(self.slots(slab) * self.slot_bytes)


class Slab:
    """One piece of anonymous memory, zero and not backed until it is touched.

    There is no way to unmap it by hand: every tensor and memoryview made from it holds
    it, and the kernel gets it back when the last of them is gone. So none can dangle.

    Args:
        nbytes: Its size; whole pages.

    Attributes:
        tensor: All of it, uint8 ``[nbytes]``.
        bytes: The same, for I/O.
        address: Where it begins; a whole page.
        nbytes: Its size.

    Raises:
        OSError: If the system does not give so much.
    """

    __slots__ = ("__weakref__", "address", "bytes", "nbytes", "tensor")

    def __init__(self, nbytes: int) -> None:
        # Private: shared memory would not count as this process's, nor get huge pages.
        # Neither numpy nor torch copies; both keep what they were made from.
        piece = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        _prefer_huge_pages(piece)
        self.bytes = memoryview(piece)
        self.tensor = torch.from_numpy(np.frombuffer(piece, dtype=np.uint8))
        self.address = self.tensor.data_ptr()
        self.nbytes = nbytes

    def __repr__(self) -> str:
        return f"Slab({self.nbytes} bytes at {self.address:#x})"


def check_obtainable(nbytes: int) -> None:
    """Ask the system whether it could give so much at all; takes nothing.

    Slabs are mapped one by one, and the kernel refuses none of them on its own: without
    this, a budget of 100 TiB would be found out when memory has run out.

    Raises:
        ConfigError: If it could not.
    """
    try:
        mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except (OSError, OverflowError, ValueError) as error:
        raise ConfigError(
            f"dram_bytes: {nbytes} bytes cannot be had ({error}); use a smaller one"
        ) from error


def _prefer_huge_pages(piece: mmap.mmap) -> None:
    """A quarter of the time to populate a chunk, three quarters to copy it out."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None:
        try:
            piece.madvise(advice)
        except OSError:
            return  # a kernel without them


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE
