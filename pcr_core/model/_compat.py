"""Every difference between transformers 5.0 and 5.24, in one place.

Known differences: ``forward(past_key_values=)`` became ``forward(cache=)``; mask
functions got ``q_length``/``q_offset`` instead of ``cache_position``; a layer's
``get_mask_sizes`` gets the query length as an int instead of a tensor of positions;
``GgufConfig`` asks for what GGUF loading did without asking.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch


def cache_argument(model: Any) -> str:
    """The name under which this model's ``forward`` takes a cache."""
    names = inspect.signature(model.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def takes_logits_to_keep(model: Any) -> bool:
    """Whether ``forward`` can restrict the logits to some positions."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def query_length(query: int | torch.Tensor) -> int:
    """Number of new tokens, from what ``get_mask_sizes`` was given."""
    return int(query.shape[0]) if isinstance(query, torch.Tensor) else query


def query_range(arguments: dict[str, Any]) -> tuple[int | torch.Tensor, int]:
    """``(first position, number)`` of the queries a mask function is asked for."""
    positions = arguments.get("cache_position")
    if positions is not None:
        return positions[0], int(positions.shape[0])
    return int(arguments.get("q_offset", 0)), int(arguments["q_length"])


def register_attention(name: str, attention: Callable[..., Any], mask: Any) -> None:
    """Make an attention function and its mask function known to transformers."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)


def dequantize_options() -> dict[str, Any]:
    """Ask GGUF loading for ordinary weights; older transformers knew nothing else."""
    import transformers

    if not hasattr(transformers, "GgufConfig"):
        return {}
    return {"quantization_config": transformers.GgufConfig(dequantize=True)}
