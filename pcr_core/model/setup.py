"""From a loaded model to one that runs exactly: kernels, cuts, namespace fields."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pcr_core.config import EngineConfig
from pcr_core.errors import ConfigError, ModelError, UnsupportedModelError
from pcr_core.index.chunk import Namespace
from pcr_core.memory import available_bytes, join_pages, trim
from pcr_core.model import probe
from pcr_core.model.attention import (
    AttentionPlan,
    KvAttention,
    attention_installed,
)
from pcr_core.model.attention_probe import plan_attention
from pcr_core.model.compiled_glue import GlueChoice, choose_glue
from pcr_core.model.fingerprint import model_fields
from pcr_core.model.glue import Glue, TorchGlue
from pcr_core.model.graphs import graphs_for
from pcr_core.model.graphs_probe import GraphsChoice, choose_graphs
from pcr_core.model.lean import lean_candidates, lean_layers_installed
from pcr_core.model.linear import (
    packed_memory,
    plan_layers,
    row_tiles_installed,
)
from pcr_core.model.loading import LoadedModel
from pcr_core.model.output_head import head_installed, plan_head
from pcr_core.model.overlap import OverlapChoice, choose_overlap
from pcr_core.model.prefill_plan import Cuts, free, grid, shape_independent
from pcr_core.model.runner import READY_BYTES, Runner
from pcr_core.model.streams import streams_opened

_IN_USE = "_pcr_engine_in_use"
_PART = 8
SMALL_CHUNK = 32
LARGE_CHUNK = 256
_MOST_HOST_BYTES = 2**30
"""On a CPU, where the DRAM tier holds the same KV once more."""


@dataclass(frozen=True)
class Prepared:
    """A model ready to serve.

    Attributes:
        runner: Runs it.
        namespace: Of the KV it computes.
        overlap: Which copies run beside it.
        chunk_tokens: Tokens per chunk.
        graphs: Whether decode steps are recorded.
        weight_bytes: Bytes of weights that are kept twice.
        glue: What computes between the matrix products of lean layers.
    """

    runner: Runner
    namespace: Namespace
    overlap: OverlapChoice
    chunk_tokens: int
    graphs: GraphsChoice
    weight_bytes: int
    glue: GlueChoice


@contextmanager
def model_prepared(loaded: LoadedModel, config: EngineConfig) -> Iterator[Prepared]:
    """Install attention and row tiles; restore the model when the block ends.

    Raises:
        ConfigError: If another engine has this model object.
    """
    with _taken(loaded.model), _prepared(loaded, config) as prepared:
        yield prepared


@contextmanager
def _taken(model: Any) -> Iterator[None]:
    """A model that serves one engine, and does not train meanwhile."""
    if getattr(model, _IN_USE, False):
        raise ConfigError(
            "another engine uses this model object; share that engine or close it"
        )
    setattr(model, _IN_USE, True)
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
        delattr(model, _IN_USE)


@contextmanager
def _prepared(loaded: LoadedModel, config: EngineConfig) -> Iterator[Prepared]:
    glue = _glue(loaded, config)
    fields = identity(loaded, glue.glue)
    verdict = _verdict(loaded, config, fields, glue.glue)
    attention = KvAttention(verdict.attention)
    with (
        attention_installed(loaded.model, attention),
        lean_layers_installed(loaded.model, attention, glue.glue) as lean,
        row_tiles_installed(loaded.model, verdict.layers),
        head_installed(loaded.model, verdict.head) as head,
        ExitStack() as lifetimes,
    ):
        cuts = choose_cuts(config, exact_is_free=verdict.shape_independent)
        chunk_tokens = chunk_tokens_for(config, loaded.device, cuts)
        overlap = _overlap(loaded, config, cuts, chunk_tokens)
        streams = lifetimes.enter_context(streams_opened(loaded.device, overlap.mode))
        runner = Runner(
            loaded,
            chunk_tokens,
            cuts,
            streams,
            resident_rows=config.resident_rows,
            resting_bytes=resting_bytes(loaded.device),
            decoding=verdict.decoding,
            row_bytes=row_budget(config, loaded.device),
        )
        namespace = _namespace(fields, config, runner, loaded)
        graphs = _graphs(loaded, config, runner)
        runner.make_ready()
        trim()
        join_pages([*packed_memory(loaded.model), *head.memory])
        yield Prepared(
            runner,
            namespace,
            overlap,
            chunk_tokens,
            graphs,
            head.nbytes,
            _in_use(glue, lean),
        )


def identity(loaded: LoadedModel, glue: Glue) -> list[tuple[str, bytes]]:
    """What model and kernels have of a namespace. Before weights are packed."""
    return [*model_fields(loaded), ("glue", glue.name.encode())]


def known_verdict(
    loaded: LoadedModel, config: EngineConfig, fields: Sequence[tuple[str, bytes]]
) -> tuple[Path, probe.Verdict | None]:
    """Where the verdict about a model is kept, and the verdict, if there is one."""
    about = (fields, lean_candidates(loaded.model))
    path = probe.verdict_path(config.cache_path, loaded, about)
    return path, probe.read_verdict(path)


def _namespace(
    model: Sequence[tuple[str, bytes]],
    config: EngineConfig,
    runner: Runner,
    loaded: LoadedModel,
) -> Namespace:
    """Everything that changes KV bytes; ``model`` is what the model has of it."""
    own = [
        ("chunk", str(runner.chunk_tokens).encode()),
        ("cuts", runner.cuts.name.encode()),
        ("tenant", config.namespace.encode()),
        ("kv", probe.identity_digest(runner, loaded)),
    ]
    return Namespace.of([*model, *own])


def resting_bytes(device: torch.device) -> int:
    """What finished rows may hold together: a part of the memory that is left."""
    if device.type == "cuda":
        left, _ = torch.cuda.mem_get_info(device)
        return max(READY_BYTES, left // _PART)
    return max(READY_BYTES, min(_MOST_HOST_BYTES, available_bytes() // _PART))


def row_budget(config: EngineConfig, device: torch.device) -> float:
    """What all running rows may hold together, in bytes: as set, or by what is left."""
    if config.row_bytes != "auto":
        return config.row_bytes
    if device.type == "cuda":
        left, _ = torch.cuda.mem_get_info(device)
        return left // 2
    return max(READY_BYTES, available_bytes() // 4)


def _glue(loaded: LoadedModel, config: EngineConfig) -> GlueChoice:
    """Compiled where there are lean layers for it, and it was not forbidden."""
    if loaded.device.type != "cpu" or not any(lean_candidates(loaded.model)):
        return GlueChoice(TorchGlue())
    if config.cpu_kernels == "torch":
        return GlueChoice(TorchGlue(), "cpu_kernels='torch'")
    return choose_glue(loaded.dtype)


def _in_use(glue: GlueChoice, lean: int) -> GlueChoice:
    """What is said of it, when so many layers run lean."""
    if lean or glue.kind == "torch":
        return glue
    return GlueChoice(TorchGlue(), "no layer of this model takes them")


def _overlap(
    loaded: LoadedModel, config: EngineConfig, cuts: Cuts, chunk_tokens: int
) -> OverlapChoice:
    if loaded.device.type not in ("cpu", "cuda"):
        return OverlapChoice("none")  # no copy streams of its own
    if config.overlap != "auto":
        return OverlapChoice(config.overlap)
    folder = config.cache_path / "probes"
    return choose_overlap(loaded, chunk_tokens, cuts, folder)


def _graphs(loaded: LoadedModel, config: EngineConfig, runner: Runner) -> GraphsChoice:
    graphs = graphs_for(loaded.device)
    if graphs is None:
        return GraphsChoice()
    if config.cuda_graphs == "off":
        return GraphsChoice(reason="cuda_graphs='off'")
    room = resting_bytes(loaded.device)
    return choose_graphs(loaded, runner, graphs, config.max_batch_size, room)


def choose_cuts(config: EngineConfig, *, exact_is_free: bool) -> Cuts:
    """Where prefills are cut: exactly and freely if the machine can, else as asked."""
    if config.exact is False:
        return free()
    if exact_is_free:
        return shape_independent()
    if not config.exact:
        return free()
    return grid(LARGE_CHUNK if config.chunk_tokens == "auto" else config.chunk_tokens)


def chunk_tokens_for(
    config: EngineConfig, device: torch.device, cuts: Cuts | None = None
) -> int:
    """Tokens per chunk: what was asked for, or what suits device and cuts.

    On a CPU a hit costs what it computes again. On a GPU a chunk is a copy per layer,
    and small copies leave the bus idle; on the grid it is a forward.
    """
    if config.chunk_tokens != "auto":
        return config.chunk_tokens
    if cuts is not None and cuts.step is not None:
        return cuts.step
    return SMALL_CHUNK if device.type == "cpu" else LARGE_CHUNK


def _verdict(
    loaded: LoadedModel,
    config: EngineConfig,
    fields: Sequence[tuple[str, bytes]],
    glue: Glue,
) -> probe.Verdict:
    """What an earlier start has measured of this model here, or measure it."""
    path, known = known_verdict(loaded, config, fields)
    if known is not None:
        return known
    return _probe(loaded, chunk_tokens_for(config, loaded.device), path, glue)


def _probe(
    loaded: LoadedModel, chunk_tokens: int, path: Path, glue: Glue
) -> probe.Verdict:
    """Measure this machine, test exactness end to end, and remember both."""
    plan = AttentionPlan()
    if loaded.device.type == "cpu":
        heads = loaded.model.config.get_text_config().num_attention_heads
        window = loaded.context_window
        plan = plan_attention(heads, loaded.shapes, loaded.dtype, window)
    attention = KvAttention(plan)
    with (
        attention_installed(loaded.model, attention),
        lean_layers_installed(loaded.model, attention, glue),
        ExitStack() as tiles,
    ):
        eligible = probe.may_be_shape_independent(loaded)
        layers = plan_layers(loaded.model)
        head = plan_head(loaded.model)
        tiles.enter_context(row_tiles_installed(loaded.model, layers))
        tiles.enter_context(head_installed(loaded.model, head))
        try:
            exact = eligible and probe.is_shape_independent(loaded, chunk_tokens)
            decoding = probe.how_rows_decode(loaded, chunk_tokens)
            probe.identity_digest(Runner(loaded, chunk_tokens, free()), loaded)
        except ModelError as error:
            raise UnsupportedModelError(
                f"{type(loaded.model).__name__} does not run with the engine's "
                f"attention function ({error}); its code handles masks its own way"
            ) from error
    return probe.keep_verdict(path, probe.Verdict(layers, plan, exact, head, decoding))
