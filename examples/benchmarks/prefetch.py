"""A queue of requests after a restart: from SSD with and without prefetch, from DRAM.

    python -m examples.benchmarks.prefetch

Every round opens the engine on a folder that holds the prompts' chunks, drops the page
cache, submits the whole queue at once and notes each request's time to first token;
then the same queue again, now from DRAM. With prefetch, chunks come from SSD while
requests wait. The first request cannot profit: nothing runs before it. Ratios are taken
within a round, over the mean of all other requests.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from examples.benchmarks.common import (
    Spread,
    arguments,
    drop_page_cache,
    ratios,
    real_tokens,
    sequential_read,
)
from examples.benchmarks.report import by_dtype
from pcr_core import Engine, EngineConfig, Result, SamplingParams

MODES = ("best_effort", "wait_complete", "off")


HEAD = (
    "dtype", "prefetch", "chunks read ahead", "mean TTFT from SSD, ms",
    "from DRAM, ms", "ratio", "wait for reads, ms",
)  # fmt: skip


def queue_of(engine: Engine, options: Any) -> list[list[int]]:
    """Prompts of real text that share nothing."""
    prompts = []
    for which in range(options.queue):
        prompt = real_tokens(engine.tokenizer, options.tokens, which=2 * which)
        prompt[0] = 1000 + which
        prompts.append(prompt)
    return prompts


def run_queue(engine: Engine, prompts: list[list[int]], tokens: int) -> list[Result]:
    """Submit all at once, as a batch or a busy service does."""
    params = SamplingParams(max_tokens=tokens, min_tokens=tokens)
    completions = [engine.submit(prompt, params) for prompt in prompts]
    return [completion.result() for completion in completions]


def mean_ttft(results: list[Result]) -> float:
    """Of all requests but the first, queueing included."""
    return statistics.fmean(result.timing.ttft for result in results[1:])


def mean_wait(results: list[Result]) -> float:
    """Seconds that each of them waited for reads once it had started."""
    return statistics.fmean(result.timing.load_wait for result in results[1:])


def measure(dtype: str, options: Any, folder: Path) -> dict[str, Any]:
    folder = folder / dtype  # what is read in sequence must be this dtype's
    settings = {
        "model": options.model,
        "cache_dir": folder,
        "dtype": dtype,
        "threads": options.threads,
        "dram_bytes": "2GiB",
        "resident_rows": 0,
    }
    with Engine(EngineConfig(**settings)) as engine:
        prompts = queue_of(engine, options)
        expected = [r.token_ids for r in run_queue(engine, prompts, options.output)]
        engine.flush()
    chunks = folder / "kv"
    sample: dict[str, list[float]] = {}
    for index in range(-1, options.rounds):  # the first round warms up
        for mode in MODES:
            with Engine(EngineConfig(**settings, prefetch=mode)) as engine:
                engine.generate(prompts[0][:64], SamplingParams(max_tokens=2))
                drop_page_cache(chunks)
                ssd = run_queue(engine, prompts, options.output)
                cache = engine.stats().cache
                dram = run_queue(engine, prompts, options.output)
            assert [r.token_ids for r in ssd] == expected
            assert all(r.usage.cached_by_tier.get("ssd", 0) for r in ssd)
            if index < 0:
                continue
            figures = {
                "ssd": mean_ttft(ssd),
                "dram": mean_ttft(dram),
                "wait": mean_wait(ssd),
                "first": ssd[0].timing.ttft,
                "ahead": cache.prefetch_issued,
            }
            for name, value in figures.items():
                sample.setdefault(f"{mode} {name}", []).append(value)
        read, seconds = sequential_read(chunks)
        if index >= 0:
            sample.setdefault("read rate", []).append(read / seconds)
    return {"sample": sample, "bytes": read}


def rows_of(dtype: str, found: dict[str, Any]) -> list[list[str]]:
    sample = found["sample"]
    rate, size = Spread.of(sample["read rate"]).median / 1e6, found["bytes"] / 1e6
    print(f"{dtype}: {size:.0f} MB in all, read at {rate:.0f} MB/s")
    return [
        [
            dtype,
            mode,
            f"{statistics.median(sample[f'{mode} ahead']):.0f}",
            Spread.of(sample[f"{mode} ssd"]).ms(),
            Spread.of(sample[f"{mode} dram"]).ms(),
            ratios(sample[f"{mode} ssd"], sample[f"{mode} dram"]).ratio(),
            Spread.of(sample[f"{mode} wait"]).ms(),
        ]
        for mode in MODES
    ]


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--queue", type=int, default=8, help="requests at once")
    parser.add_argument("--output", type=int, default=8, help="tokens per answer")
    options = parser.parse_args()
    by_dtype("prefetch", options, HEAD, measure, rows_of)


if __name__ == "__main__":
    main()
