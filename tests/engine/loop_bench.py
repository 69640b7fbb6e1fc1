"""An engine loop with its model and tiers, driven by hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pcr_core import EngineConfig, SamplingParams
from pcr_core.index.chunk import ChunkLayout, chunk_keys
from pcr_core.loop import Batching, EngineLoop
from pcr_core.model.loading import load
from pcr_core.model.setup import model_prepared
from pcr_core.request import Request
from pcr_core.tiers import open_tiers

CHUNK = 16
PROMPT = [number % 250 for number in range(CHUNK * 6 + 5)]


class Bench:
    """A loop with its model and tiers, and requests made by hand.

    Attributes:
        now: What its clock shows, in seconds.
    """

    def __init__(
        self,
        runner: Any,
        namespace: Any,
        loaded: Any,
        tiers: Any,
        batching: Batching | None = None,
    ) -> None:
        self.namespace = namespace
        self.model = loaded.model
        self.runner = runner
        self.tiers = tiers
        self.now = 0.0
        self.loop = EngineLoop(
            runner,
            loaded.tokenizer,
            (),
            tiers,
            batching=batching,
            clock=lambda: self.now,
        )

    def request(
        self,
        tokens: list[int] = PROMPT,
        *,
        priority: int = 0,
        deadline: float | None = None,
        **params: Any,
    ) -> Request:
        request = self.made(tokens, **params)
        request.priority, request.deadline = priority, deadline
        self.loop.add(request)
        return request

    def made(self, tokens: list[int] = PROMPT, **params: Any) -> Request:
        keys = chunk_keys(self.namespace, tokens, CHUNK)
        return Request(tokens, keys, SamplingParams(**{"max_tokens": 4, **params}))

    def finish(self, request: Request) -> Any:
        while self.loop.busy:
            self.loop.step()
        return request.completion.result(timeout=0)

    def states(self, tokens: list[int] = PROMPT) -> list[str]:
        return self.tiers.match(chunk_keys(self.namespace, tokens, CHUNK))

    def nothing_held(self) -> bool:
        nodes = list(self.tiers._tree.nodes())
        rows = self.runner._rows._taken
        return not self.tiers._leases and not any(n.pins for n in nodes) and not rows


@contextmanager
def opened_bench(
    folder: Path,
    model: Any,
    tokenizer: Any,
    batching: Batching | None = None,
    slots: int = 16,
    **settings: Any,
) -> Iterator[Bench]:
    options = {"chunk_tokens": CHUNK, "exact": True, **settings}
    config = EngineConfig(cache_dir=folder, **options)
    loaded = load(config, model, tokenizer)
    with model_prepared(loaded, config) as prepared:
        layout = ChunkLayout(loaded.shapes, CHUNK, "F32", 4)
        tiers = open_tiers(
            layout,
            prepared.namespace,
            dram_bytes=slots * layout.nbytes,
            cache_dir=folder / "kv",
            ssd_bytes=0,
        )
        try:
            yield Bench(prepared.runner, prepared.namespace, loaded, tiers, batching)
        finally:
            tiers.close()
