"""Time to first token: cold, from each tier, beside plain transformers.

    python -m examples.benchmarks.first_token

Plain transformers is stock: sdpa attention and a ``DynamicCache``. Its cold figure is
one forward of the whole prompt; its hit is one forward of the same suffix over a
resident cache. Ours is everything between ``submit`` and the first token. They run in
turn in every round; ratios are taken within a round.

The engine keeps one row: the cold prompt takes it, so what follows is a hit in DRAM,
and the same once more is one on the device.
"""

from __future__ import annotations

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
from examples.benchmarks.plain import PlainProcess
from examples.benchmarks.report import by_dtype
from pcr_core import Engine, EngineConfig, Result, SamplingParams

ONE = SamplingParams(max_tokens=1)


HEAD = ("dtype", "TTFT", "ours, ms (quartiles)", "beside", "its ms", "ratio")


def measure(dtype: str, options: Any, folder: Path) -> dict[str, Any]:
    """All figures for one dtype."""
    config = EngineConfig(
        model=options.model,
        cache_dir=folder,
        dtype=dtype,
        threads=options.threads,
        dram_bytes="1GiB",
        chunk_tokens=options.chunk_tokens,
        resident_rows=1,
    )
    sample: dict[str, list[float]] = {}
    with Engine(config) as engine:
        source = options.model or str(next((folder / "models").glob("[!.]*")))
        stats = engine.stats()
        prompt = real_tokens(engine.tokenizer, options.tokens)
        engine.generate(prompt, ONE)
        engine.generate([999, *prompt[1:]], ONE)
        prefix = tokens_from(engine.generate(prompt, ONE), "dram")
        resident = tokens_from(engine.generate(prompt, ONE), "device")
        with PlainProcess(source, dtype, options.threads) as plain:
            plain.call("keep", prompt[:prefix])
            for index in range(-1, options.rounds):  # the first round warms up
                fresh = real_tokens(engine.tokenizer, options.tokens, which=index + 2)
                fresh[0] = index + 1000  # no prefix shared with any other prompt
                seconds = {
                    "plain cold": plain.call("cold", fresh),
                    "cold": engine.generate(fresh, ONE).timing.ttft,
                    "plain hit": plain.call("hit", prompt[prefix:]),
                    "dram": engine.generate(prompt, ONE).timing.ttft,
                    "device": engine.generate(prompt, ONE).timing.ttft,
                }
                engine.flush()
                if index >= 0:
                    for name, value in seconds.items():
                        sample.setdefault(name, []).append(value)
    note_ssd(sample, config, prompt, options.rounds)
    return {
        "sample": sample,
        "cuts": stats.prefill_cuts,
        "chunk": config.chunk_tokens,
        "prefix": prefix,
        "suffix": len(prompt) - prefix,
        "resident": resident,
        "tokens": len(prompt),
    }


def tokens_from(result: Result, tier: str) -> int:
    """How many tokens came from one tier; all that were reused must have."""
    found = result.usage.cached_by_tier
    assert set(found) == {tier}, found
    return found[tier]


def note_ssd(
    sample: dict[str, list[float]],
    config: EngineConfig,
    prompt: list[int],
    rounds: int,
) -> None:
    """After a restart with a cold page cache: SSD hit, then the same from DRAM."""
    config = config.model_copy(update={"resident_rows": 0})
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
    print(f"{dtype}: {found['cuts']} prefill, chunks of {found['chunk']}")
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
        [dtype,
         f"device hit, {found['resident']} + {found['tokens'] - found['resident']}",
         Spread.of(sample["device"]).ms(), "DRAM hit", Spread.of(sample["dram"]).ms(),
         ratios(sample["device"], sample["dram"]).ratio()],
        [dtype, "SSD hit after restart", Spread.of(sample["ssd"]).ms(),
         "DRAM hit + bytes / read rate", Spread.of(bound).ms(),
         ratios(sample["ssd"], bound).ratio()],
    ]  # fmt: skip


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--chunk-tokens", type=int, default=32)
    options = parser.parse_args()
    by_dtype("first_token", options, HEAD, measure, rows_of)


if __name__ == "__main__":
    main()
