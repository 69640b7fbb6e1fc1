"""What stands between the matrix products of a lean layer (see ``lean``).

``TorchGlue`` is a handful of torch's operations each; ``compiled_glue`` has the same in
one pass over memory each. They round differently, so an engine uses one of them
throughout, and its name is part of what makes stored KV interchangeable.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn.functional import rms_norm, silu

Angles = tuple[torch.Tensor, torch.Tensor]
"""What ``turn`` needs of the rotary positions, row by row along the first dimension."""


class Glue(Protocol):
    """Operations on matrices ``[rows, width]``, contiguous, of one dtype.

    Every row is computed by itself. All results go to memory of the caller's.

    Attributes:
        name: Equal bits, equal name.
        dtype: Of all matrices; ``None`` for any.
    """

    name: str
    dtype: torch.dtype | None

    def angles(self, cos: torch.Tensor, sin: torch.Tensor) -> Angles:
        """Prepare cosines and sines ``[rows, dim]``, once for all layers."""
        ...

    def norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
    ) -> None:
        """``out`` becomes the RMS norm of ``x``, times ``weight`` ``[width]``."""
        ...

    def add_norm(
        self,
        x: torch.Tensor,
        more: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        total: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """``total`` becomes ``x + more``, and ``out`` its norm."""
        ...

    def turn(
        self, heads: torch.Tensor, turning: int, angles: Angles, out: torch.Tensor
    ) -> None:
        """Apply rotary positions.

        Args:
            heads: ``[rows, heads, dim]``.
            turning: So many heads are turned; the rest is copied as it is.
            angles: Of these rows, from ``angles``.
            out: Of the shape of ``heads``; may be the same memory.
        """
        ...

    def gate(self, both: torch.Tensor, out: torch.Tensor) -> None:
        """``out`` becomes ``silu(gate) * up``; ``both`` has them side by side."""
        ...

    def add(self, x: torch.Tensor, more: torch.Tensor) -> None:
        """Add ``more`` to ``x``, in place."""
        ...


def _turned(x: torch.Tensor) -> torch.Tensor:
    """The halves of each head, swapped."""
    half = x.shape[-1] // 2
    return torch.cat((x[..., half:], x[..., :half]), dim=-1)


class TorchGlue:
    """In as few operations as torch offers. See ``Glue``."""

    name = "torch"
    dtype: torch.dtype | None = None

    def angles(self, cos: torch.Tensor, sin: torch.Tensor) -> Angles:
        """See ``Glue``; the sine's first half is negated, for ``_turned``."""
        half = sin.shape[-1] // 2
        signed = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
        return cos.unsqueeze(1), signed.unsqueeze(1)

    def norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
    ) -> None:
        """See ``Glue``."""
        out.copy_(rms_norm(x, weight.shape, weight, eps))

    def add_norm(
        self,
        x: torch.Tensor,
        more: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        total: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """See ``Glue``."""
        torch.add(x, more, out=total)
        self.norm(total, weight, eps, out)

    def turn(
        self, heads: torch.Tensor, turning: int, angles: Angles, out: torch.Tensor
    ) -> None:
        """See ``Glue``."""
        cos, sin = angles
        qk = heads[:, :turning]
        torch.addcmul(qk * cos, _turned(qk), sin, out=out[:, :turning])
        if out is not heads:
            out[:, turning:] = heads[:, turning:]

    def gate(self, both: torch.Tensor, out: torch.Tensor) -> None:
        """See ``Glue``."""
        gate, up = both.chunk(2, dim=-1)
        torch.mul(silu(gate), up, out=out)

    def add(self, x: torch.Tensor, more: torch.Tensor) -> None:
        """See ``Glue``."""
        x += more
