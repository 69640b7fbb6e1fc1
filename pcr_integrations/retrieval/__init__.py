"""Vector search in stages, and prefill that begins before the search has ended.

    import faiss
    from pcr_integrations.retrieval import StagedFaissIndex

    staged = StagedFaissIndex(faiss.read_index("documents.faiss"))
    for stage in staged.stages(query, k=3):
        print(stage.effort, stage.ids[0])

Needs ``pip install "pcr-rag[retrieval]"``. Loads no torch.
"""

from __future__ import annotations

from pcr_integrations._extras import needs_extra

with needs_extra("retrieval", package="faiss"):
    from pcr_integrations.retrieval._index import Stage, StagedFaissIndex

__all__ = ["Stage", "StagedFaissIndex"]
