"""Start-up probes: measured once per machine and model, remembered in the cache folder.

Exactness is a claim about kernels we did not write, so it is tested, never assumed:
one prefill in one forward, the same cut at awkward places, compared bit for bit. A
second probe digests the KV of a short sequence into the namespace, so a machine or
library that computes other bits does not read what this one stored.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from pcr_core.model import onednn
from pcr_core.model.attention import AttentionPlan
from pcr_core.model.attention_kernels import KeyPortions
from pcr_core.model.chunk_io import ChunkIO
from pcr_core.model.decode_step import Decoding
from pcr_core.model.fingerprint import kv_bytes, kv_digest
from pcr_core.model.key_blocks import KEY_BLOCK
from pcr_core.model.linear import (
    LayerPlan,
    Shape,
    all_products_tiled,
    output_widths,
)
from pcr_core.model.loading import LoadedModel
from pcr_core.model.prefill_plan import ROW_UNIT, free, shape_independent
from pcr_core.model.rounding import differ_by_rounding
from pcr_core.model.row_tiles import RowTiles
from pcr_core.model.runner import Row, Runner

_log = logging.getLogger("pcr_core.model")
_FORMAT = 5  # of the verdict's file; part of its name
_IDENTITY_TOKENS = 48
_MOST_ROWS = 1 << 15
# One forward across a key block, against cuts at one row tile, at odd multiples of it,
# and past the block.
_EXACT_TOKENS = KEY_BLOCK + 288
_EXACT_CUTS = (16, 272, KEY_BLOCK + 16, KEY_BLOCK + 96)


def _probe_tokens(loaded: LoadedModel, count: int) -> list[int]:
    """The same pseudo-random tokens every time."""
    vocabulary = loaded.model.get_input_embeddings().weight.shape[0]
    noise = torch.Generator().manual_seed(20260323)
    ids: list[int] = torch.randint(0, vocabulary, (count,), generator=noise).tolist()
    return ids


def _silent_io() -> ChunkIO:
    return ChunkIO({}, {}, filled=lambda index: None, between=lambda: None)


def identity_digest(runner: Runner, loaded: LoadedModel) -> bytes:
    """Digest of the KV this process computes for a fixed short sequence."""
    tokens = _probe_tokens(loaded, min(_IDENTITY_TOKENS, loaded.context_window))
    row = runner.open_row(len(tokens))
    runner.prefill(row, tokens, _silent_io())
    digest = kv_digest(row.cache, len(tokens))
    runner.close_row(row)
    return digest


_GRAIN = 32768  # elements per thread from which torch splits elementwise work
_VECTORS = 64  # elements of two AVX-512 vectors in bf16: what one iteration takes


def elementwise_is_aligned(widths: Iterable[int], threads: int, most_rows: int) -> bool:
    """Whether torch's split of elementwise work never cuts a vector in two.

    Where a thread's share is no multiple of the vector loop, its last elements are
    computed by scalar code, and exp, sin and cos round differently there. Which
    elements these are depends on the number of rows.
    """
    for width in widths:
        for rows in range(ROW_UNIT, most_rows + 1, ROW_UNIT):
            elements = rows * width
            used = min(threads, -(-elements // _GRAIN))
            if -(-elements // used) % _VECTORS:
                return False
    return True


def may_be_shape_independent(loaded: LoadedModel) -> bool:
    """Whether what is known to be needed on a CPU is given; call before installing.

    Every product in row tiles, and elementwise work split at whole vectors. A probe of
    a few lengths could pass by luck without.
    """
    if loaded.device.type != "cpu":
        return True
    widths = output_widths(loaded.model) | {shape.k_dim for shape in loaded.shapes}
    most = min(loaded.context_window, _MOST_ROWS)
    aligned = elementwise_is_aligned(widths, torch.get_num_threads(), most)
    return aligned and all_products_tiled(loaded.model)


def is_shape_independent(loaded: LoadedModel, chunk_tokens: int) -> bool:
    """Whether cutting a prefill changes no bit of KV or logits on this machine."""
    runner = Runner(loaded, chunk_tokens, shape_independent())
    count = min(_EXACT_TOKENS, loaded.context_window) // 16 * 16
    tokens = _probe_tokens(loaded, count)
    cuts = [cut for cut in _EXACT_CUTS if cut < count]
    whole = _run_cut(runner, tokens, [count])
    return whole == _run_cut(runner, tokens, [*cuts, count])


def _run_cut(runner: Runner, tokens: list[int], stops: list[int]) -> list[bytes]:
    """KV and last logits of a prefill whose forwards end at ``stops``."""
    row: Row = runner.open_row(len(tokens))
    logits = torch.empty(0)
    start = 0
    for stop in stops:
        row.cache.begin(start)
        logits = runner.forward_range(row, tokens[start:stop], start)
        row.cache.end(stop - start)
        start = stop
    result = [*kv_bytes(row.cache, len(tokens)), logits.float().cpu().numpy().tobytes()]
    runner.close_row(row)
    return result


_DECODED = (5, 40, 23, 61, 18, 33, 9, 50)  # prompt lengths of rows decoded together
_TOGETHER = (2, 3, 8)


def how_rows_decode(loaded: LoadedModel, chunk_tokens: int) -> Decoding:
    """Whether rows decoded together give what each gives alone.

    Returns:
        ``"serial"`` if this model's code cannot take several rows, or mixes them up;
        ``"invariant"`` if every bit is the same, ``"close"`` if it rounds differently.
    """
    runner = Runner(loaded, chunk_tokens, free(), decoding="close")
    tokens = _probe_tokens(loaded, max(_DECODED) + 1)
    rows = [runner.open_row(len(tokens)) for _ in _DECODED]
    try:
        lengths = [min(n, loaded.context_window - 2) for n in _DECODED]
        for row, length in zip(rows, lengths, strict=True):
            runner.prefill(row, tokens[-length:], _silent_io())
        each = zip(rows, tokens, strict=False)
        alone = torch.cat([_decoded(runner, [row], [token]) for row, token in each])
        found: Decoding = "invariant"
        for count in _TOGETHER:
            together, single = _decoded(runner, rows[:count], tokens), alone[:count]
            if together.shape != single.shape:
                return "serial"
            if not differ_by_rounding(single, together, loaded.dtype):
                return "serial"
            if not torch.equal(together, single):
                found = "close"
        return found
    except Exception as error:  # whatever this model's code does with several rows
        _log.info("rows are decoded one after another: %s", error)
        return "serial"
    finally:
        for row in rows:
            runner.close_row(row)


def _decoded(runner: Runner, rows: Sequence[Row], tokens: Sequence[int]) -> Any:
    """Logits of one token more of each row, which are then as they were."""
    logits = runner.decode(rows, tokens[: len(rows)])
    for row in rows:
        row.cache.rewind(1)
    return logits


@dataclass(frozen=True)
class Verdict:
    """What the probes found.

    Attributes:
        layers: How to run linear layers of each shape; empty off CPU.
        attention: How SDPA may be called.
        shape_independent: Whether prefills may be cut anywhere without a trace.
        head: How to run the output head on one token of each row, if it can be tiled.
        decoding: What became of several rows decoded together.
    """

    layers: Mapping[Shape, LayerPlan]
    attention: AttentionPlan
    shape_independent: bool
    head: LayerPlan | None = None
    decoding: Decoding = "serial"


def verdict_path(cache_dir: Path, loaded: LoadedModel, fields: Any) -> Path:
    """Where the verdict for this model on this machine and these versions is kept."""
    import platform

    import transformers

    machine = (
        _FORMAT,
        torch.__version__,
        transformers.__version__,
        platform.machine(),
        torch.backends.cpu.get_cpu_capability(),
        onednn.supports(loaded.dtype),
        torch.get_num_threads(),
        str(loaded.device),
        torch.cuda.get_device_name(loaded.device)
        if loaded.device.type == "cuda"
        else "",
        fields,
    )
    name = hashlib.blake2b(repr(machine).encode(), digest_size=16).hexdigest()
    return cache_dir / "probes" / f"{name}.json"


def read_verdict(path: Path) -> Verdict | None:
    """A verdict reached before, or ``None``; a damaged file counts as none."""
    try:
        found = json.loads(path.read_text())
        layers = {
            (item["in"], item["out"], item["bias"]): _plan_of(item)
            for item in found["layers"]
        }
        attention = _attention_of(found["attention"])
        head = found["head"] and _plan_of(found["head"])
        if found["decoding"] not in get_args(Decoding):
            return None
        return Verdict(
            layers,
            attention,
            bool(found["shape_independent"]),
            head,
            found["decoding"],
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _plan_of(found: Any) -> LayerPlan:
    tiles, few = _tiles_of(found["tiles"]), _tiles_of(found["few"])
    return LayerPlan(found["packed"], tiles, few)


def _tiles_of(found: Any) -> RowTiles:
    return RowTiles({int(size): seconds for size, seconds in found.items()})


def _attention_of(found: Any) -> AttentionPlan:
    """An attention plan as ``dataclasses.asdict`` and JSON give it."""
    unfused = found["unfused"]
    return AttentionPlan(
        tuple(int(tail) for tail in found["causal_tails"]),
        int(found["key_grain"]),
        unfused and KeyPortions(int(unfused["grain"]), int(unfused["least"])),
        str(found["decode"]),
    )


def _as_json(plan: LayerPlan) -> dict[str, Any]:
    tiles, few = dict(plan.tiles.costs), dict(plan.few.costs)
    return {"packed": plan.packed, "tiles": tiles, "few": few}


def keep_verdict(path: Path, verdict: Verdict) -> Verdict:
    """Write a verdict unless another process did first; return the one that counts.

    Tiles are chosen by timing, so two processes may choose differently; the first
    file wins, or restarts would compute other bits than those stored.
    """
    layers = [
        {
            "in": shape[0],
            "out": shape[1],
            "bias": shape[2],
            **_as_json(plan),
        }
        for shape, plan in verdict.layers.items()
    ]
    text = json.dumps(
        {
            "layers": layers,
            "attention": asdict(verdict.attention),
            "shape_independent": verdict.shape_independent,
            "head": verdict.head and _as_json(verdict.head),
            "decoding": verdict.decoding,
        }
    )
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text)
        try:
            os.link(temporary, path)
        except FileExistsError:
            first = read_verdict(path)
            if first is not None:
                return first
            os.replace(temporary, path)  # what is there is damaged
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        _log.warning("the start-up probe cannot be remembered in %s: %s", path, error)
    return verdict
