"""Prefill that begins while a search in stages is still running.

    from pcr_integrations.speculation import Speculator, explicit

    speculator = Speculator(explicit(engine, lambda texts: HEAD + " ".join(texts)))
    with speculator.begin() as speculation:
        for stage in staged.stages(query, k=3):
            found = [texts[i] for i in stage.ids[0]]
            speculation.finish(found) if stage.last else speculation.stage(found)
    print(speculator.stats)

The retriever wrappers do this by themselves with ``speculate=True``.
"""

from __future__ import annotations

from pcr_integrations.speculation._plan import Plan, Planner, Predicted, Step, explicit
from pcr_integrations.speculation._speculator import Speculation, Speculator
from pcr_integrations.speculation._stats import SpeculationStats

__all__ = [
    "Plan",
    "Planner",
    "Predicted",
    "Speculation",
    "SpeculationStats",
    "Speculator",
    "Step",
    "explicit",
]
