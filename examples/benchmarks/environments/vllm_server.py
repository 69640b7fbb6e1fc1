"""vLLM behind JSON lines (``answering.py``), run in the environment of its own.

Imports vLLM and the standard library only: nothing of this project is installed there.
Knows nothing of what is measured beside it. Started as

    python -m examples.benchmarks.environments.vllm_server '{"model": ..., ...}'

with the arguments of ``vllm.LLM``. Times are taken around the engine's own step loop,
in this process: no HTTP and no pipe is in them.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from examples.benchmarks.environments.answering import private_stdout, serve


class VllmServer:
    """One engine, one request at a time."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import torch
        import vllm

        self._vllm = vllm
        self._engine = vllm.LLM(**settings).llm_engine
        self._count = 0
        self.about = {"vllm": vllm.__version__, "torch": torch.__version__}

    def generate(
        self, prompt: list[int], max_tokens: int, prefix: int
    ) -> dict[str, Any]:
        """Greedy answer, with the seconds until its first and its last token."""
        del prefix  # it finds prefixes by itself
        params = self._vllm.SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True
        )
        self._count += 1
        times: list[float] = []
        tokens: list[int] = []
        cached = 0
        start = time.perf_counter()
        self._engine.add_request(str(self._count), {"prompt_token_ids": prompt}, params)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                times.append(time.perf_counter() - start)
                tokens = list(output.outputs[0].token_ids)
                cached = output.num_cached_tokens or 0
        return {
            "first": times[0],
            "last": times[-1],
            "tokens": tokens,
            "cached": self.tiers(cached),
        }

    def tiers(self, cached: int) -> dict[str, int]:
        """Where ``cached`` tokens were found."""
        return {"own memory": cached} if cached else {}

    def close(self) -> None:
        """Its memory ends with the process."""


if __name__ == "__main__":
    answers = private_stdout()
    serve(VllmServer(json.loads(sys.argv[1])), answers)
