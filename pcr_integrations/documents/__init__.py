"""Documents in chains: found in prompts, so that they can be explained and forgotten.

Retriever wrappers note here what they hand over, and the language model wrappers look
for it in every prompt.

    from pcr_integrations import documents

    print(documents.registry().stats)
"""

from __future__ import annotations

from pcr_integrations.documents._question_first import ReuseWarning
from pcr_integrations.documents._registry import (
    DocumentRegistry,
    DocumentStats,
    registry,
)
from pcr_integrations.documents._source import (
    DocumentSource,
    Handover,
    Item,
    RetrieverStats,
)
from pcr_integrations.documents._submit import explain

__all__ = [
    "DocumentRegistry",
    "DocumentSource",
    "DocumentStats",
    "Handover",
    "Item",
    "RetrieverStats",
    "ReuseWarning",
    "explain",
    "registry",
]
