"""Whether decode steps are recorded: tried at every start, on a device that can.

A recorded step attends to padding and rounds differently from an ordinary one, and what
a model's code does while it is recorded is its own affair. So both are run on the same
rows, and recording is used only if they agree and it is faster. The result is not kept
from one start to the next: it takes a second, and what relies on it is this process.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from pcr_core.errors import PcrError
from pcr_core.model.chunk_io import ChunkIO
from pcr_core.model.decode_slots import DecodeSlots
from pcr_core.model.decode_step import DecodeStep
from pcr_core.model.graphs import Graphs
from pcr_core.model.key_blocks import KEY_BLOCK
from pcr_core.model.layerwise_cache import LayerwiseCache
from pcr_core.model.loading import LoadedModel
from pcr_core.model.rounding import differ_by_rounding
from pcr_core.model.runner import Row, Runner
from pcr_core.model.static_decode import StepInSlots

_LENGTHS = (40, 23, 61, 9, 33, 5, KEY_BLOCK - 1, KEY_BLOCK + 17)
_MOST_ROWS = len(_LENGTHS)
_COMPARED = 4
_ROOM = _COMPARED + 1
_ROUNDS = 5
_CALLS = 4
_WORTH = 0.95
"""What a step's time must come down to: timings err by a few per cent."""


@dataclass(frozen=True)
class GraphsChoice:
    """Whether decode steps are recorded, and what speaks for it.

    Attributes:
        on: Whether they are.
        ratios: Time of a recorded step relative to an ordinary one, by number of rows;
            empty if it was not measured.
        reason: Why they are not.
    """

    on: bool = False
    ratios: Mapping[int, float] = field(default_factory=dict)
    reason: str = ""


def choose_graphs(
    loaded: LoadedModel, runner: Runner, graphs: Graphs, rows: int, most_bytes: float
) -> GraphsChoice:
    """Try recorded steps; if they are chosen, ``runner`` decodes by them from now on.

    Args:
        loaded: The model, prepared.
        runner: Runs it; no row is in use.
        graphs: Records.
        rows: How many rows there may be in a step.
        most_bytes: What the slots may take.
    """
    if runner.decoding == "serial":
        return GraphsChoice(reason="this model's code takes one row at a time")
    slots = DecodeSlots(
        loaded.shapes, loaded.dtype, loaded.device, most_bytes, graphs.drop
    )
    step = StepInSlots(runner.call, slots, graphs, runner.step)
    try:
        choice = _try(loaded, runner, step, min(rows, _MOST_ROWS))
    except PcrError as error:  # no memory for so many rows, or the model itself fails
        choice = GraphsChoice(reason=str(error))
    if choice.on:
        runner.decode_by(step)
    return choice


def _try(
    loaded: LoadedModel, runner: Runner, step: StepInSlots, most: int
) -> GraphsChoice:
    opened, ratios = list[Row](), dict[int, float]()
    try:
        for length in _LENGTHS[:most]:
            if opened and not runner.fits(length + _ROOM):
                break  # nor will there be as many in use
            opened.append(_filled(loaded, runner, length))
        for count in sorted({1, len(opened)}):
            rows = [row.cache for row in opened[:count]]
            reason = _disagreement(loaded, runner, step, rows)
            if reason:
                return GraphsChoice(reason=reason)
            ratios[count] = _ratio(step, runner.step, rows)
    finally:
        step.release()
        for row in opened:
            row.tokens.clear()
            runner.close_row(row)
    if max(ratios.values()) > _WORTH:
        return GraphsChoice(ratios=ratios, reason="it is not faster")
    return GraphsChoice(on=True, ratios=ratios)


def _filled(loaded: LoadedModel, runner: Runner, length: int) -> Row:
    length = min(length, loaded.context_window - _ROOM)
    row = runner.open_row(length + _ROOM)
    io = ChunkIO({}, {}, filled=lambda index: None, between=lambda: None)
    runner.prefill(row, [(7 * at + length) % 97 for at in range(length)], io)
    return row


def _disagreement(
    loaded: LoadedModel,
    runner: Runner,
    step: StepInSlots,
    rows: Sequence[LayerwiseCache],
) -> str:
    """Why some steps more may not be recorded; nothing if they may."""
    to_the_bit = runner.cuts.exact or runner.decoding == "invariant"
    for number in range(_COMPARED):
        tokens = [(13 * number + row.length) % 97 for row in rows]
        expected = runner.step.logits(rows, tokens)
        found = step.logits(rows, tokens)
        for row in rows:
            row.extend()
        if step.failure:
            return step.failure
        if not step.nbytes:
            return "there is no memory for it"
        if to_the_bit and not torch.equal(expected, found):
            return "bits differ, and they must not"
        if not differ_by_rounding(expected, found, loaded.dtype):
            return "results differ by more than rounding"
    for row in rows:
        row.rewind(_COMPARED)
    step.release()  # what it has written is beyond the rows' ends now
    return ""


def _ratio(
    step: DecodeStep, ordinary: DecodeStep, rows: Sequence[LayerwiseCache]
) -> float:
    tokens = [row.length % 97 for row in rows]
    step.logits(rows, tokens)  # records
    ratios = []
    for _ in range(_ROUNDS):
        slow = _seconds(ordinary, rows, tokens)
        ratios.append(_seconds(step, rows, tokens) / slow)
    return statistics.median(ratios)


def _seconds(
    step: DecodeStep, rows: Sequence[LayerwiseCache], tokens: Sequence[int]
) -> float:
    began = time.perf_counter()
    for _ in range(_CALLS):
        logits = step.logits(rows, tokens)
        int(logits[0].argmax())  # as in use: a token is chosen before the next step
    return time.perf_counter() - began
