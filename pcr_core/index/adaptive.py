"""Which fixed policy suits the traffic? Play all of them on it, follow the best."""

from __future__ import annotations

from collections.abc import Sequence

from pcr_core.errors import ConfigError
from pcr_core.index.chunk import ChunkKey
from pcr_core.index.look_ahead import LookAhead
from pcr_core.index.node import HOST_NONE, Event, Node
from pcr_core.index.policies import EvictionPolicy, LookAheadLru, Lru, Pgdsf, Rank
from pcr_core.index.prefix_tree import PrefixTree

_ROOT = bytes(32)
_HORIZON = 400
"""Requests over which hit rates are averaged, roughly."""
_MARGIN = 0.005
"""Share of chunks that another policy must hit more, to take over."""
_PATIENCE = 100
"""Requests between two changes of policy, at least."""
_LARGEST = 8192
"""Chunks of a shadow cache, at most; a larger tier is sampled."""


class ShadowCache:
    """A cache without bytes: what would have hit under a fixed policy.

    Engine thread only.

    Args:
        policy: Ranks the chunks.
        capacity: Chunks it holds.
        remembered: Evicted chunks whose use counts are kept.

    Attributes:
        tree: Its own tree; every copy is in the DRAM tier.
        evictions: Chunks that made room for others so far.
        bypassed: Chunks that were not kept because nothing could be evicted.
    """

    def __init__(
        self, policy: EvictionPolicy, capacity: int, *, remembered: int = 0
    ) -> None:
        self.tree = PrefixTree(policy, remembered=remembered)
        self.evictions = 0
        self.bypassed = 0
        self._free = capacity

    def request(self, keys: Sequence[ChunkKey], cost: float) -> int:
        """Serve one request: match, insert what is missing, commit.

        Args:
            keys: Its chunk keys, root first.
            cost: Prefill seconds per computed token.

        Returns:
            How many chunks hit.
        """
        tree = self.tree
        path = tree.grow(_ROOT, keys)
        tree.pin(path)
        missed = [i for i, node in enumerate(path) if node.host is HOST_NONE]
        for index in missed:
            if not self._make_room():
                self.bypassed += 1
                continue
            tree.advance_host(path[index], Event.RESERVE)
            tree.advance_host(path[index], Event.FILL)
            self._free -= 1
        tree.commit(path, 0, missed=missed, cost=cost)
        tree.unpin(path)
        return len(path) - len(missed)

    def _make_room(self) -> bool:
        if self._free > 0:
            return True
        victim = self.tree.host_victim()
        if victim is None:
            return False
        self.tree.advance_host(victim, Event.EVICT)
        self.evictions += 1
        self._free += 1
        return True


class Adaptive:
    """Follows the fixed policy that would have hit most lately.

    Each candidate runs as a shadow cache of the tier's size on the live traffic; their
    hit rates are averaged with a decay. Another policy takes over when it leads by a
    margin, and not too soon after the last change. Engine thread only.

    A large tier is played at a smaller scale: only chunks whose key falls into a share
    of all keys count, in caches of that share of the capacity (SHARDS, FAST'15). Keys
    are digests, and the sampled chunks of a path are again a path. So the memory is
    bounded: about 2.2 KB per chunk of a shadow, less than 20 MB.

    Args:
        capacity: Chunks that the live tier holds.

    Raises:
        ConfigError: If ``capacity`` is not at least 1.

    Attributes:
        current: Name of the policy in charge.
        epoch: Number of changes so far.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ConfigError(
                "eviction 'adaptive' plays its candidates on caches as large as the "
                f"tier: pass a capacity of at least 1 chunk, not {capacity}"
            )
        size = min(capacity, _LARGEST)
        self._limit = (size << 32) // capacity
        self._pgdsf = Pgdsf()
        self._shadow_pgdsf = Pgdsf()
        self._policies: dict[str, EvictionPolicy] = {
            "lookahead-lru": LookAheadLru(),
            "lru": Lru(),
            "pgdsf": self._pgdsf,
        }
        self._shadows = {
            "lookahead-lru": ShadowCache(LookAheadLru(), size),
            "lru": ShadowCache(Lru(), size),
            "pgdsf": ShadowCache(self._shadow_pgdsf, size, remembered=4 * size),
        }
        self._look_ahead = LookAhead(self._shadows["lookahead-lru"].tree)
        self._hits = dict.fromkeys(self._shadows, 0.0)
        self._chunks = 0.0
        self._since = 0
        self.current = "lookahead-lru"
        self.epoch = 0

    @property
    def rates(self) -> dict[str, float]:
        """Hit rate of each candidate lately, from 0 to 1."""
        return {
            name: hits / max(self._chunks, 1.0) for name, hits in self._hits.items()
        }

    def look_ahead(self, window: Sequence[Sequence[ChunkKey]]) -> None:
        """Show the queue to the candidate that looks at it; see ``LookAhead``."""
        self._look_ahead.update([self._sample(keys) for keys in window])

    def observe(self, keys: Sequence[ChunkKey], *, cost: float) -> None:
        """Play one finished request to all candidates.

        Args:
            keys: Its chunk keys, root first.
            cost: Prefill seconds per computed token.
        """
        keep = 1 - 1 / _HORIZON
        keys = self._sample(keys)
        self._chunks = keep * self._chunks + len(keys)
        for name, shadow in self._shadows.items():
            self._hits[name] = keep * self._hits[name] + shadow.request(keys, cost)
        self._since += 1
        self._follow()
        if self.current != "pgdsf":
            # Its own clock stands still while others choose the victims.
            self._pgdsf.clock = max(self._pgdsf.clock, self._shadow_pgdsf.clock)

    def rank(self, node: Node) -> Rank:
        """Return the rank by the policy in charge."""
        return self._policies[self.current].rank(node)

    def used(self, node: Node) -> None:
        """Stamp the priority, whoever is in charge."""
        self._pgdsf.used(node)

    def evicted(self, node: Node) -> None:
        """Move the clock if it was the one that chose the victim."""
        if self.current == "pgdsf":
            self._pgdsf.evicted(node)
        else:
            self._pgdsf.dropped(node)

    def dropped(self, node: Node) -> None:
        """Forget the priority."""
        self._pgdsf.dropped(node)

    def _sample(self, keys: Sequence[ChunkKey]) -> Sequence[ChunkKey]:
        limit = self._limit
        if limit == 1 << 32:
            return keys
        return [key for key in keys if int.from_bytes(key[:4], "big") < limit]

    def _follow(self) -> None:
        rates = self.rates
        best = max(rates, key=rates.__getitem__)
        if self._since >= _PATIENCE and rates[best] > rates[self.current] + _MARGIN:
            self.current = best
            self.epoch += 1
            self._since = 0
