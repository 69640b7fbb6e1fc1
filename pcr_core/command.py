"""The command ``pcr``: tools around the cache."""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from pcr_core.capacity_command import capacity
from pcr_core.config import EngineConfig
from pcr_core.errors import ConfigError, PcrError
from pcr_core.simulator.comparison import Comparison, compare, parse_budget
from pcr_core.simulator.contenders import NAMES, USUAL, contenders
from pcr_core.simulator.replay import service_rate
from pcr_core.simulator.workloads import RECIPES, generate
from pcr_core.timeline import Timeline, plot
from pcr_core.trace import Trace, read_trace

_PATIENCE = 2.0
"""Seconds before a progress bar appears."""

_BUDGETS = ("12", "25", "75", "150")
_WINDOWS = ("6", "64")

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def main() -> None:
    """Run the command; a mistake of the user is one line and exit status 2."""
    try:
        app(prog_name="pcr")
    except PcrError as error:
        typer.echo(f"pcr: {error}", err=True)
        raise SystemExit(2) from None


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"pcr-rag {importlib.metadata.version('pcr-rag')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Tools around the KV cache of prompt prefixes."""


app.command()(capacity)


_Recorded = Annotated[
    Path | None, typer.Argument(help="A trace that an engine has recorded.")
]
_Workload = Annotated[
    str | None, typer.Option(help=f"Or generate one: {', '.join(RECIPES)}.")
]
_Seed = Annotated[int, typer.Option(min=0, help="Of the generated one.")]
_Budgets = Annotated[
    list[str] | None,
    typer.Option(
        help="Size of the DRAM tier, as a number of mean requests (25) or in bytes "
        f"(2GiB). Repeat it to compare several. Default: {', '.join(_BUDGETS)}."
    ),
]
_Policies = Annotated[
    list[str] | None,
    typer.Option(
        help=f"One of {', '.join(NAMES)}. Repeatable. Default: all but gdsf and lfu."
    ),
]
_Windows = Annotated[
    list[str] | None,
    typer.Option(
        help="Waiting requests that look-ahead protects, or auto. Repeatable. "
        f"Default: {', '.join(_WINDOWS)}."
    ),
]
_Load = Annotated[
    float,
    typer.Option(
        min=0.01,
        max=100.0,
        help="Share of the time that a server without cache is busy; above 1 its "
        "queue grows.",
    ),
]
_Json = Annotated[
    Path | None, typer.Option("--json", help="Write all figures to this file.")
]


# An option is a parameter, so there are more of them here than elsewhere.
@app.command()
def simulate(
    trace: _Recorded = None,
    workload: _Workload = None,
    seed: _Seed = 0,
    budget: _Budgets = None,
    policy: _Policies = None,
    window: _Windows = None,
    load: _Load = 0.9,
    json_file: _Json = None,
) -> None:
    """Show the hit rates of eviction policies on recorded or generated requests.

    The policies are the engine's own, on chunk names instead of chunks. The last row
    is what nothing can beat: a policy that knows the future.
    """
    requests = _trace(trace, workload, seed)
    rows = contenders(policy or USUAL, [_window(text) for text in window or _WINDOWS])
    columns = [parse_budget(text, requests) for text in budget or _BUDGETS]
    rate = service_rate(requests, load)
    with _progress(len(rows) * len(columns) * len(requests.requests)) as step:
        result = compare(requests, rows, columns, rate, after_each=step)
    _show(result, load)
    if json_file is not None:
        _write(json_file, {"load": load, **result.as_dict()})


def _trace(path: Path | None, workload: str | None, seed: int) -> Trace:
    if (path is None) == (workload is None):
        raise ConfigError(
            "give either the file of a recorded trace, or --workload with one of "
            f"{', '.join(RECIPES)}"
        )
    return generate(workload, seed) if workload else read_trace(path or Path())


def _window(text: str) -> int | None:
    if text == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        raise ConfigError(
            f"--window is {text!r}; use a number of requests or auto"
        ) from None


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """A bar on stderr once the work takes long, if somebody is looking."""
    console = Console(stderr=True)
    columns = (TextColumn("replaying"), BarColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, transient=True)
    task = bar.add_task("replaying", total=total)
    patience = time.monotonic() + _PATIENCE
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        if done % 100 == 0 and console.is_terminal and time.monotonic() > patience:
            bar.start()  # once started, this does nothing
            bar.update(task, completed=done)

    try:
        yield step
    finally:
        if bar.live.is_started:  # else it would print an empty line
            bar.stop()


def _show(result: Comparison, load: float) -> None:
    trace = result.trace
    console = Console(width=None if sys.stdout.isatty() else 132, highlight=False)
    table = Table()
    table.add_column("policy")
    for budget in result.budgets:
        table.add_column(f"{budget.label}\n{budget.chunks} chunks", justify="right")
    for contender, row in zip(result.contenders, result.outcomes, strict=True):
        table.add_row(contender.label, *(f"{100 * o.hit_rate:.1f}" for o in row))
    first = result.contenders[0].label
    table.add_section()
    table.add_row(
        f"waiting requests, {first}", *(f"{o.queue:.1f}" for o in result.outcomes[0])
    )
    console.print(f"{trace.name}: reused prompt tokens in %", markup=False)
    console.print(table)
    console.print(
        f"{len(trace.requests)} requests of {trace.mean_tokens:.0f} tokens and "
        f"{trace.mean_chunks:.1f} chunks of {trace.chunk_tokens}, on average; load "
        f"{load:g}. A cache without a limit would reuse {100 * result.reuse:.1f} %."
    )


def _write(path: Path, figures: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(figures, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


# --- pcr timeline ---

_PromptFile = Annotated[
    Path, typer.Argument(metavar="PROMPT", help="A text file, or - for standard input.")
]
_Model = Annotated[
    str | None,
    typer.Option(help="Hub id, folder or .gguf file. Default: the packaged model."),
]
_CacheDir = Annotated[
    Path | None, typer.Option(help="The cache to use. Default: the engine's own.")
]
_Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
_Overlap = Annotated[
    str, typer.Option(help="Copies beside compute: auto, none, up, down or both.")
]
_Repeat = Annotated[
    int, typer.Option(min=1, help="Run the prompt so often, and show the last run.")
]
_MaxTokens = Annotated[int, typer.Option(min=1, help="Most tokens to generate.")]
_Png = Annotated[Path | None, typer.Option(help="Draw it into this file.")]
_TraceFile = Annotated[
    Path | None,
    typer.Option("--trace", help="Write it as a trace for ui.perfetto.dev."),
]


@app.command()
def timeline(
    prompt: _PromptFile,
    model: _Model = None,
    cache_dir: _CacheDir = None,
    dtype: _Dtype = "auto",
    overlap: _Overlap = "auto",
    repeat: _Repeat = 1,
    max_tokens: _MaxTokens = 8,
    png: _Png = None,
    trace: _TraceFile = None,
) -> None:
    """Run a prompt and show where the time to its first token went.

    The prompt is taken as it is, without a chat template, and is kept in the cache.
    With `--repeat 2` the second run finds what the first has left in memory; another
    call finds it on SSD.
    """
    text = _prompt(prompt)
    for path in (png, trace):
        _check_output(path)
    if png is not None:
        _check_drawing()
    folder = {} if cache_dir is None else {"cache_dir": cache_dir}
    config = EngineConfig(model=model, dtype=dtype, overlap=overlap, **folder)
    found = _measure(config, text, repeat, max_tokens)
    typer.echo(found)
    _save(png, found.save_png)
    _save(trace, found.save_chrome_trace)


def _prompt(path: Path) -> str:
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text("utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the prompt {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the prompt {path} is not UTF-8 text: {error}") from error
    if not text.strip():
        raise ConfigError(f"the prompt {path} is empty; give some text to run")
    return text


def _check_output(path: Path | None) -> None:
    """Say it before a model is loaded and a prompt is run in vain."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"cannot write {path}: it is a folder; name a file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(
            f"cannot write {path}: its folder is missing, or writing is not allowed"
        )


def _check_drawing() -> None:
    try:
        plot.require_matplotlib()
    except ImportError as error:
        raise ConfigError(str(error)) from error


def _measure(
    config: EngineConfig, prompt: str, repeat: int, max_tokens: int
) -> Timeline:
    """Run ``prompt`` on an engine of its own; the last run's timeline."""
    # Here: it loads torch, which the other commands do without.
    from pcr_core.engine import Engine
    from pcr_core.sampling_params import SamplingParams

    params = SamplingParams(max_tokens=max_tokens)
    with (
        Console(stderr=True).status("loading the model and running the prompt"),
        Engine(config) as engine,
    ):
        for _ in range(repeat):
            result = engine.generate(prompt, params)
    return result.timeline()


def _save(path: Path | None, save: Callable[[Path], None]) -> None:
    if path is None:
        return
    try:
        save(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
