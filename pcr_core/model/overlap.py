"""Which copies are to run beside compute: measured once per model and machine.

Overlap hides copies, and costs synchronisation and a processor's time; the paper's own
ablation has a model for which one direction alone is best (PCR, arXiv 2603.23049). So
the modes are tried on a prefill that loads chunks and fills one, and the choice is
remembered in the cache folder.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch

from pcr_core.index.chunk import LayerShape
from pcr_core.model.chunk_io import ChunkIO
from pcr_core.model.loading import LoadedModel
from pcr_core.model.prefill import Prefilled
from pcr_core.model.prefill_plan import Cuts
from pcr_core.model.runner import Runner
from pcr_core.model.streams import OVERLAPS, Overlap, streams_opened

_log = logging.getLogger("pcr_core.model")

_LOADED_TOKENS = 1024
_ROUNDS = 5
_FEWEST = 3
_SECONDS = 2.0
_WORTH = 0.95
"""What a mode must bring the time down to: timings err by a few per cent."""


@dataclass(frozen=True)
class OverlapChoice:
    """The mode in use, and what speaks for it.

    Attributes:
        mode: The mode.
        ratios: Time of each mode that was tried, relative to ``"none"``; empty if the
            mode was set.
        copying: Share of the time that copies took without overlap: no mode can save
            more. Unknown (0.0) if the mode was set.
    """

    mode: Overlap
    ratios: Mapping[str, float] = field(default_factory=dict)
    copying: float = 0.0


class _Strip:
    """Chunks in a row in host memory, as a slab of DRAM has them.

    With noise in them: pages of zeros that nobody has written are all the same page,
    and copied from the processor's cache.
    """

    def __init__(
        self, shapes: tuple[LayerShape, ...], chunk: int, count: int, like: LoadedModel
    ) -> None:
        rooms = [
            (shape.kv_heads, chunk, dim)
            for shape in shapes
            for dim in (shape.k_dim, shape.v_dim)
        ]
        sizes = [math.prod(room) for room in rooms]
        memory = torch.empty(
            (count, sum(sizes)),
            dtype=like.dtype,
            pin_memory=like.device.type == "cuda",
        ).normal_(generator=torch.Generator().manual_seed(0))
        parts = [
            part.view(count, *room)
            for part, room in zip(torch.split(memory, sizes, 1), rooms, strict=True)
        ]
        self._layers = list(zip(parts[::2], parts[1::2], strict=True))

    def span(self, count: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``ChunkTensors``; always from the first chunk on."""
        keys, values = self._layers[layer]
        return keys[:count], values[:count]


class _Place:
    """One chunk of a strip."""

    def __init__(self, strip: _Strip, index: int) -> None:
        self.index = index
        self.span = strip.span


def choose_overlap(
    loaded: LoadedModel, chunk_tokens: int, cuts: Cuts, folder: Path
) -> OverlapChoice:
    """Measure, or remember, which mode is best. Call with the model prepared.

    Args:
        loaded: The model.
        chunk_tokens: Tokens per chunk.
        cuts: Where prefills are cut.
        folder: Where choices are remembered.
    """
    path = folder / f"overlap-{_name(loaded, chunk_tokens, cuts)}.json"
    known = _read(path)
    if known is None:
        known = _measure(loaded, chunk_tokens, cuts)
        _keep(path, known)
    return known


def _measure(loaded: LoadedModel, chunk_tokens: int, cuts: Cuts) -> OverlapChoice:
    most = min(_LOADED_TOKENS, loaded.context_window - chunk_tokens - 1)
    count = most // chunk_tokens
    if count < 1:
        return OverlapChoice("none")
    run = _workload(loaded, chunk_tokens, cuts, count)
    run("none")
    copying = _copying(*run("none"))
    if copying < 1.0 - _WORTH:
        return OverlapChoice("none", {}, copying)
    rounds = _rounds(lambda mode: run(mode)[0])
    ratios = {str(mode): statistics.median(rounds[mode]) for mode in OVERLAPS}
    return OverlapChoice(_best(rounds), ratios, copying)


def _copying(seconds: float, prefilled: Prefilled) -> float:
    """Share of a prefill without overlap that was spent copying."""
    spans = [
        span
        for forward in prefilled.forwards
        for span in (*forward.copied.loads, *forward.copied.stores)
    ]
    return sum(span.stop - span.start for span in spans) / seconds


def _rounds(seconds: Callable[[Overlap], float]) -> dict[Overlap, list[float]]:
    """Time of each mode in each round, relative to ``"none"`` in that round."""
    rounds: dict[Overlap, list[float]] = {mode: [] for mode in OVERLAPS}
    until = time.perf_counter() + _SECONDS
    for number in range(_ROUNDS):
        if number >= _FEWEST and time.perf_counter() > until:
            break
        times = {mode: seconds(mode) for mode in OVERLAPS}
        for mode in OVERLAPS:
            rounds[mode].append(times[mode] / times["none"])
    return rounds


def _best(rounds: Mapping[Overlap, Sequence[float]]) -> Overlap:
    """The fastest mode, if by enough, and in each round but one of all five."""
    best = min(OVERLAPS, key=lambda mode: statistics.median(rounds[mode]))
    enough = statistics.median(rounds[best]) <= _WORTH
    slow = sum(ratio >= 1.0 for ratio in rounds[best])
    steady = slow <= len(rounds[best]) // _ROUNDS
    return best if enough and steady else "none"


def _workload(
    loaded: LoadedModel, chunk_tokens: int, cuts: Cuts, count: int
) -> Callable[[Overlap], tuple[float, Prefilled]]:
    """A prefill that loads ``count`` chunks, computes the next and stores it."""
    sources = _Strip(loaded.shapes, chunk_tokens, count, loaded)
    sink = _Strip(loaded.shapes, chunk_tokens, 1, loaded)
    tokens = [index % 97 for index in range((count + 1) * chunk_tokens + 1)]
    io = ChunkIO(
        {index: _Place(sources, index) for index in range(count)},
        {count: _Place(sink, count)},
        filled=lambda index: None,
        between=lambda: None,
    )

    def run(mode: Overlap) -> tuple[float, Prefilled]:
        with streams_opened(loaded.device, mode) as streams:
            runner = Runner(loaded, chunk_tokens, cuts, streams)
            row = runner.open_row(len(tokens))
            row.cache.buffer.clear(len(tokens))  # touched, as a running engine's is
            began = time.perf_counter()
            prefilled = runner.prefill(row, tokens, io)
            int(prefilled.logits.argmax())  # a GPU may still be computing
            seconds = time.perf_counter() - began
            runner.close()
        return seconds, prefilled

    return run


def _name(loaded: LoadedModel, chunk_tokens: int, cuts: Cuts) -> str:
    device = loaded.device
    fields = (
        torch.__version__,
        torch.get_num_threads(),
        os.cpu_count(),
        str(device),
        torch.cuda.get_device_name(device) if device.type == "cuda" else "",
        loaded.name,
        loaded.shapes,
        str(loaded.dtype),
        chunk_tokens,
        cuts,
    )
    return hashlib.blake2b(repr(fields).encode(), digest_size=16).hexdigest()


def _read(path: Path) -> OverlapChoice | None:
    """A choice made before, or ``None``; a damaged file counts as none."""
    try:
        found = json.loads(path.read_text())
        mode = found["mode"]
        ratios = {str(key): float(value) for key, value in found["ratios"].items()}
        copying = float(found["copying"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    if mode not in OVERLAPS:
        return None
    return OverlapChoice(cast(Overlap, mode), ratios, copying)


def _keep(path: Path, choice: OverlapChoice) -> None:
    text = json.dumps(
        {
            "mode": choice.mode,
            "ratios": dict(choice.ratios),
            "copying": choice.copying,
        }
    )
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text)
        temporary.replace(path)
    except OSError as error:
        _log.warning("the overlap mode cannot be remembered in %s: %s", path, error)
