"""Our engine and stock transformers as children (``children.py``).

    python -m examples.benchmarks.served engine '{"cache_dir": ..., ...}'
    python -m examples.benchmarks.served stock '{"model": ..., "dtype": ...}'

Stock is what a careful application does by hand: sdpa attention and a ``DynamicCache``
per prefix that stays in memory. A prompt with a kept prefix costs one forward over the
rest of it, with no copy of the cache made before; any other prompt costs one forward
over all of it, after which the cache is cut back to the prefix and kept. With
``kept_tokens`` those used last are kept, within so many tokens; with 0 none.
"""

from __future__ import annotations

import json
import math
import sys
import time
from typing import Any

import torch
import transformers
from transformers import DynamicCache

from examples.benchmarks.environments.answering import private_stdout, serve
from examples.benchmarks.kept import Kept
from examples.benchmarks.plain import Plain
from pcr_core import Engine, EngineConfig, SamplingParams

VERSIONS = {"torch": torch.__version__, "transformers": transformers.__version__}


class EngineServer:
    """Our engine, one request at a time."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._engine = Engine(EngineConfig(**settings))
        self.about = {"prefill": self._engine.stats().prefill_cuts, **VERSIONS}

    def generate(self, prompt: list[int], max_tokens: int, prefix: int) -> Any:
        del prefix  # it finds prefixes by itself
        params = SamplingParams(max_tokens=max_tokens, min_tokens=max_tokens)
        result = self._engine.generate(prompt, params)
        return {
            "first": result.timing.ttft,
            "last": result.timing.ttft + result.timing.decode,
            "tokens": result.token_ids,
            "cached": result.usage.cached_by_tier,
        }

    def close(self) -> None:
        self._engine.close()


class StockServer:
    """Stock transformers with resident caches, one request at a time."""

    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(settings["threads"])
        self._plain = Plain(settings["model"], settings["dtype"])
        self._kept: Kept[DynamicCache] = Kept(settings.get("kept_tokens", math.inf))
        self.about: dict[str, Any] = {"attention": "sdpa", **VERSIONS}

    def generate(self, prompt: list[int], max_tokens: int, prefix: int) -> Any:
        start = time.perf_counter()
        known = tuple(prompt[:prefix])
        cache = self._kept.take(known)
        found = prefix if cache is not None else 0
        if cache is None:
            cache = DynamicCache(config=self._plain.model.config)
        tokens = [self._plain.forward(prompt[found:], cache)]
        first = time.perf_counter() - start
        while len(tokens) < max_tokens:
            tokens.append(self._plain.forward(tokens[-1:], cache))
        last = time.perf_counter() - start
        if prefix:
            cache.crop(prefix - cache.get_seq_length())
            self._kept.put(known, cache)
        return {
            "first": first,
            "last": last,
            "tokens": tokens,
            "cached": {"kept by hand": found} if found else {},
        }

    def close(self) -> None:
        """Its caches end with the process."""


SERVERS: dict[str, Any] = {"engine": EngineServer, "stock": StockServer}


def main() -> None:
    answers = private_stdout()
    transformers.utils.logging.disable_progress_bar()
    server = SERVERS[sys.argv[1]](json.loads(sys.argv[2]))
    serve(server, answers)


if __name__ == "__main__":
    main()
