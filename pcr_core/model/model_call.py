"""One call of the model's ``forward``, and what its errors become."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache

from pcr_core.errors import DeviceMemoryError, ModelError, PcrError
from pcr_core.model import _compat
from pcr_core.model.loading import LoadedModel


class ModelCall:
    """Calls one model. Engine thread only.

    Args:
        loaded: The model.

    Attributes:
        device: Where it runs.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self.device = loaded.device
        self._model = loaded.model
        self._cache_argument = _compat.cache_argument(loaded.model)
        self._partial_logits = _compat.takes_logits_to_keep(loaded.model)

    def __call__(
        self, cache: Cache, ids: torch.Tensor, positions: torch.Tensor, count: int
    ) -> torch.Tensor:
        """One forward; the logits of the ``count``-th token, ``[rows, vocabulary]``.

        Args:
            cache: Takes the new KV.
            ids: ``[rows, tokens]``, on any device.
            positions: Of the same shape.
            count: See above.

        Raises:
            DeviceMemoryError: If memory ran out.
            ModelError: If the forward pass fails.
        """
        if not self._partial_logits:
            return self._run(cache, ids, positions)[:, count - 1]
        # A tensor, not a number: with padding the last real row is not the last.
        keep = torch.tensor([count - 1], device=self.device)
        return self._run(cache, ids, positions, logits_to_keep=keep)[:, -1]

    def one_each(
        self, cache: Cache, ids: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """One forward of ``[rows, 1]`` tokens; ``[rows, vocabulary]`` logits.

        Nothing comes from the host if ``ids`` and ``positions`` are on the device.

        Raises:
            DeviceMemoryError, ModelError: As above.
        """
        return self._run(cache, ids, positions)[:, -1]

    def _run(
        self, cache: Cache, ids: torch.Tensor, positions: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        options[self._cache_argument] = cache
        try:
            with torch.inference_mode():
                output = self._model(
                    input_ids=ids.to(self.device),
                    position_ids=positions.to(self.device),
                    use_cache=True,
                    **options,
                )
        except PcrError:
            raise  # not the model's: a read was lost, or whoever asked has gone
        except torch.OutOfMemoryError as error:
            raise DeviceMemoryError(
                f"the forward pass ran out of memory: {error}; use a shorter prompt or "
                "another device"
            ) from error
        except (RuntimeError, ValueError, IndexError) as error:
            raise ModelError(f"the forward pass failed: {error}") from error
        logits: torch.Tensor = output.logits
        return logits
