"""Where chunks are: DRAM slots, chunk files on SSD, and what moves between them."""

from pcr_core.tiers.audit import CheckReport
from pcr_core.tiers.catalogue import ChunkState
from pcr_core.tiers.cuda_registrar import CudaRegistrar
from pcr_core.tiers.forgetting import Removed
from pcr_core.tiers.host_pool import HostPool, Slot
from pcr_core.tiers.io_pool import InlineIo, IoPool
from pcr_core.tiers.jobs import ForgetJob
from pcr_core.tiers.lease import Lease
from pcr_core.tiers.manager import TierManager
from pcr_core.tiers.opening import open_tiers
from pcr_core.tiers.settings import TierSettings
from pcr_core.tiers.slabs import SlabPlan
from pcr_core.tiers.stop_policy import StopPolicy, stop_policy
from pcr_core.tiers.store.chunk_store import ChunkStore
from pcr_core.tiers.store.folder import prepare_folder
from pcr_core.tiers.store.no_store import NoStore
from pcr_core.tiers.write_policy import WRITE_POLICIES, WritePolicy

__all__ = [
    "WRITE_POLICIES",
    "CheckReport",
    "ChunkState",
    "ChunkStore",
    "CudaRegistrar",
    "ForgetJob",
    "HostPool",
    "InlineIo",
    "IoPool",
    "Lease",
    "NoStore",
    "Removed",
    "SlabPlan",
    "Slot",
    "StopPolicy",
    "TierManager",
    "TierSettings",
    "WritePolicy",
    "open_tiers",
    "prepare_folder",
    "stop_policy",
]
