"""Opens the tiers as an engine uses them: budgets in bytes, threads, a folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pcr_core.errors import ConfigError
from pcr_core.index.chunk import ChunkLayout, Namespace
from pcr_core.tiers.host_pool import HostPool
from pcr_core.tiers.io_pool import InlineIo, IoPool
from pcr_core.tiers.manager import TierManager
from pcr_core.tiers.pinning import BackgroundPinning, NoPinning, Registrar
from pcr_core.tiers.settings import TierSettings
from pcr_core.tiers.slabs import SlabPlan, check_obtainable
from pcr_core.tiers.store.chunk_file import ChunkFormat
from pcr_core.tiers.store.chunk_store import ChunkStore
from pcr_core.tiers.store.no_store import NoStore


def open_tiers(
    layout: ChunkLayout,
    namespace: Namespace,
    settings: TierSettings | None = None,
    *,
    dram_bytes: int,
    cache_dir: Path,
    ssd_bytes: int,
    registrar: Registrar | None = None,
    on_progress: Callable[[], None] = lambda: None,
) -> TierManager:
    """Build both tiers with their threads; ``ssd_bytes=0`` leaves the SSD out.

    Args:
        layout: Shape of a chunk.
        namespace: Whose chunks these are.
        settings: Policies.
        dram_bytes: Hard budget of the DRAM tier.
        cache_dir: Folder of the store.
        ssd_bytes: Hard budget of the SSD tier.
        registrar: Page-locks the DRAM tier for a device; ``None`` leaves it as it is.
        on_progress: Called on other threads when there is something to ``poll``.

    Raises:
        ConfigError: If a budget holds no chunk or the folder cannot be used.
        StoreError: If the folder is another version's or its index is broken.
    """
    settings = settings or TierSettings()
    plan = SlabPlan.within(dram_bytes, layout.nbytes)
    check_obtainable(plan.nbytes)
    pinning = BackgroundPinning(registrar) if registrar else NoPinning()
    pool = HostPool(layout, plan, pinning=pinning)
    if ssd_bytes == 0:
        nothing = NoStore()
        return TierManager(
            layout, namespace, pool, nothing, InlineIo(nothing), settings
        )
    needed = ChunkFormat(layout, namespace).file_nbytes
    _check_budgets(ssd_bytes, settings.quota_bytes, needed)
    store = ChunkStore(
        cache_dir, ssd_bytes, tenant=settings.tenant, quota_bytes=settings.quota_bytes
    )
    io = IoPool(store, on_progress=on_progress)
    try:
        return TierManager(layout, namespace, pool, store, io, settings)
    except BaseException:
        io.close()
        store.close()
        raise


def _check_budgets(ssd_bytes: int, quota_bytes: int | None, needed: int) -> None:
    """To be called before a store is opened, which trims it to its budget.

    Args:
        ssd_bytes: Budget of the SSD tier.
        quota_bytes: This tenant's part of it, if that has a limit.
        needed: Bytes of one chunk file.

    Raises:
        ConfigError: If a budget holds no chunk.
    """
    budgets = {"ssd_bytes": ssd_bytes, "namespace_bytes": quota_bytes}
    for name, budget in budgets.items():
        if budget is not None and budget < needed:
            raise ConfigError(
                f"{name} is {budget} bytes but one chunk file of this model takes "
                f"{needed}; set it to at least {needed}, or ssd_bytes=0 to do without "
                "the SSD tier"
            )
