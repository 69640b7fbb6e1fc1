"""Puts the parts of the tiers together; each is told what it needs, and no more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypedDict

from pcr_core.cost import PrefillTimes
from pcr_core.index.adaptive import Adaptive
from pcr_core.index.look_ahead import LookAhead
from pcr_core.index.prefix_tree import PrefixTree
from pcr_core.stats import StoreCounters
from pcr_core.tiers.accounts import Accounts
from pcr_core.tiers.catalogue import Catalogue
from pcr_core.tiers.dram import DramTier
from pcr_core.tiers.eviction_log import EvictionLog
from pcr_core.tiers.forgetting import Forgetting
from pcr_core.tiers.heads import Heads
from pcr_core.tiers.host_pool import HostPool
from pcr_core.tiers.jobs import Io
from pcr_core.tiers.load_plan import LoadPlanner
from pcr_core.tiers.loading import Loading
from pcr_core.tiers.prefetch import Prefetcher
from pcr_core.tiers.read_in import ReadIn
from pcr_core.tiers.room import SsdRoom
from pcr_core.tiers.settings import TierSettings
from pcr_core.tiers.store.chunk_file import ChunkFormat
from pcr_core.tiers.store.no_store import Store
from pcr_core.tiers.trouble import TroubleLog
from pcr_core.tiers.write_back import WriteBack

_REMEMBERED = 65_536
"""Chunks whose use counts are remembered after they have left every tier."""


@dataclass(frozen=True, slots=True)
class Shared:
    """What the tier manager shares with its parts.

    Attributes:
        stats: Counters.
        log: Why chunks are gone.
        prefill: How long computing takes.
        poll: Takes in finished I/O.
        clock: Nanoseconds, for recency that outlives the process.
        timer: Seconds, for how long anything takes.
    """

    stats: StoreCounters
    log: EvictionLog
    prefill: PrefillTimes
    poll: Callable[[], None]
    clock: Callable[[], int]
    timer: Callable[[], float]


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts. Engine thread only."""

    format: ChunkFormat
    tree: PrefixTree
    adaptive: Adaptive | None
    dram: DramTier
    catalogue: Catalogue
    room: SsdRoom
    writes: WriteBack
    reads: ReadIn
    loading: Loading
    prefetcher: Prefetcher
    forgetting: Forgetting
    heads: Heads
    accounts: Accounts


def assemble(
    fmt: ChunkFormat,
    pool: HostPool,
    store: Store,
    io: Io,
    settings: TierSettings,
    shared: Shared,
) -> Parts:
    """Make the parts."""
    stats, log, trouble = shared.stats, shared.log, TroubleLog()
    policy = settings.host_policy(pool.capacity)
    tree = PrefixTree(policy, settings.disk_policy(), remembered=_REMEMBERED)
    dram = DramTier(pool, tree, stats, log)
    catalogue = Catalogue(tree, store, fmt.namespace.root, trouble, log)
    size, notes = fmt.file_nbytes, _Notes(stats=stats, trouble=trouble)
    room = SsdRoom(tree, store, io, catalogue, size, log=log, **notes)
    policies, share = settings.write_policy, pool.reserves.writes
    writes = WriteBack(tree, dram, room, io, fmt, policies, share=share, **notes)
    dram.save = writes.save_leaving
    forgetting = Forgetting(tree, dram, writes, store, io, log=log, **notes)
    reads = ReadIn(tree, dram, io, fmt, stats, trouble, room.lost)
    limit = pool.reserves.reads_ahead * fmt.layout.nbytes if settings.stop.ahead else 0
    adaptive = policy if isinstance(policy, Adaptive) else None
    tokens = fmt.layout.chunk_tokens
    accounts = Accounts(tree, adaptive, stats, shared.prefill, tokens, shared.clock)
    loading = _loading(dram, reads, forgetting, fmt, settings, shared)
    prefetcher = _prefetcher(tree, reads, catalogue, fmt, limit, stats)
    moving = (room, writes, reads, loading, prefetcher)
    heads = Heads(
        tree,
        dram,
        forgetting,
        root=fmt.namespace.root,
        chunk_tokens=tokens,
        shortest=settings.shortest_head,
    )
    about = (forgetting, heads, accounts)
    return Parts(fmt, tree, adaptive, dram, catalogue, *moving, *about)


class _Notes(TypedDict):
    """Where the parts write down what happens."""

    stats: StoreCounters
    trouble: TroubleLog


def _loading(
    dram: DramTier,
    reads: ReadIn,
    forgetting: Forgetting,
    fmt: ChunkFormat,
    settings: TierSettings,
    shared: Shared,
) -> Loading:
    planner = LoadPlanner(
        shared.prefill,
        reads.times,
        fmt.layout.chunk_tokens,
        fmt.file_nbytes,
        settings.longest_forward,
        len(fmt.layout.layers),
    )
    return Loading(
        dram,
        reads,
        fmt,
        settings.stop,
        planner,
        barred=forgetting.is_doomed,
        stats=shared.stats,
        poll=shared.poll,
        clock=shared.timer,
    )


def _prefetcher(
    tree: PrefixTree,
    reads: ReadIn,
    catalogue: Catalogue,
    fmt: ChunkFormat,
    limit: int,
    stats: StoreCounters,
) -> Prefetcher:
    return Prefetcher(
        tree,
        LookAhead(tree),
        reads,
        limit,
        adopt=catalogue.adopt,
        identify=lambda want, index: fmt.chunk(want.keys, want.tokens, index),
        stats=stats,
    )
