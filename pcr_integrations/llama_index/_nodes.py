"""LlamaIndex nodes on their way through a wrapper."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore

from pcr_core import Document
from pcr_integrations.documents import Handover, Item

DocumentId = Callable[[BaseNode], str]


def items(nodes: Sequence[NodeWithScore], document_id: DocumentId | None) -> list[Item]:
    """Return nodes as the registry takes them.

    A node stands in prompts with its metadata in front of its text, or as text alone
    where a chain writes something between the two (citations).
    """
    return [_item(node, document_id) for node in nodes]


def in_order(nodes: Sequence[NodeWithScore], handover: Handover) -> list[NodeWithScore]:
    """Return the same objects in the order in which they are handed over."""
    return [nodes[index] for index in handover.order]


def _item(node: NodeWithScore, document_id: DocumentId | None) -> Item:
    name = node.node.node_id if document_id is None else document_id(node.node)
    texts = (
        node.node.get_content(metadata_mode=mode).strip()
        for mode in (MetadataMode.LLM, MetadataMode.NONE)
    )
    forms = tuple(Document(id=name, text=text) for text in dict.fromkeys(texts) if text)
    return Item(forms, node.score)
