"""One token of each of several rows: what computes it, and over which memory.

``StepInRows`` works on the rows' own buffers and is always there. ``StepInSlots`` (in
``static_decode``) works on memory that never moves, so that a GPU can replay it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import torch

from pcr_core.model.batch_cache import BatchCache
from pcr_core.model.layerwise_cache import LayerwiseCache
from pcr_core.model.model_call import ModelCall

Decoding = Literal["invariant", "close", "serial"]
"""What several rows in one forward give: the bits of each alone, the same but for
rounding, or nothing of use, so that they run one after another."""


class DecodeStep(Protocol):
    """Computes decode steps. Engine thread only."""

    @property
    def nbytes(self) -> int:
        """Bytes held beside the rows' buffers."""
        ...

    @property
    def replays(self) -> bool:
        """Whether steps are recorded and replayed."""
        ...

    def logits(
        self, rows: Sequence[LayerwiseCache], tokens: Sequence[int]
    ) -> torch.Tensor:
        """Logits of one token more of each row, ``[rows, vocabulary]``.

        Its KV goes behind the row's last token; the row gets no longer. So what fails,
        or is asked for once more, can be repeated.

        Args:
            rows: With room for the token.
            tokens: One for each.

        Raises:
            ModelError: If the forward pass fails.
        """
        ...

    def settle(self, row: LayerwiseCache) -> None:
        """See to it that a row's KV is in its own buffer, and nowhere else."""
        ...

    def give_up(self) -> bool:
        """Free what is held beside the rows' buffers; returns whether it was any."""
        ...


class StepInRows:
    """Works on each row's own buffer, as long as it is.

    Args:
        call: Calls the model.
        decoding: Whether several rows are computed in one forward.

    Attributes:
        decoding: See above.
        nbytes: None.
        replays: They are not.
    """

    nbytes = 0
    replays = False

    def __init__(self, call: ModelCall, decoding: Decoding) -> None:
        self.decoding = decoding
        self._call = call

    def logits(
        self, rows: Sequence[LayerwiseCache], tokens: Sequence[int]
    ) -> torch.Tensor:
        """See ``DecodeStep``."""
        if len(rows) > 1 and self.decoding != "serial":
            return self._together(rows, tokens)
        pairs = zip(rows, tokens, strict=True)
        return torch.cat([self._alone(row, token) for row, token in pairs])

    def _alone(self, row: LayerwiseCache, token: int) -> torch.Tensor:
        row.begin(row.length)
        try:
            position = torch.tensor([[row.length]])
            return self._call(row, torch.tensor([[token]]), position, 1)
        finally:
            row.end(0)

    def _together(
        self, rows: Sequence[LayerwiseCache], tokens: Sequence[int]
    ) -> torch.Tensor:
        for row in rows:
            row.touch()
        positions = torch.tensor([[row.length] for row in rows])
        ids = torch.tensor([[token] for token in tokens])
        return self._call(BatchCache(rows), ids, positions, 1)

    def settle(self, row: LayerwiseCache) -> None:
        """It is there already."""

    def give_up(self) -> bool:
        """Nothing is held."""
        return False
