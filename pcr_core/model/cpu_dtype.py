"""Which dtype ``dtype="auto"`` means on a CPU.

Checkpoints come in 16-bit floats. A CPU without matrix products for them converts every
operand, and a prefill takes several times as long as in float32.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from pcr_core.memory import available_bytes

_log = logging.getLogger("pcr_core.engine")


def has_products(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies matrices of ``dtype`` as they are."""
    if dtype is torch.float32:
        return True
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())  # noqa: SLF001


def suited_to_cpu(model: Any) -> Any:
    """The model in its own dtype, or in float32 if the CPU would emulate that one.

    Widening needs at most half of the memory that is left; otherwise the model stays
    as it is, and a warning says so.
    """
    dtype: torch.dtype = model.dtype
    if not dtype.is_floating_point or has_products(dtype):
        return model
    name = str(dtype).removeprefix("torch.")
    needed = sum(4 * parameter.numel() for parameter in model.parameters())
    if needed > available_bytes() // 2:
        _log.warning(
            "this CPU has no matrix products of %s, so prefill is slow; float32 would "
            "take %.1f GiB, more than half of the memory that is left",
            name,
            needed / 2**30,
        )
        return model
    _log.info(
        "this CPU has no matrix products of %s: running in float32 (dtype=%r keeps "
        "the checkpoint's)",
        name,
        name,
    )
    return torch.nn.Module.float(model)
