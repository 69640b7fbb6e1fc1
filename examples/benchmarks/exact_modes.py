"""What exactness costs, by chunk size: cold prefill time and whether bits agree.

    python -m examples.benchmarks.exact_modes

Per dtype and chunk size: stock transformers in one shot; the exact path in one shot and
in chunk-sized forwards; the fall-back grid. "Same bits" compares KV of every layer and
the last logits with the exact one-shot run. (The grid need not agree with that: it is
exact because cold and warm run the same forwards.)
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from examples.benchmarks.common import Spread, arguments, ratios, real_tokens, timed
from examples.benchmarks.plain import Plain
from examples.benchmarks.report import by_dtype
from pcr_core import EngineConfig
from pcr_core.model.chunk_io import ChunkIO
from pcr_core.model.fingerprint import kv_bytes
from pcr_core.model.loading import LoadedModel, load
from pcr_core.model.prefill_plan import Cuts, grid, shape_independent
from pcr_core.model.runner import Runner
from pcr_core.model.setup import model_prepared

SIZES = (16, 32, 64, 128, 256, 512)


def _cut(chunk: int) -> Cuts:
    """The exact kernels, but a forward for every chunk."""
    exact = shape_independent()
    return Cuts(f"exact chunks of {chunk}", exact.align, exact.pad, step=chunk)


def prefill(loaded: LoadedModel, cuts: Cuts, tokens: list[int]) -> list[bytes]:
    """Run a prefill; return its bits."""
    runner = Runner(loaded, max(SIZES), cuts)
    row = runner.open_row(len(tokens))
    io = ChunkIO({}, {}, filled=lambda index: None, between=lambda: None)
    logits = runner.prefill(row, tokens, io).logits
    bits = kv_bytes(row.cache, len(tokens))
    return [*bits, logits.float().numpy().tobytes()]


def timer(loaded: LoadedModel, cuts: Cuts, tokens: list[int]) -> Callable[[], None]:
    """A prefill on a row that exists, as in a running engine."""
    runner = Runner(loaded, max(SIZES), cuts)
    row = runner.open_row(len(tokens))
    io = ChunkIO({}, {}, filled=lambda index: None, between=lambda: None)
    return lambda: void(runner.prefill(row, tokens, io))


def void(_: object) -> None:
    """Drop a result."""


def measure(dtype: str, options: Any, folder: Path) -> dict[str, Any]:
    """Seconds of each way to prefill, whether bits agree, bytes of a token's KV."""
    config = EngineConfig(
        model=options.model, cache_dir=folder, dtype=dtype, threads=options.threads
    )
    loaded = load(config)
    source = options.model or str(next((folder / "models").glob("[!.]*")))
    plain = Plain(source, dtype)
    tokens = real_tokens(loaded.tokenizer, options.tokens)
    works: dict[str, Callable[[], object]] = {"stock": lambda: plain.cold(tokens)}
    with model_prepared(loaded, config):
        works["exact one shot"] = timer(loaded, shape_independent(), tokens)
        for chunk in SIZES:
            works[f"exact {chunk}"] = timer(loaded, _cut(chunk), tokens)
            works[f"grid {chunk}"] = timer(loaded, grid(chunk), tokens)
        sample: dict[str, list[float]] = {name: [] for name in works}
        for index in range(-1, options.rounds):
            for name, work in works.items():
                seconds = timed(work)
                if index >= 0:
                    sample[name].append(seconds)
        whole = prefill(loaded, shape_independent(), tokens)
        same = {
            f"{name} {chunk}": prefill(loaded, cuts(chunk), tokens) == whole
            for chunk in SIZES
            for name, cuts in (("exact", _cut), ("grid", grid))
        }
    numbers = sum(
        shape.kv_heads * (shape.k_dim + shape.v_dim) for shape in loaded.shapes
    )
    size = numbers * loaded.dtype.itemsize
    return {"seconds": sample, "same": same, "bytes per token": size}


def rows_of(dtype: str, found: dict[str, Any]) -> list[list[str]]:
    """One row a chunk size: ms (quartiles) = ratio to stock within rounds."""
    sample, same, size = found["seconds"], found["same"], found["bytes per token"]

    def cell(name: str) -> str:
        ratio = ratios(sample[name], sample["stock"])
        return f"{Spread.of(sample[name]).ms()} = {ratio.median:.2f}"

    return [
        [
            dtype,
            str(chunk),
            f"{size * chunk / 2**20:.2f}",
            Spread.of(sample["stock"]).ms(),
            cell("exact one shot"),
            cell(f"exact {chunk}"),
            "yes" if same[f"exact {chunk}"] else "no",
            cell(f"grid {chunk}"),
            "yes" if same[f"grid {chunk}"] else "no",
        ]
        for chunk in SIZES
    ]


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    head = ("dtype", "chunk", "MiB", "stock", "exact, one shot", "exact, chunked",
            "same bits", "grid", "same bits")  # fmt: skip
    by_dtype("exact_modes", parser.parse_args(), head, measure, rows_of)


if __name__ == "__main__":
    main()
