"""Documents in chains: found in prompts, so that they can be explained and forgotten.

Retriever wrappers note here what they hand over, and the language model wrappers look
for it in every prompt.

    from pcr_integrations import documents

    print(documents.registry().stats)
"""

from __future__ import annotations

from pcr_integrations.documents._registry import (
    DocumentRegistry,
    DocumentStats,
    registry,
)

__all__ = ["DocumentRegistry", "DocumentStats", "registry"]
