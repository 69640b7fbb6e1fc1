"""``pcr capacity``: options in, a prediction, a table out."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from pcr_core.config import EngineConfig, parse_bytes
from pcr_core.errors import ConfigError
from pcr_core.simulator.capacity import Forecast, Plan, Prediction, predict
from pcr_core.simulator.kv_size import PACKAGED, KvSize, read_kv_size
from pcr_core.simulator.rates import Rates, read_rates
from pcr_core.simulator.workloads import Recipe

_CHUNK = 32
_NAMES = {
    "none": "no cache",
    "dram": "DRAM only",
    "dram + ssd": "DRAM + SSD",
    "no limit": "DRAM without limit",
}

_Number = typer.Option(min=1, show_default=False)
_Model = Annotated[
    str | None,
    typer.Option(help="Folder or hub id of a model. Default: the packaged one."),
]
_Layers = Annotated[int | None, _Number]
_Dtype = Annotated[str, typer.Option(help="Of the KV: auto, float32, bfloat16, ...")]
_Documents = Annotated[int, typer.Option(help="Documents in the corpus.")]
_Length = Annotated[float, typer.Option(help="Their mean length in tokens.")]
_Zipf = Annotated[
    float, typer.Option(help="Exponent of their popularity; 0: all are equal.")
]
_PerPrompt = Annotated[int, typer.Option(help="Documents in a prompt.")]
_Query = Annotated[int, typer.Option(help="Tokens behind the documents.")]
_Output = Annotated[int, typer.Option(help="Tokens generated.")]
_Rate = Annotated[float, typer.Option(help="Requests per second.")]
_Dram = Annotated[str, typer.Option(help="DRAM for the cache, such as 4GiB.")]
_Ssd = Annotated[str, typer.Option(help="SSD for the cache; 0 for none.")]
_Chunk = Annotated[int, typer.Option(help="Tokens per chunk.")]
_Requests = Annotated[int, typer.Option(help="Requests that are counted.")]
_WarmUp = Annotated[int, typer.Option(help="Requests before, which fill the cache.")]
_Seed = Annotated[int, typer.Option(min=0, help="Of the stream.")]
_RatesFile = Annotated[
    Path | None, typer.Option("--rates", help="JSON with the machine's rates.")
]
_Measure = Annotated[
    bool, typer.Option("--measure", help="Measure the rates on this machine.")
]
_SaveRates = Annotated[Path | None, typer.Option(help="Write the rates to this file.")]
_Prefill = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[DEPTH:]RATE",
        help="Prompt tokens computed per second, that many tokens deep in a prompt "
        "(0). Repeatable.",
    ),
]
_SsdRead = Annotated[str | None, typer.Option(help="Read per second, such as 2GB.")]
_Seconds = Annotated[float | None, typer.Option(min=0, help="Seconds.")]
_Json = Annotated[
    Path | None, typer.Option("--json", help="Write all figures to this file.")
]


# An option is a parameter, so there are more of them here than elsewhere.
def capacity(
    model: _Model = None,
    layers: _Layers = None,
    kv_heads: _Layers = None,
    head_dim: _Layers = None,
    dtype: _Dtype = "auto",
    documents: _Documents = 1000,
    document_tokens: _Length = 500.0,
    zipf: _Zipf = 0.8,
    per_prompt: _PerPrompt = 2,
    query_tokens: _Query = 50,
    output_tokens: _Output = 100,
    rate: _Rate = 1.0,
    dram: _Dram = "4GiB",
    ssd: _Ssd = "20GiB",
    chunk_tokens: _Chunk = _CHUNK,
    requests: _Requests = 1000,
    warm_up: _WarmUp = 1000,
    seed: _Seed = 0,
    rates_file: _RatesFile = None,
    measure: _Measure = False,
    save_rates: _SaveRates = None,
    prefill: _Prefill = None,
    ssd_read: _SsdRead = None,
    ssd_latency: _Seconds = None,
    decode_step: _Seconds = None,
    decode_row: _Seconds = None,
    overhead: _Seconds = None,
    json_file: _Json = None,
) -> None:
    """Predict hit rates and time to the first token for a corpus and a machine.

    The machine's rates come from `--measure`, from a file (`--rates`), or from the
    options `--prefill` to `--overhead`, which go before the other two.
    """
    recipe = Recipe(
        requests=requests,
        documents=documents,
        document_tokens=document_tokens,
        zipf=zipf,
        query_tokens=query_tokens,
        output_tokens=output_tokens,
        chunk_tokens=chunk_tokens,
        per_prompt=per_prompt,
    )
    stated = _stated(
        prefill=tuple(map(_point, prefill)) if prefill else None,
        ssd_read=None if ssd_read is None else float(_bytes("--ssd-read", ssd_read)),
        ssd_latency=ssd_latency,
        decode_step=decode_step,
        decode_row=decode_row,
        overhead=overhead,
    )
    kv, rates = _machine(
        model, (layers, kv_heads, head_dim), dtype, rates_file, stated, measure
    )
    budgets = _bytes("--dram", dram), _bytes("--ssd", ssd)
    found = predict(Plan(recipe, rate, kv, rates, *budgets, warm_up, seed=seed))
    _show(found)
    _write(save_rates, rates.as_dict())
    _write(json_file, found.as_dict())


# --- what was asked ---


_Numbers = tuple[int | None, int | None, int | None]


def _kv(model: str | None, numbers: _Numbers, dtype: str) -> KvSize:
    if model is not None or numbers == (None, None, None):
        if numbers != (None, None, None):
            raise ConfigError(
                "give either --model or --layers, --kv-heads and --head-dim"
            )
        if model is not None:
            return read_kv_size(model, dtype)
        return PACKAGED if dtype == "auto" else replace(PACKAGED, dtype=dtype)
    layers, kv_heads, head_dim = numbers
    if layers is None or kv_heads is None or head_dim is None:
        raise ConfigError("--layers, --kv-heads and --head-dim go together; give all")
    return KvSize(layers, kv_heads, head_dim, "bfloat16" if dtype == "auto" else dtype)


def _bytes(name: str, text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None


def _stated(**rates: Any) -> dict[str, Any]:
    return {name: value for name, value in rates.items() if value is not None}


def _point(text: str) -> tuple[float, float]:
    depth, _, rate = text.rpartition(":")
    try:
        return float(depth or 0), float(rate)
    except ValueError:
        raise ConfigError(
            f"--prefill is {text!r}; write tokens per second, such as 1200, or a depth "
            "before it, such as 4096:700"
        ) from None


def _rates(path: Path | None, stated: dict[str, Any]) -> Rates:
    if path is not None:
        return replace(read_rates(path), **stated)
    if "prefill" not in stated:
        raise ConfigError(
            "how fast is the machine? Give --measure, --rates with a file, or at least "
            "--prefill and --ssd-read"
        )
    return Rates(**stated)


def _machine(
    model: str | None,
    numbers: _Numbers,
    dtype: str,
    path: Path | None,
    stated: dict[str, Any],
    measure: bool,
) -> tuple[KvSize, Rates]:
    """Size of the model's KV, and what this machine does per second."""
    if not measure:
        return _kv(model, numbers, dtype), _rates(path, stated)
    _check_measuring(path, numbers)
    return _measured(model, dtype, stated)


def _check_measuring(path: Path | None, numbers: _Numbers) -> None:
    if path is not None or numbers != (None, None, None):
        raise ConfigError(
            "--measure runs a model: it takes --model, but neither --rates nor "
            "--layers, --kv-heads and --head-dim"
        )


def _measured(
    model: str | None, dtype: str, stated: dict[str, Any]
) -> tuple[KvSize, Rates]:
    # Here: it loads torch, which the others do without.
    from pcr_core.measuring import measure

    config = EngineConfig.model_validate({"model": model, "dtype": dtype})
    with Console(stderr=True).status("measuring; this takes a minute"):
        found = measure(config)
    return found.kv, replace(found.rates, **stated)


# --- what came of it ---


def _show(found: Prediction) -> None:
    console = Console(width=None if sys.stdout.isatty() else 100, highlight=False)
    for line in _sizes(found):
        console.print(line, markup=False)
    table = Table()
    for title in ("", "found in DRAM", "on SSD", "TTFT mean", "P50", "P95"):
        table.add_column(title, justify="right" if title else "left")
    table.add_column("requests/s, at most", justify="right")
    for forecast in found.forecasts:
        table.add_row(*_row(forecast))
    console.print(table)
    for line in _notes(found):
        console.print(line, markup=False)


def _sizes(found: Prediction) -> Iterator[str]:
    plan = found.plan
    prompt = found.mean_tokens * plan.kv.token_bytes
    corpus = plan.recipe.documents * plan.recipe.document_tokens * plan.kv.token_bytes
    yield (
        f"A token has {plan.kv.token_bytes / 1024:.1f} KiB of KV, a prompt of "
        f"{found.mean_tokens:.0f} tokens {_size(prompt)}; all documents, each once, "
        f"{_size(corpus)}."
    )
    dram = found.dram_chunks * found.chunk_bytes / prompt
    ssd = found.ssd_chunks * found.chunk_bytes / prompt
    yield (
        f"DRAM of {_size(plan.dram_bytes)} holds {dram:.0f} prompts, SSD of "
        f"{_size(plan.ssd_bytes)} holds {ssd:.0f}."
    )
    yield (
        f"{plan.recipe.requests} requests at {plan.rate:g} per second, after "
        f"{plan.warm_up} that fill the cache:"
    )


def _size(nbytes: float) -> str:
    if nbytes >= 2**30:
        return f"{nbytes / 2**30:.1f} GiB"
    return f"{nbytes / 2**20:.1f} MiB"


def _row(forecast: Forecast) -> list[str]:
    times = forecast.ttft.mean, forecast.ttft.p50, forecast.ttft.p95
    growing = "grows" if forecast.busy >= 1 else ""
    return [
        _NAMES[forecast.cache],
        f"{forecast.dram_hits:.1%}",
        f"{forecast.ssd_hits:.1%}",
        *(growing or _time(seconds) for seconds in times),
        f"{forecast.most:.2f}",
    ]


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 10 else f"{seconds:.0f} s"


def _notes(found: Prediction) -> Iterator[str]:
    planned, plain = found.planned, found["none"]
    if planned.busy >= 1:
        yield (
            f"{found.plan.rate:g} requests per second are too many: the queue grows "
            f"without end. Up to {planned.most:.2f} are possible with these tiers."
        )
    elif plain.busy >= 1:
        yield "Without the cache the queue would grow without end."
    else:
        yield (
            f"The first token comes {plain.ttft.mean / planned.ttft.mean:.1f} times "
            "as soon as without the cache, on average."
        )
    if planned.recomputed > 0:
        yield (
            f"{planned.recomputed:.1%} of the tokens are on SSD but computed: reading "
            "them takes longer."
        )


def _write(path: Path | None, figures: dict[str, Any]) -> None:
    if path is None:
        return
    try:
        path.write_text(json.dumps(figures, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
