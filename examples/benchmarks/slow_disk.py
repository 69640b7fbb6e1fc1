"""A prefix on a slow disk, read layer by layer under the forward that needs it.

    python -m examples.benchmarks.slow_disk

The disk is the real one, with every read of a chunk held back to a bandwidth at which
the whole prefix takes a given multiple of the forward of the rest. No prefetch: reads
begin when the request does. The bound is that of a pipeline over layers: the longer of
reading and computing, and one layer's read. Ratios are taken within a round.
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
)
from examples.benchmarks.disk import Disk, on_disk
from examples.benchmarks.report import by_dtype
from pcr_core import Engine, EngineConfig, SamplingParams
from pcr_core.model.loading import load

ONE = SamplingParams(max_tokens=1)
HEAD = (
    "dtype", "read ÷ compute", "MB/s", "read, ms", "DRAM hit, ms", "SSD hit, ms",
    "SSD hit ÷ bound", "SSD hit ÷ (read + compute)", "computed",
)  # fmt: skip


def measure(dtype: str, options: Any, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Rounds of one dtype, by how much longer reading takes than computing."""
    config = EngineConfig(
        model=options.model,
        cache_dir=folder,
        dtype=dtype,
        threads=options.threads,
        dram_bytes="1GiB",
        resident_rows=0,
        prefetch="off",
    )
    loaded = load(config)
    objects = {"model": loaded.model, "tokenizer": loaded.tokenizer}
    prompt = real_tokens(loaded.tokenizer, options.tokens)
    with Engine(config, **objects) as engine:
        engine.generate(prompt, ONE)
        engine.flush()
    found: dict[str, list[dict[str, Any]]] = {}
    disk = Disk()
    for index in range(-1, options.rounds):  # the first round warms up
        with Engine(config, **objects) as engine:
            engine.generate(prompt, ONE)
            size = engine.stats().cache.read_bytes
            compute = engine.generate(prompt, ONE).timing.ttft
        for multiple in options.multiples:
            disk.bandwidth = size / (multiple * compute)
            with on_disk(disk), Engine(config, **objects) as engine:
                engine.generate([999, *prompt[:200]], ONE)  # threads start
                drop_page_cache(folder / "kv")
                hit = engine.generate(prompt, ONE)
            if index >= 0:
                layers = len(loaded.shapes)
                read = multiple * compute
                one = {
                    "bandwidth": disk.bandwidth,
                    "read": read,
                    "compute": compute,
                    "hit": hit.timing.ttft,
                    "bound": max(read, compute) + read / layers,
                    "computed": hit.usage.computed_tokens,
                }
                found.setdefault(str(multiple), []).append(one)
    return found


def rows_of(dtype: str, found: dict[str, list[dict[str, Any]]]) -> list[list[str]]:
    rows = []
    for multiple, rounds in found.items():
        column = {name: [one[name] for one in rounds] for name in rounds[0]}
        both = [a + b for a, b in zip(column["read"], column["compute"], strict=True)]
        rows.append(
            [
                dtype,
                multiple,
                f"{Spread.of(column['bandwidth']).median / 1e6:.0f}",
                Spread.of(column["read"]).ms(),
                Spread.of(column["compute"]).ms(),
                Spread.of(column["hit"]).ms(),
                ratios(column["hit"], column["bound"]).ratio(),
                ratios(column["hit"], both).ratio(),
                "/".join(str(n) for n in sorted(set(column["computed"]))),
            ]
        )
    return rows


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--multiples", type=float, nargs="+", default=[0.5, 1.0, 2.0])
    options = parser.parse_args()
    by_dtype("slow_disk", options, HEAD, measure, rows_of)


if __name__ == "__main__":
    main()
