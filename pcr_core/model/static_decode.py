"""Decode steps over memory that never moves, recorded and replayed where that pays.

Which rows take part, how long they are and what they are given is in tensors that stay
where they are; a step's shapes depend only on how many rows there are and how long the
longest is, both rounded up. Rows of padding run along, in slots that nobody has.

Attention goes over all places of a slot and masks those behind a row's end, so a step
rounds differently from ``StepInRows``. Whether that is acceptable, and faster, is what
``graphs_probe`` finds out.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from pcr_core.model.decode_slots import DecodeSlots, places_for, rows_for
from pcr_core.model.decode_step import DecodeStep
from pcr_core.model.graphs import Graphs
from pcr_core.model.layerwise_cache import LayerwiseCache
from pcr_core.model.model_call import ModelCall
from pcr_core.model.slot_cache import SlotCache

_log = logging.getLogger("pcr_core.model")


class StepInSlots:
    """Works in ``DecodeSlots``. Engine thread only.

    Rows for which there is no slot are left to another step. If a step fails, so are
    all that follow: better slow than failing at every token.

    Args:
        call: Calls the model.
        slots: The memory; nobody else uses it.
        graphs: Records steps; to be dropped before the slots move.
        otherwise: What computes the rest.

    Attributes:
        failure: What a step failed of, if one has.
    """

    def __init__(
        self,
        call: ModelCall,
        slots: DecodeSlots,
        graphs: Graphs,
        otherwise: DecodeStep,
    ) -> None:
        self.failure = ""
        self._call = call
        self._slots = slots
        self._graphs = graphs
        self._otherwise = otherwise
        self._given: dict[int, torch.Tensor] = {}  # by rows: tokens and positions

    @property
    def nbytes(self) -> int:
        """See ``DecodeStep``; what recordings hold is not counted."""
        return self._slots.nbytes

    @property
    def replays(self) -> bool:
        """See ``DecodeStep``."""
        return not self.failure

    def logits(
        self, rows: Sequence[LayerwiseCache], tokens: Sequence[int]
    ) -> torch.Tensor:
        """See ``DecodeStep``."""
        if not self.failure:
            try:
                slots = self._slots.seat(rows)
                if slots is not None:
                    return self._in_slots(rows, tokens, slots)
            except Exception as error:  # a kernel, a recording, or this model's code
                _log.warning("decode steps are recorded no more: %s", error)
                self.failure = str(error) or type(error).__name__
                self.release()
        return self._otherwise.logits(rows, tokens)

    def _in_slots(
        self,
        rows: Sequence[LayerwiseCache],
        tokens: Sequence[int],
        slots: Sequence[int],
    ) -> torch.Tensor:
        count = rows_for(len(rows))
        places = places_for(max(row.length for row in rows) + 1)
        given = self._given_to(count)
        told = torch.zeros((2, count), dtype=torch.long)
        for row, token, slot in zip(rows, tokens, slots, strict=True):
            row.touch()
            told[0, slot], told[1, slot] = token, row.length
        given.copy_(told)
        keys = [part[:count, :, :places] for part in self._slots.keys]
        values = [part[:count, :, :places] for part in self._slots.values]

        def step() -> torch.Tensor:
            ids, positions = given
            cache = SlotCache(keys, values, positions)
            return self._call.one_each(cache, ids[:, None], positions[:, None])

        logits = self._graphs.run((count, places), step)
        return torch.cat([logits[slot : slot + 1] for slot in slots])

    def _given_to(self, count: int) -> torch.Tensor:
        """``[2, rows]``, always the same."""
        if count not in self._given:
            self._given[count] = torch.zeros(
                (2, count), dtype=torch.long, device=self._call.device
            )
        return self._given[count]

    def settle(self, row: LayerwiseCache) -> None:
        """See ``DecodeStep``."""
        self._slots.leave(row)

    def give_up(self) -> bool:
        """See ``DecodeStep``; recordings go, too."""
        held = self.nbytes > 0
        self._slots.give_up()
        return held

    def release(self) -> None:
        """Free slots and recordings until the next step."""
        self._slots.release()
