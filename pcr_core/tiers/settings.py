"""How the tiers behave: policies by value, chosen once."""

from __future__ import annotations

from dataclasses import dataclass, field

from pcr_core.index.eviction import make_policy
from pcr_core.index.policies import EvictionPolicy
from pcr_core.tiers.stop_policy import StopPolicy
from pcr_core.tiers.write_policy import WritePolicy, WriteThrough


@dataclass(frozen=True)
class TierSettings:
    """Frozen.

    Attributes:
        eviction: Name of the eviction policy.
        window: Waiting requests to look at; ``None`` derives it from the DRAM budget.
        stop: How reads are made ahead and waited for.
        write_policy: When chunks are written to SSD.
        tenant: Whose chunks these are; the SSD quota is counted by it.
        quota_bytes: Most SSD bytes of this tenant, ``None`` for no limit of its own.
        longest_forward: Tokens of the longest forward, ``None`` for no limit.
        shortest_head: Tokens that the beginning of a chunk must save to be lent by
            itself; ``None`` if only whole chunks may be lent.
    """

    eviction: str = "lookahead-lru"
    window: int | None = None
    stop: StopPolicy = field(default_factory=StopPolicy)
    write_policy: WritePolicy = field(default_factory=WriteThrough)
    tenant: bytes = b""
    quota_bytes: int | None = None
    longest_forward: int | None = None
    shortest_head: int | None = None

    def host_policy(self, capacity: int) -> EvictionPolicy:
        """The policy of the DRAM tier of so many chunks."""
        return make_policy(self.eviction, capacity=capacity)

    def disk_policy(self) -> EvictionPolicy:
        """The policy of the SSD tier.

        ``adaptive`` judges by the DRAM tier; on SSD, where there is most room, it is
        its default.
        """
        name = "lookahead-lru" if self.eviction == "adaptive" else self.eviction
        return make_policy(name)
