"""Everything below some nodes, found without anyone keeping lists of children."""

from __future__ import annotations

from collections.abc import Iterable

from pcr_core.index.node import Node


def subtree(nodes: Iterable[Node], heads: Iterable[Node | None]) -> list[Node]:
    """Return the nodes that are at or below some heads, leaves first.

    Args:
        nodes: All nodes.
        heads: Where to start; ``None`` stands for an unknown one.
    """
    inside = {head for head in heads if head is not None}
    depths: dict[Node, int] = {}
    found = []
    for node in nodes:
        # Up to the first ancestor with a verdict, so that every node is met once.
        way = []
        above: Node | None = node
        while above is not None and above not in depths:
            way.append(above)
            above = above.parent
        depth = -1 if above is None else depths[above]
        for below in reversed(way):
            depth += 1
            depths[below] = depth
            if below.parent in inside:
                inside.add(below)
            if below in inside:
                found.append(below)
    return sorted(found, key=depths.__getitem__, reverse=True)
