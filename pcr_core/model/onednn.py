"""oneDNN's linear layer on packed weights, as torch exposes it (private operators).

torch repacks the weights of a bf16 layer at every call; for a question of twenty tokens
that is most of the time. These operators pack once.
"""

from __future__ import annotations

import torch

from pcr_core.model.cpu_dtype import has_products

_HINT_ROWS = 64  # the row count oneDNN plans the packed layout for


def supports(dtype: torch.dtype) -> bool:
    """Whether this machine has a packed kernel for ``dtype``."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return dtype in (torch.float32, torch.bfloat16) and has_products(dtype)


def pack(weight: torch.Tensor) -> torch.Tensor:
    """An opaque copy of ``[out, in]`` weights; ``to_dense()`` gives the same bits."""
    op = torch.ops.mkldnn._reorder_linear_weight  # noqa: SLF001
    packed: torch.Tensor = op(weight, _HINT_ROWS)
    return packed


def memory_of(packed: torch.Tensor) -> tuple[int, int] | None:
    """Address and size in bytes of packed weights, where torch tells them."""
    try:
        operators = torch.ops.mkldnn
        return operators.data_ptr(packed), operators._nbytes(packed)  # noqa: SLF001
    except (AttributeError, RuntimeError):
        return None


def linear(
    rows: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """``[rows, in]`` times packed weights, in new memory."""
    op = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001
    out: torch.Tensor = op(rows, packed, bias, "none", [], "")
    return out
