"""kvboost behind JSON lines (``answering.py``).

Runs in the environment of ``make .bench/kvboost``. Started as

    python -m examples.benchmarks.environments.kvboost_server '{"model": ...}'

with the model's folder, ``dtype``, ``threads``, and under ``engine`` the arguments of
``kvboost.KVBoost``. ``KVBoost.from_pretrained`` always loads in float16, which
a CPU emulates, so the model is loaded here in the dtype of the other systems. Prompts
are token ids, so its tokenizer is passed by; what an application can say in advance,
where the part worth keeping ends, is said with ``cacheable_prefix_len``.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time
from typing import Any

from examples.benchmarks.environments.answering import private_stdout, serve


class KVBoostServer:
    """One engine, one request at a time."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import kvboost
        import torch
        import transformers

        torch.set_num_threads(settings["threads"])
        model = transformers.AutoModelForCausalLM.from_pretrained(
            settings["model"], dtype=getattr(torch, settings["dtype"])
        )
        self._tokenizer = Given(
            transformers.AutoTokenizer.from_pretrained(settings["model"])
        )
        self._engine = kvboost.KVBoost(
            model.eval(), self._tokenizer, device="cpu", **settings["engine"]
        )
        self.about = {
            "kvboost": importlib.metadata.version("kvboost"),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "strategy": self._engine.recompute_strategy.value,
        }

    def generate(
        self, prompt: list[int], max_tokens: int, prefix: int
    ) -> dict[str, Any]:
        """Greedy answer, with the seconds until its first and its last token."""
        self._tokenizer.ids = prompt
        tokens: list[int] = []
        times: list[float] = []
        start = time.perf_counter()

        def note(token: int) -> None:
            times.append(time.perf_counter() - start)
            tokens.append(token)

        result = self._engine.generate(
            "",
            max_new_tokens=max_tokens,
            cacheable_prefix_len=prefix,
            on_token=note,
        )
        found = result.cached_tokens
        return {
            "first": times[0],
            "last": times[-1],
            "tokens": tokens,
            "cached": {"own store": found} if found else {},
        }

    def close(self) -> None:
        """It has nothing to close: what its memory evicted is on disk already."""


class Given:
    """A tokenizer for which every text is the same ``ids``."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.ids: list[int] = []

    def encode(self, text: str, **options: Any) -> list[int]:
        return self.ids

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


if __name__ == "__main__":
    answers = private_stdout()
    serve(KVBoostServer(json.loads(sys.argv[1])), answers)
