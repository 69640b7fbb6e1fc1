"""Memory for what lives between two matrix products. Knows no model code."""

from __future__ import annotations

import torch

KEPT_ROWS = 128
"""Matrices of up to so many rows are kept."""


class Scratch:
    """Memory of matrices between products, shared by all layers of the model.

    Few rows are kept: to get new memory at every decode step costs as much as filling
    it. More are not, as a long prompt's would be held for ever.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int, torch.dtype], torch.Tensor] = {}
        self._views: dict[tuple[str, int, torch.dtype, int], torch.Tensor] = {}

    def rows(
        self, purpose: str, like: torch.Tensor, count: int, room: int, width: int
    ) -> torch.Tensor:
        """``[room, width]``; what is in the first ``count`` rows is noise.

        The others are finite, so that a product takes them instead of padding.

        Args:
            purpose: What is in use at the same time has different ones.
            like: Of the same dtype.
            count: See above.
            room: See above.
            width: See above.
        """
        if room > KEPT_ROWS:
            rows = like.new_empty(room, width)
            if room > count:
                rows[count:].zero_()
            return rows
        key = purpose, width, like.dtype, room
        found = self._views.get(key)
        if found is None:
            found = self._views[key] = self._base(*key[:3])[:room]
        return found

    def _base(self, purpose: str, width: int, dtype: torch.dtype) -> torch.Tensor:
        key = purpose, width, dtype
        if key not in self._kept:
            with torch.inference_mode(mode=False):  # to be written in any mode
                self._kept[key] = torch.zeros(KEPT_ROWS, width, dtype=dtype)
        return self._kept[key]
