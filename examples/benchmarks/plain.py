"""Stock transformers, to measure against: sdpa attention and a ``DynamicCache``.

It runs in a process of its own: OpenMP keeps a team of threads for every thread that
runs torch, and two teams in one process slow each other down.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from examples.benchmarks.common import timed
from pcr_core.model._compat import cache_argument


class Plain:
    """A model in this process."""

    def __init__(self, path: str, dtype: str) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, dtype)
        ).eval()
        self._name = cache_argument(self.model)
        self._resident: DynamicCache | None = None

    @torch.inference_mode()
    def forward(self, ids: list[int], cache: DynamicCache) -> int:
        options = {self._name: cache, "use_cache": True, "logits_to_keep": 1}
        logits = self.model(input_ids=torch.tensor([ids]), **options).logits
        return int(logits[0, -1].argmax())

    def cold(self, ids: list[int]) -> float:
        """Seconds of one forward over the whole prompt."""
        return timed(lambda: self.forward(ids, DynamicCache(config=self.model.config)))

    def keep(self, prefix: list[int]) -> float:
        """Compute and keep a prefix's cache."""
        self._resident = DynamicCache(config=self.model.config)
        return timed(lambda: self.forward(prefix, self._resident))

    def hit(self, suffix: list[int]) -> float:
        """Seconds of one forward of ``suffix`` over the kept prefix."""
        cache = self._resident
        before = cache.get_seq_length()
        seconds = timed(lambda: self.forward(suffix, cache))
        cache.crop(before - cache.get_seq_length())
        return seconds

    @torch.inference_mode()
    def step(self, ids: list[int], tokens: int = 32) -> float:
        """Seconds that ``generate`` takes for one token more, greedy."""
        prompt = torch.tensor([ids])
        mask = torch.ones_like(prompt)

        def generate(count: int) -> float:
            options = {"max_new_tokens": count, "min_new_tokens": count}
            return timed(
                lambda: self.model.generate(
                    prompt, attention_mask=mask, do_sample=False, **options
                )
            )

        first = generate(1)
        return (generate(1 + tokens) - first) / tokens


def _serve(pipe: Connection, path: str, dtype: str, threads: int) -> None:
    torch.set_num_threads(threads)
    plain = Plain(path, dtype)
    while True:
        method, ids = pipe.recv()
        if method is None:
            return
        pipe.send(getattr(plain, method)(ids))


class PlainProcess:
    """The same in a child process; use as a context manager."""

    def __init__(self, path: str, dtype: str, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, path, dtype, threads), daemon=True
        )
        self._process.start()

    def call(self, method: str, ids: list[int]) -> float:
        self._pipe.send((method, ids))
        seconds: float = self._pipe.recv()
        return seconds

    def __enter__(self) -> PlainProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.send((None, []))
        self._process.join()
