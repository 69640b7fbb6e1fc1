"""Heads: the first tokens of a stored chunk, for a prompt that leaves it in its middle.

The KV of a token depends on the tokens before it and on nothing behind it. So where a
prompt goes on differently than a chunk that is in DRAM, what both begin with can be
copied all the same. Not where reuse must not change a bit: then computing starts at
whole tiles or chunks only. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pcr_core.index.chunk import ChunkKey
from pcr_core.index.node import Disk, Host, Node
from pcr_core.index.prefix_tree import PrefixTree
from pcr_core.tiers.dram import DramTier
from pcr_core.tiers.forgetting import Forgetting
from pcr_core.tiers.host_pool import Slot


@dataclass(frozen=True, slots=True)
class Head:
    """Leading tokens of a chunk of a prompt, which are those of another chunk, too.

    Attributes:
        node: The other chunk.
        slot: Where it is.
        tokens: How many.
    """

    node: Node
    slot: Slot
    tokens: int


class Heads:
    """Finds heads.

    Chunks that are only on SSD are not looked at: what they hold is in their files.

    Args:
        tree: Which chunks there are.
        dram: Which of them are in DRAM.
        forgetting: Which of them must not be used any more.
        root: Digest of the namespace.
        chunk_tokens: Tokens per chunk.
        shortest: Tokens that a head must save; ``None`` if none may be used.
    """

    def __init__(
        self,
        tree: PrefixTree,
        dram: DramTier,
        forgetting: Forgetting,
        *,
        root: bytes,
        chunk_tokens: int,
        shortest: int | None,
    ) -> None:
        self._tree = tree
        self._dram = dram
        self._forgetting = forgetting
        self._root = root
        self._chunk_tokens = chunk_tokens
        self._shortest = shortest

    def find(
        self,
        keys: Sequence[ChunkKey],
        tokens: Sequence[int],
        usable: int,
        resident: int = 0,
    ) -> dict[int, Head]:
        """Heads for the chunks of a prompt that cannot be read themselves. Pure.

        Only where everything before such a chunk can be read or is on the device, as
        far back as the chunk before it: elsewhere computing does not stop in between.

        Args:
            keys: Keys of its full chunks, root first.
            tokens: The whole prompt.
            usable: How many leading chunks may be read rather than computed.
            resident: Leading tokens that the device holds.

        Returns:
            Heads by chunk index; a last partial chunk may have one.
        """
        if self._shortest is None:
            return {}
        found = {}
        for index in self._missing(keys, usable, resident // self._chunk_tokens):
            start = index * self._chunk_tokens
            # The last token is computed in any case, for its logits.
            wanted = tokens[start : min(start + self._chunk_tokens, len(tokens) - 1)]
            parent = keys[index - 1] if index else self._root
            node, count = self._dram.siblings.nearest(parent, wanted, self._is_there)
            if node is None or count - max(0, resident - start) < self._shortest:
                continue
            found[index] = Head(node, self._dram.slot(node), count)
        return found

    def _missing(
        self, keys: Sequence[ChunkKey], usable: int, covered: int
    ) -> Iterator[int]:
        """Chunks that cannot be read, behind one that can, or behind nothing."""
        nodes = self._tree.match(keys[:usable])
        there = [i < covered or _may_be_read(node) for i, node in enumerate(nodes)]
        if usable == len(keys):
            there.append(False)  # what is left behind the last full chunk
        for index, (before, this) in enumerate(pairwise([True, *there])):
            if before and not this:
                yield index

    def _is_there(self, node: Node) -> bool:
        return node.host is Host.READY and not self._forgetting.is_doomed(node)


def _may_be_read(node: Node | None) -> bool:
    return node is not None and (node.host is not Host.NONE or node.disk is Disk.STORED)
