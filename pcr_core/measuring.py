"""A machine's rates for ``pcr capacity``, measured on an engine of its own.

Takes about a dozen prefills of up to 1,024 tokens. Of each length the fastest counts: a
process that is paused measures too long, and nothing makes it measure too short.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pcr_core.config import EngineConfig
from pcr_core.engine import Engine
from pcr_core.errors import ConfigError
from pcr_core.model.loading import load
from pcr_core.model.packaged import packaged_model_dir
from pcr_core.result import Result
from pcr_core.sampling_params import SamplingParams
from pcr_core.simulator.kv_size import KvSize, kv_size_of
from pcr_core.simulator.rates import Rates

_LONGEST = 1024  # tokens
_SHORTEST = 64
_TRIES = 3
_STEPS = 24
_ROWS = 4


@dataclass(frozen=True, slots=True)
class Measured:
    """What an engine does here.

    Attributes:
        rates: Its rates; ``ssd_read`` is 0 if there is no SSD tier.
        kv: Size of its KV, in the dtype that it runs in.
        chunk_tokens: Tokens per chunk.
    """

    rates: Rates
    kv: KvSize
    chunk_tokens: int


def measure(
    config: EngineConfig, *, model: Any = None, tokenizer: Any = None
) -> Measured:
    """Open an engine, run prompts of random tokens, close it.

    Chunks go to a folder of their own below ``cache_dir``, on the disk that is to be
    measured, and are removed. Any thread; torch then runs on the engine's.

    Args:
        config: The engine that is planned. Its budgets and tenants do not matter.
        model: Loaded already, with its ``tokenizer``; else ``config.model`` is loaded.
        tokenizer: See ``model``.

    Raises:
        ConfigError: If the model's window is too short to measure anything.
        ModelError: If the model cannot be loaded or run.
        StoreError: If the folder cannot be used.
    """
    config.cache_path.mkdir(parents=True, exist_ok=True)
    if model is None:
        name = config.model or str(packaged_model_dir(config.cache_path))
        config = _changed(config, model=name)
        loaded = load(config)
        model, tokenizer = loaded.model, loaded.tokenizer
    kv = kv_size_of(model.config.to_dict(), _dtype_of(model))
    with tempfile.TemporaryDirectory(
        prefix="measuring-", dir=config.cache_path, ignore_cleanup_errors=True
    ) as folder:
        own = _changed(config, **_tiers(config, kv, Path(folder)))
        with Engine(own, model=model, tokenizer=tokenizer) as engine:
            rates = _Session(engine, Path(folder), len(tokenizer)).rates()
            return Measured(rates, kv, engine.stats().chunk_tokens)


def _changed(config: EngineConfig, **changes: Any) -> EngineConfig:
    return EngineConfig(**{**config.model_dump(), **changes})


def _dtype_of(model: Any) -> str:
    return str(model.dtype).removeprefix("torch.")


def _tiers(config: EngineConfig, kv: KvSize, folder: Path) -> dict[str, Any]:
    """DRAM for two of the longest prompts, so that a third one pushes out the first."""
    longest = kv.file_bytes(_LONGEST)
    return {
        "cache_dir": folder,
        "dram_bytes": 2 * longest,
        "ssd_bytes": 64 * longest + 2**26 if config.ssd_bytes else 0,
        "namespace_bytes": None,
        "resident_rows": 0,
        "store_answers": False,
        "trace": None,
    }


class _Session:
    """One measurement."""

    def __init__(self, engine: Engine, folder: Path, vocabulary: int) -> None:
        self._engine = engine
        self._folder = folder
        self._vocabulary = vocabulary
        self._random = random.Random(0)
        self._longest = min(_LONGEST, engine.context_window - _STEPS - 1)
        if self._longest < _SHORTEST:
            raise ConfigError(
                f"the model's window of {engine.context_window} tokens is too short to "
                "measure rates; state them instead (--prefill, --decode-step)"
            )

    def rates(self) -> Rates:
        """Everything."""
        self._run(self._fresh(_SHORTEST))  # what only the first one pays
        lengths = sorted({self._longest // 8, self._longest // 2, self._longest})
        samples = [(length, self._cold(length)) for length in lengths]
        each, per_depth, overhead = fit(samples)
        step, row = self._decode()
        deep = float(self._longest)
        return Rates(
            prefill=((0.0, 1 / each), (deep, 1 / (each + per_depth * deep))),
            overhead=overhead,
            ssd_read=self._read() if self._engine.config.ssd_bytes else 0.0,
            decode_step=step,
            decode_row=row,
        )

    def _fresh(self, length: int) -> list[int]:
        return self._random.choices(range(self._vocabulary), k=length)

    def _run(self, prompt: Sequence[int], tokens: int = 1) -> Result:
        params = SamplingParams(max_tokens=tokens, min_tokens=tokens)
        result: Result = self._engine.generate(prompt, params)
        return result

    def _cold(self, length: int) -> float:
        """Seconds to the first token of a prompt that nobody has seen."""
        timings = [self._run(self._fresh(length)).timing for _ in range(_TRIES)]
        return min(timing.ttft - timing.queue for timing in timings)

    def _decode(self) -> tuple[float, float]:
        """Seconds of a step with one row, and what each further row adds."""

        def step(rows: int) -> float:
            params = SamplingParams(max_tokens=_STEPS, min_tokens=_STEPS)
            prompts = [self._fresh(_SHORTEST // 2) for _ in range(rows)]
            sent = [self._engine.submit(prompt, params) for prompt in prompts]
            results = [completion.result() for completion in sent]
            # The last to begin has all the others beside it.
            return results[-1].timing.decode / (_STEPS - 1)

        alone = _least(lambda: step(1))
        together = _least(lambda: step(_ROWS))
        return alone, max(0.0, together - alone) / (_ROWS - 1)

    def _read(self) -> float:
        """Bytes per second from SSD, past the page cache where the system allows it."""
        count = -(-3 * _LONGEST // self._longest) + 2  # more than DRAM holds
        prompts = [self._fresh(self._longest) for _ in range(count)]
        for prompt in prompts:
            self._run(prompt)
        self._engine.flush()
        _drop_page_cache(self._folder)
        for prompt in prompts[:3]:
            self._run(prompt)
        return self._engine.stats().decisions.read_bandwidth


def _least(sample: Callable[[], float]) -> float:
    return min(sample() for _ in range(_TRIES))


def fit(samples: Sequence[tuple[int, float]]) -> tuple[float, float, float]:
    """Seconds of prompts by length: ``overhead + each * n + per_depth * n**2 / 2``.

    Least squares of relative errors, with terms that come out negative left out.

    Args:
        samples: Tokens and seconds, one length at least.

    Returns:
        ``each`` in seconds per token, positive; ``per_depth`` in seconds per token for
        each token before it; ``overhead`` in seconds.
    """
    lengths = np.array([float(length) for length, _ in samples])
    seconds = np.array([max(taken, 1e-9) for _, taken in samples])
    terms = {
        "each": lengths,
        "per_depth": lengths**2 / 2,
        "overhead": np.ones_like(lengths),
    }
    while True:
        table = np.stack(list(terms.values()), axis=1) / seconds[:, None]
        solved, *_ = np.linalg.lstsq(table, np.ones_like(seconds), rcond=None)
        found = dict(zip(terms, solved.tolist(), strict=True))
        worst = min(found, key=found.__getitem__)
        if found[worst] > 0 or len(terms) == 1:
            break
        # The first term explains every prompt; the others are corrections.
        del terms[worst if worst != "each" else list(terms)[-1]]
    return found["each"], found.get("per_depth", 0.0), found.get("overhead", 0.0)


def _drop_page_cache(folder: Path) -> None:
    if not hasattr(os, "posix_fadvise"):
        return
    for path in folder.rglob("*.safetensors"):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)  # pages that are not written yet cannot be dropped
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)
