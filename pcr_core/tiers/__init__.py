"""Where chunks are: DRAM slots, chunk files on SSD, and what moves between them."""

from pcr_core.tiers.audit import CheckReport
from pcr_core.tiers.chunk_store import ChunkStore
from pcr_core.tiers.host_pool import HostPool, Slot
from pcr_core.tiers.io_pool import InlineIo, IoPool
from pcr_core.tiers.lease import Lease
from pcr_core.tiers.manager import ChunkState, TierManager

__all__ = [
    "CheckReport",
    "ChunkState",
    "ChunkStore",
    "HostPool",
    "InlineIo",
    "IoPool",
    "Lease",
    "Slot",
    "TierManager",
]
