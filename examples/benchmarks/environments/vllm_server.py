"""vLLM behind JSON lines, run by the interpreter of its own environment.

Imports vLLM and the standard library only: nothing of this project is installed there.
Knows nothing of what is measured beside it. Started as

    python vllm_server.py '{"model": ..., ...}'

with the arguments of ``vllm.LLM``, it writes one line about itself when it is ready and
then answers each line of its standard input with one line; the format is described in
``examples/benchmarks/children.py``. What vLLM prints goes to standard error. Times are
taken around the engine's own step loop, in this process: no HTTP and no pipe is in
them.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from typing import Any, TextIO


def private_stdout() -> TextIO:
    """The real standard output, for answers; prints of any library go to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return answers


class Server:
    """One engine, one request at a time."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import torch
        import vllm

        self._vllm = vllm
        self._engine = vllm.LLM(**settings).llm_engine
        self._count = 0
        self.about = {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }

    def generate(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        """Greedy answer, with the seconds until its first and its last token."""
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
            "cached": {"own memory": cached} if cached else {},
        }


def main() -> None:
    answers = private_stdout()
    server = Server(json.loads(sys.argv[1]))
    print(json.dumps(server.about), file=answers)
    for line in sys.stdin:
        asked = json.loads(line)
        found = server.generate(asked["prompt"], asked["max_tokens"])
        print(json.dumps(found), file=answers)


if __name__ == "__main__":
    main()
