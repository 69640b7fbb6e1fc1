"""When a chunk in DRAM is written to SSD: three small answers to one question.

Prefill makes KV faster than many disks can write it (Llama2-13B: 4.6 GB per request),
so what is worth writing is a choice. The names are those of HiCache's and LMCache's
settings.
"""

from __future__ import annotations

from typing import Protocol

from pcr_core.index.node import Node


class WritePolicy(Protocol):
    """Decides about complete chunks that are not on SSD. Pure."""

    def when_used(self, node: Node) -> bool:
        """Whether to write it now that a request has used or computed it."""

    def when_leaving(self, node: Node) -> bool:
        """Whether to write it before it leaves DRAM."""


class WriteThrough:
    """Write every chunk as soon as it is complete: nothing is lost by a crash."""

    def when_used(self, node: Node) -> bool:
        """Return True."""
        return True

    def when_leaving(self, node: Node) -> bool:
        """Return False: it had its chance."""
        return False


class SecondTouch:
    """Write a chunk when it is used again: one-off prompts never reach the disk.

    Uses are remembered for a while after a chunk has left DRAM, so that one which is
    evicted between its uses gets there all the same.
    """

    def when_used(self, node: Node) -> bool:
        """Return whether this is at least its second use."""
        return node.uses >= 2

    def when_leaving(self, node: Node) -> bool:
        """Return False."""
        return False


class OnEvict:
    """Write a chunk only when DRAM is about to lose it: fewest writes."""

    def when_used(self, node: Node) -> bool:
        """Return False."""
        return False

    def when_leaving(self, node: Node) -> bool:
        """Return True."""
        return True


WRITE_POLICIES: dict[str, type[WritePolicy]] = {
    "write_through": WriteThrough,
    "second_touch": SecondTouch,
    "on_evict": OnEvict,
}
