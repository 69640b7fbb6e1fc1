"""What the size of a chunk costs and saves: cold, from DRAM, from SSD after a restart.

    python -m examples.benchmarks.chunk_sizes

One model, one prompt of real text per round, an engine for each size in turn. The page
cache is dropped before each hit on SSD. Ratios are taken within a round, to the last
size of the list.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from examples.benchmarks.common import (
    Spread,
    arguments,
    drop_page_cache,
    ratios,
    real_tokens,
)
from examples.benchmarks.report import by_dtype
from pcr_core import Engine, EngineConfig, Result, SamplingParams
from pcr_core.model.loading import load

ONE = SamplingParams(max_tokens=1)
HEAD = (
    "dtype", "chunk", "MiB", "computed", "files", "cold, ms", "ratio", "DRAM hit, ms",
    "ratio", "SSD hit, ms", "ratio",
)  # fmt: skip


def run_round(
    config: EngineConfig, loaded: Any, prompt: list[int]
) -> tuple[dict[str, float], Result]:
    """Cold and from DRAM in one engine, from SSD in the next."""
    objects = {"model": loaded.model, "tokenizer": loaded.tokenizer}
    with Engine(config, **objects) as engine:
        engine.generate(prompt[50:200], ONE)  # threads start, buffers are touched
        cold = engine.generate(prompt, ONE)
        engine.flush()
        dram = engine.generate(prompt, ONE)
    with Engine(config, **objects) as engine:
        engine.generate(prompt[50:200], ONE)
        drop_page_cache(config.cache_path / "kv")
        ssd = engine.generate(prompt, ONE)
    assert cold.usage.cached_tokens == 0, cold.usage
    assert set(dram.usage.cached_by_tier) == {"dram"}, dram.usage
    assert set(ssd.usage.cached_by_tier) == {"ssd"}, ssd.usage
    found = {"cold": cold, "dram": dram, "ssd": ssd}
    return {name: result.timing.ttft for name, result in found.items()}, dram


def measure(dtype: str, options: Any, folder: Path) -> dict[int, dict[str, Any]]:
    """Figures of one dtype by chunk size."""
    plain = EngineConfig(
        model=options.model,
        cache_dir=folder,
        dtype=dtype,
        threads=options.threads,
        dram_bytes="1GiB",
        resident_rows=0,
    )
    loaded = load(plain)
    found: dict[int, dict[str, Any]] = {size: {} for size in options.sizes}
    for index in range(-1, options.rounds):  # the first round warms up
        prompt = real_tokens(loaded.tokenizer, options.tokens, which=index + 2)
        prompt[0] = 1000 + index  # shares no prefix with another round's
        for size in options.sizes:
            config = plain.model_copy(update={"chunk_tokens": size})
            seconds, hit = run_round(config, loaded, prompt)
            files = (folder / "kv").rglob("*.safetensors")
            one = found[size]
            one["computed"] = hit.usage.computed_tokens
            one["files"] = hit.usage.cached_tokens // size
            one["bytes"] = max(path.stat().st_size for path in files)
            for name, value in seconds.items():
                if index >= 0:
                    one.setdefault(name, []).append(value)
            shutil.rmtree(folder / "kv")
    return found


def rows_of(dtype: str, found: dict[int, dict[str, Any]]) -> list[list[str]]:
    last = list(found.values())[-1]
    rows = []
    for size, one in found.items():
        row = [dtype, str(size), f"{one['bytes'] / 2**20:.2f}"]
        row += [str(one["computed"]), str(one["files"])]
        for name in ("cold", "dram", "ssd"):
            row += [Spread.of(one[name]).ms(), ratios(one[name], last[name]).ratio()]
        rows.append(row)
    return rows


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 32, 64, 128])
    options = parser.parse_args()
    by_dtype("chunk_sizes", options, HEAD, measure, rows_of)


if __name__ == "__main__":
    main()
