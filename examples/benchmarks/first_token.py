"""Time to first token: cold, from DRAM, from SSD after a restart, beside plain transformers.

    python -m examples.benchmarks.first_token

Plain transformers is stock: sdpa attention and a ``DynamicCache``. Its cold figure is
one forward of the whole prompt; its hit is one forward of the same suffix over a
resident cache. Ours is everything between ``submit`` and the first token. All four run
in turn in every round; ratios are taken within a round.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from examples.benchmarks.common import (
    Spread,
    arguments,
    drop_page_cache,
    print_machine,
    print_table,
    quiet_transformers,
    ratios,
    real_tokens,
    sequential_read,
    timed,
    write_json,
)
from pcr_core import Engine, EngineConfig, Result, SamplingParams
from pcr_core.model._compat import cache_argument

ONE = SamplingParams(max_tokens=1)


class Plain:
    """Stock transformers."""

    def __init__(self, path: str, dtype: str) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, dtype)
        ).eval()
        self._name = cache_argument(self.model)

    @torch.inference_mode()
    def forward(self, ids: list[int], cache: DynamicCache) -> int:
        options = {self._name: cache, "use_cache": True, "logits_to_keep": 1}
        logits = self.model(input_ids=torch.tensor([ids]), **options).logits
        return int(logits[0, -1].argmax())

    def cold(self, ids: list[int]) -> None:
        self.forward(ids, DynamicCache(config=self.model.config))

    def resident(self, prefix: list[int]) -> DynamicCache:
        cache = DynamicCache(config=self.model.config)
        self.forward(prefix, cache)
        return cache

    def hit(self, suffix: list[int], cache: DynamicCache, prefix: int) -> float:
        seconds = timed(lambda: self.forward(suffix, cache))
        cache.crop(-(cache.get_seq_length() - prefix))
        return seconds


def measure(dtype: str, options: Any, folder: Path) -> dict[str, Any]:
    """All figures for one dtype."""
    config = EngineConfig(
        model=options.model,
        cache_dir=folder,
        dtype=dtype,
        threads=options.threads,
        dram_bytes="1GiB",
        chunk_tokens=options.chunk_tokens,
    )
    engine = Engine(config)
    source = options.model or str(next((folder / "models").glob("[!.]*")))
    plain = Plain(source, dtype)
    stats = engine.stats()
    prompt = real_tokens(engine.tokenizer, options.tokens)
    engine.generate(prompt, ONE)
    hit = engine.generate(prompt, ONE).usage
    prefix = hit.cached_tokens
    suffix = prompt[prefix:]
    cache = plain.resident(prompt[:prefix])
    sample: dict[str, list[float]] = {}

    def note(name: str, seconds: float) -> None:
        sample.setdefault(name, []).append(seconds)

    for index in range(-1, options.rounds):  # the first round warms up
        fresh = real_tokens(engine.tokenizer, options.tokens, which=index + 2)
        fresh[0] = index + 1000  # no prefix shared with any other prompt
        note("plain cold", timed(lambda ids=fresh: plain.cold(ids)))
        note("cold", engine.generate(fresh, ONE).timing.ttft)
        note("plain hit", plain.hit(suffix, cache, prefix))
        note("dram", engine.generate(prompt, ONE).timing.ttft)
        engine.flush()
        if index < 0:
            sample.clear()
    engine.close()
    note_ssd(sample, plain, config, prompt, options.rounds)
    return {
        "sample": sample,
        "cuts": stats.prefill_cuts,
        "chunk": config.chunk_tokens,
        "prefix": prefix,
        "suffix": len(suffix),
    }


def note_ssd(
    sample: dict[str, list[float]],
    plain: Plain,
    config: EngineConfig,
    prompt: list[int],
    rounds: int,
) -> None:
    """After a restart with a cold page cache: SSD hit, then the same from DRAM."""
    chunks = config.cache_path / "kv"
    for name in ("ssd", "ssd dram", "read rate"):
        sample[name] = []
    for index in range(-1, rounds):
        with Engine(config) as engine:
            # A first request in a new engine starts threads and touches buffers.
            engine.generate(prompt[:64], ONE)
            drop_page_cache(chunks)
            ssd: Result = engine.generate(prompt, ONE)
            again = engine.generate(prompt, ONE)
            rate = engine.stats().cache.read_bytes
        read, seconds = sequential_read(chunks)
        if index < 0:
            continue
        sample["ssd"].append(ssd.timing.ttft)
        sample["ssd dram"].append(again.timing.ttft)
        sample["read rate"].append(read / seconds)
        sample.setdefault("ssd bytes", []).append(rate)
        assert ssd.usage.cached_by_tier.get("ssd", 0) > 0, ssd.usage


def rows_of(dtype: str, found: dict[str, Any]) -> list[list[str]]:
    sample = found["sample"]
    bound = [
        dram + size / rate
        for dram, size, rate in zip(
            sample["ssd dram"], sample["ssd bytes"], sample["read rate"], strict=True
        )
    ]
    return [
        [dtype, "cold", Spread.of(sample["cold"]).ms(), "plain one-shot prefill",
         Spread.of(sample["plain cold"]).ms(),
         ratios(sample["cold"], sample["plain cold"]).ratio()],
        [dtype, f"DRAM hit, {found['prefix']} + {found['suffix']}",
         Spread.of(sample["dram"]).ms(), "plain forward of the suffix",
         Spread.of(sample["plain hit"]).ms(),
         ratios(sample["dram"], sample["plain hit"]).ratio()],
        [dtype, "SSD hit after restart", Spread.of(sample["ssd"]).ms(),
         "DRAM hit + bytes / read rate", Spread.of(bound).ms(),
         ratios(sample["ssd"], bound).ratio()],
    ]  # fmt: skip


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--chunk-tokens", type=int, default=128)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    about = print_machine()
    results: dict[str, Any] = {"machine": about}
    rows: list[list[str]] = []
    with quiet_transformers(), tempfile.TemporaryDirectory() as folder:
        for dtype in options.dtypes:
            found = results[dtype] = measure(dtype, options, Path(folder))
            print(f"{dtype}: {found['cuts']} prefill, chunks of {found['chunk']}")
            rows += rows_of(dtype, found)
    head = ("dtype", "TTFT", "ours, ms (quartiles)", "beside", "its ms", "ratio")
    print_table(head, rows)
    write_json(options.json, results)


if __name__ == "__main__":
    main()
