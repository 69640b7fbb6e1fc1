"""The engine thread: builds everything, serves requests, takes everything down again.

All of torch's work happens on this one thread, loading and probing included. libgomp
keeps a team of threads for every thread that ever ran a parallel region, and once there
are more of them than cores all barriers sleep instead of spinning: a small model's
forward gets up to twice as slow. (Callers give up theirs as they ask; see ``openmp``.)
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from pcr_core.config import EngineConfig
from pcr_core.door import Door
from pcr_core.errors import EngineClosedError
from pcr_core.index.chunk import ChunkLayout, tenant_digest
from pcr_core.loop import Batching, EngineLoop
from pcr_core.memory import available_bytes
from pcr_core.model.loading import LoadedModel, load
from pcr_core.model.prefill_plan import ROW_UNIT, Cuts
from pcr_core.model.sampling import end_token_ids
from pcr_core.model.setup import Prepared, model_prepared
from pcr_core.request import Request
from pcr_core.stats import EngineStats
from pcr_core.tiers import (
    WRITE_POLICIES,
    CudaRegistrar,
    TierSettings,
    open_tiers,
    prepare_folder,
    stop_policy,
)
from pcr_core.trace import TraceWriter

_log = logging.getLogger("pcr_core.engine")

T = TypeVar("T")
_LOOK_AROUND = 2.0
"""Seconds after which an idle engine looks at what other processes have forgotten."""
_STEP_FAILED = "a step failed, see the log"


@dataclass(frozen=True)
class Parts:
    """What an engine consists of. Everything but the frozen values is the thread's."""

    loaded: LoadedModel
    prepared: Prepared
    loop: EngineLoop

    def stats(self) -> EngineStats:
        """Counters and how the engine runs. Engine thread only."""
        loop, loaded, prepared = self.loop, self.loaded, self.prepared
        runner, overlap, graphs = prepared.runner, prepared.overlap, prepared.graphs
        failed = graphs.on and not runner.step.replays
        return EngineStats(
            model=loaded.name,
            device=str(loaded.device),
            dtype=str(loaded.dtype).removeprefix("torch."),
            threads=torch.get_num_threads(),
            chunk_tokens=prepared.chunk_tokens,
            prefill_cuts=runner.cuts.name,
            exact=runner.cuts.exact,
            namespace=prepared.namespace.name,
            overlap=overlap.mode,
            overlap_ratios=dict(overlap.ratios),
            copying=overlap.copying,
            decoding=runner.decoding,
            cuda_graphs=runner.step.replays,
            cuda_graph_ratios=dict(graphs.ratios),
            cuda_graphs_reason=_STEP_FAILED if failed else graphs.reason,
            cpu_kernels=prepared.glue.kind,
            cpu_kernels_reason=prepared.glue.reason,
            running=loop.running,
            waiting=loop.waiting,
            preempted=loop.preempted,
            finished=loop.finished,
            cancelled=loop.cancelled,
            failed=loop.failed,
            working_bytes=runner.buffer_bytes,
            weight_bytes=prepared.weight_bytes,
            decisions=loop.tiers.decisions(loaded.context_window),
            cache=loop.tiers.snapshot(),
            documents=loop.documents,
        )


def build(
    config: EngineConfig,
    model: Any,
    tokenizer: Any,
    lifetimes: ExitStack,
    on_progress: Callable[[], None],
) -> Parts:
    """Load the model, open the tiers; ``lifetimes`` undoes all of it.

    Args:
        config: See ``Engine``.
        model: See ``Engine``.
        tokenizer: See ``Engine``.
        lifetimes: Undoes everything.
        on_progress: Called on other threads when there is I/O to take in.

    Raises:
        ConfigError, ModelError, StoreError: See ``Engine``.
    """
    if config.threads is not None:
        # Also the default of threads that torch has not met yet, so it is put back.
        lifetimes.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(config.threads)
    store = config.cache_path / "kv"
    if config.ssd_bytes:
        prepare_folder(store)  # a folder that will not do is known before the wait
    loaded = load(config, model, tokenizer)
    prepared = lifetimes.enter_context(model_prepared(loaded, config))
    runner = prepared.runner
    layout = chunk_layout(loaded, prepared.chunk_tokens)
    record = recorder(config, layout, lifetimes)
    on_cuda = loaded.device.type == "cuda"
    tiers = open_tiers(
        layout,
        prepared.namespace,
        tier_settings(config, runner.cuts),
        dram_bytes=dram_budget(config),
        cache_dir=store,
        ssd_bytes=config.ssd_bytes,
        registrar=CudaRegistrar(loaded.device) if on_cuda else None,
        on_progress=on_progress,
    )
    lifetimes.callback(tiers.close)
    lifetimes.callback(runner.close)
    ends = end_token_ids(loaded.model, loaded.tokenizer)
    loop = EngineLoop(runner, loaded.tokenizer, ends, tiers, record, batching(config))
    return Parts(loaded, prepared, loop)


def chunk_layout(loaded: LoadedModel, chunk_tokens: int) -> ChunkLayout:
    """What a chunk of the model's KV looks like."""
    dtype = loaded.safetensors_dtype
    return ChunkLayout(loaded.shapes, chunk_tokens, dtype, loaded.dtype.itemsize)


def batching(config: EngineConfig) -> Batching:
    """What the loop needs to know of the configuration."""
    return Batching(
        rows=config.max_batch_size,
        prefill_tokens=config.max_prefill_tokens,
        order=config.order,
        max_overtakes=config.max_overtakes,
        store_answers=config.store_answers,
    )


def tier_settings(config: EngineConfig, cuts: Cuts) -> TierSettings:
    """What the tiers need to know of the configuration and of the model."""
    window = config.lookahead_window
    return TierSettings(
        eviction=config.eviction,
        window=None if window == "auto" else window,
        stop=stop_policy(config.prefetch, config.prefetch_timeout),
        write_policy=WRITE_POLICIES[config.write_policy](),
        tenant=tenant_digest(config.namespace),
        quota_bytes=config.namespace_bytes,
        longest_forward=cuts.step,
        shortest_head=ROW_UNIT if cuts.align == 1 else None,
    )


def recorder(
    config: EngineConfig, layout: ChunkLayout, lifetimes: ExitStack
) -> Callable[[Request, int], None]:
    """What is to be done with each finished request: nothing, or a line in a trace.

    Raises:
        ConfigError: If the trace cannot be written.
    """
    if config.trace is None:
        return lambda request, generated: None
    writer = TraceWriter(
        config.trace.expanduser(),
        chunk_tokens=layout.chunk_tokens,
        chunk_bytes=layout.nbytes,
        clock=time.perf_counter,
    )
    lifetimes.callback(writer.close)
    return lambda request, generated: writer.record(
        request.submitted, len(request.tokens), generated, request.keys
    )


def dram_budget(config: EngineConfig) -> int:
    """The DRAM budget in bytes: as set, or a quarter of the memory that is left.

    What is left respects the limit of the control group, so that a container's limit
    and not its host's memory decides. Between 64 MiB and 4 GiB.
    """
    left = available_bytes()
    if config.dram_bytes == "auto":
        return max(64 * 2**20, min(4 * 2**30, left // 4))
    if config.dram_bytes > left:
        _log.warning(
            "dram_bytes is %d, but this process can take only %d bytes more (limits of "
            "its container included): it may be killed when the DRAM tier fills up",
            config.dram_bytes,
            left,
        )
    return config.dram_bytes


def start(config: EngineConfig, model: Any, tokenizer: Any, door: Door) -> Service:
    """Start the engine thread and wait until it is ready.

    Raises:
        Whatever ``build`` raised over there.
    """
    ready: Future[Parts] = Future()
    thread = threading.Thread(
        target=_serve,
        args=(config, model, tokenizer, door, ready),
        name="pcr-engine",
        daemon=True,
    )
    thread.start()
    try:
        return Service(thread, ready.result())
    except BaseException:
        door.close(EngineClosedError("the engine was interrupted while starting"))
        raise


@dataclass(frozen=True)
class Service:
    """A running engine thread and what it built."""

    thread: threading.Thread
    parts: Parts


def _serve(
    config: EngineConfig, model: Any, tokenizer: Any, door: Door, ready: Future[Parts]
) -> None:
    """Body of the engine thread."""
    with ExitStack() as lifetimes:
        try:
            parts = build(config, model, tokenizer, lifetimes, door.wake)
        except BaseException as error:
            lifetimes.close()
            ready.set_exception(error)
            return
        ready.set_result(parts)
        _run(door, parts.loop)


def _run(door: Door, loop: EngineLoop) -> None:
    """Body of the engine thread. However it ends, nobody is left waiting."""
    reason: BaseException = EngineClosedError("the engine was closed")
    loop.closing = lambda: door.closed
    try:
        while _take_in(door, loop):
            door.left(loop.step())
    except BaseException as error:
        reason = EngineClosedError(
            f"the engine thread died: {error!r}; build a new engine"
        )
        reason.__cause__ = error
    finally:
        door.close(reason)
        requests, calls, _ = door.take(block=False)
        for request in requests:
            request.completion.fail(reason)
        for _, future in calls:
            future.set_exception(reason)
        loop.abandon(reason)


def _take_in(door: Door, loop: EngineLoop) -> bool:
    """Do what is asked from outside; False once the door is closed.

    A function of its own, so that no local variable of the waiting thread keeps an old
    request, and with it an engine that everybody else has forgotten.
    """
    block = not loop.busy and not loop.idle()
    requests, calls, closed = door.take(block=block, timeout=_LOOK_AROUND)
    try:
        while requests:
            loop.add(requests[0])
            del requests[0]
        while calls:
            _answer(*calls.pop(0))
    except BaseException:
        door.put_back(requests, calls)  # else nobody would know of them any more
        raise
    return not closed


def _answer(function: Callable[[], Any], future: Future[Any]) -> None:
    try:
        result = function()
    except BaseException as error:
        future.set_exception(error)
        if not isinstance(error, Exception):
            raise
    else:
        future.set_result(result)
