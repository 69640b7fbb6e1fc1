"""llama.cpp through its Python binding, behind JSON lines (``answering.py``).

Runs in the environment of ``make .bench/llama``. Started as

    python -m examples.benchmarks.environments.llama_server '{"model_path": ...}'

with the arguments of ``llama_cpp.Llama``, and ``cache``: the arguments of the binding's
``LlamaRAMCache``, or with a ``cache_dir`` those of its ``LlamaDiskCache``. Prompts take
the way of ``create_completion``, which looks into that cache, keeps what its context
still holds, and stores the whole state after each answer. Times are taken around the
tokens that its own loop yields, so the time of storing is not in them.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from examples.benchmarks.environments.answering import private_stdout, serve


class LlamaServer:
    """One context, one request at a time."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import llama_cpp

        cache = settings.pop("cache")
        on_disk = "cache_dir" in cache
        kind = llama_cpp.LlamaDiskCache if on_disk else llama_cpp.LlamaRAMCache
        self._llama = llama_cpp.Llama(**settings, verbose=False)
        self._llama.set_cache(kind(**cache))
        self._store = "own disk" if on_disk else "own memory"
        self._watch = Watch(self._llama)
        self.about = {
            "llama-cpp-python": llama_cpp.__version__,
            "built for": llama_cpp.llama_print_system_info().decode(),
        }

    def generate(
        self, prompt: list[int], max_tokens: int, prefix: int
    ) -> dict[str, Any]:
        """Greedy answer, with the seconds until its first and its last token."""
        del prefix  # it finds prefixes by itself
        self._watch.start()
        self._llama.create_completion(prompt, max_tokens=max_tokens, temperature=0.0)
        seen = self._watch
        found = len(prompt) - seen.prompt_evaluated
        tier = self._store if seen.restored else "own context"
        return {
            "first": seen.times[0],
            "last": seen.times[-1],
            "tokens": seen.tokens,
            "cached": {tier: found} if found else {},
        }

    def close(self) -> None:
        self._llama.close()


class Watch:
    """Notes what a ``Llama`` evaluates, restores and generates.

    Attributes:
        tokens: Generated since ``start``.
        times: When, in seconds from ``start``.
        prompt_evaluated: Tokens that went through the model before the first of them.
        restored: Whether a state was loaded from its cache.
    """

    def __init__(self, llama: Any) -> None:
        self._eval, self._generate = llama.eval, llama.generate
        self._load_state = llama.load_state
        llama.eval, llama.generate = self._evaluating, self._generating
        llama.load_state = self._loading
        self.start()

    def start(self) -> None:
        self.tokens: list[int] = []
        self.times: list[float] = []
        self.prompt_evaluated = 0
        self.restored = False
        self._begun = time.perf_counter()

    def _evaluating(self, tokens: Sequence[int]) -> None:
        if not self.tokens:
            self.prompt_evaluated += len(tokens)
        self._eval(tokens)

    def _loading(self, state: Any) -> None:
        self.restored = True
        self._load_state(state)

    def _generating(self, tokens: Sequence[int], **options: Any) -> Iterator[int]:
        for token in self._generate(tokens, **options):
            self.times.append(time.perf_counter() - self._begun)
            self.tokens.append(token)
            yield token


if __name__ == "__main__":
    answers = private_stdout()
    serve(LlamaServer(json.loads(sys.argv[1])), answers)
