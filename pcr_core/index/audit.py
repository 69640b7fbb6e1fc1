"""Audit of the index: recounts from the nodes what the tree keeps up to date."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from pcr_core.index.chunk import ChunkKey
from pcr_core.index.node import Disk, Host, Node, is_bare
from pcr_core.index.victim_queue import VictimQueue


def audit_links(nodes: Mapping[ChunkKey, Node]) -> list[str]:
    """Recount children from the parent links; check each node by itself.

    Returns:
        One line per broken invariant.
    """
    problems = []
    counts: dict[Node, list[int]] = {}
    for node in nodes.values():
        if node.parent is not None:
            count = counts.setdefault(node.parent, [0, 0, 0])
            count[0] += 1
            count[1] += node.host is not Host.NONE
            count[2] += node.disk is not Disk.NONE
    for key, node in nodes.items():
        found = counts.pop(node, [0, 0, 0])
        kept = [node.children, node.host_children, node.disk_children]
        name = key.hex()[:12]
        if found != kept:
            problems.append(f"chunk {name}: has children {found}, counted {kept}")
        problems += [f"chunk {name}: {text}" for text in _audit_node(key, node)]
    problems += [f"chunk {node.key.hex()[:12]}: dropped parent" for node in counts]
    return problems


def audit_queue(
    queue: VictimQueue, nodes: Iterable[Node], evictable: Callable[[Node], bool]
) -> list[str]:
    """Check that every evictable node would be found in its turn.

    Returns:
        One line per broken invariant.
    """
    return [
        f"chunk {node.key.hex()[:12]}: its turn to be evicted would be missed"
        for node in nodes
        if evictable(node) and queue.misplaced(node)
    ]


def _audit_node(key: ChunkKey, node: Node) -> list[str]:
    problems = []
    if key != node.key:
        problems.append("is filed under another key")
    if is_bare(node):
        problems.append("is bare but was not dropped")
    if node.disk is Disk.WRITING and node.host is not Host.READY:
        problems.append("is being written without a DRAM copy")
    if node.disk is not Disk.STORED and node.disk_bytes:
        problems.append("has bytes on SSD but is not stored")
    if node.parent is not None and node.parent.tenant != node.tenant:
        problems.append("belongs to another tenant than its parent")
    if not 0 <= node.misses <= node.uses or node.cost_sum < 0:
        problems.append(f"missed {node.misses} of {node.uses} uses")
    return problems
