"""What the retriever wrappers of both frameworks do for ``speculate=True``."""

from __future__ import annotations

import inspect
from typing import Any

from pcr_core import ConfigError
from pcr_integrations.documents import DocumentSource, Item
from pcr_integrations.speculation._plan import Predicted
from pcr_integrations.speculation._speculator import Speculator


def speculator_for(source: DocumentSource, order: str, search: Any) -> Speculator:
    """Return a speculator for a wrapper.

    Args:
        source: The wrapper's source.
        order: Its setting of that name.
        search: The method of the retriever inside that searches.

    Raises:
        ConfigError: If that retriever does not report stages, or the order is not known
            before the search has ended.
    """
    if "on_stage" not in inspect.signature(search).parameters:
        raise ConfigError(
            "speculate=True needs a retriever that reports its stages, such as "
            "pcr_integrations.retrieval's FaissRetriever; another one is a search in "
            "one piece, so leave speculate out"
        )
    if order == "cache":
        raise ConfigError(
            "order='cache' asks the engine about the final documents, so there is "
            "nothing to compute before; use order='retrieval' or 'stable' with "
            "speculate=True"
        )
    return Speculator(Predicted(source), name=text_of)


def text_of(item: Item) -> str:
    """Return what makes two documents the same in a prompt."""
    return item.text
