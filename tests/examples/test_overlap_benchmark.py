"""The overlap benchmark serves as an engine does, and sees the forwards it ran."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from examples.benchmarks.overlap import Server, layer_times
from pcr_core import EngineConfig
from pcr_core.index.chunk import Namespace
from pcr_core.model.attention import (
    AttentionPlan,
    KvAttention,
    attention_installed,
)
from pcr_core.model.compiled_glue import GlueChoice
from pcr_core.model.glue import TorchGlue
from pcr_core.model.graphs_probe import GraphsChoice
from pcr_core.model.loading import load
from pcr_core.model.overlap import OverlapChoice
from pcr_core.model.prefill_plan import free
from pcr_core.model.runner import Runner
from pcr_core.model.setup import Prepared

CHUNK = 16
PROMPT = [7 + index * 5 % 89 for index in range(4 * CHUNK + 3)]


def test_a_prompt_that_is_partly_stored(
    make_tiny_model: Any, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    config = EngineConfig(cache_dir=tmp_path, chunk_tokens=CHUNK, dram_bytes="16MiB")
    loaded = load(config, make_tiny_model("llama"), tiny_tokenizer)
    runner = Runner(loaded, CHUNK, free())
    namespace = Namespace.of([("test", b"")])
    prepared = Prepared(
        runner,
        namespace,
        OverlapChoice("none"),
        CHUNK,
        GraphsChoice(),
        0,
        GlueChoice(TorchGlue()),
    )
    attention = KvAttention(AttentionPlan())
    with attention_installed(loaded.model, attention), ExitStack() as lifetimes:
        server = Server(loaded, prepared, "none", config, lifetimes)
        server.ttft(PROMPT, 0)
        other = [*PROMPT[: 2 * CHUNK], 3, *PROMPT[2 * CHUNK + 1 :]]
        assert server.ttft(other, 2 * CHUNK) > 0
        times = layer_times(server.runner.last.result())
    assert min(times[lane] for lane in ("load", "compute", "offload")) > 0
