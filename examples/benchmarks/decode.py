"""Decode: tokens a second by rows in the batch, beside transformers' ``generate``.

    python -m examples.benchmarks.decode

Short prompts of real text, greedy, all rows at once. A step is measured while all rows
are running. What is not the forward is told apart: from the end of a step's first row
to the beginning of the next step the engine accepts the other rows' tokens, looks at
its queue and tiers, and prepares the next forward. Transformers runs in a process of
its own, in turn with ours; its step is what one token more costs ``generate``.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.benchmarks.common import Spread, arguments, ratios, real_tokens
from examples.benchmarks.plain import PlainProcess
from examples.benchmarks.report import by_dtype
from pcr_core import Engine, EngineConfig, Result, SamplingParams

HEAD = (
    "dtype", "rows", "step, ms", "tokens/s", "tokens/s ÷ one row", "not the forward",
    "generate, ms a token", "step ÷ generate",
)  # fmt: skip


def all_running(results: Sequence[Result], submitted: Sequence[float]) -> Any:
    """Start and stop of the first row's steps while every row was running."""
    steps = [
        [
            (one.start + at, one.stop + at)
            for one in result.intervals
            if one.lane == "decode"
        ]
        for result, at in zip(results, submitted, strict=True)
    ]
    begun = max(mine[0][0] for mine in steps)
    ended = min(mine[-1][1] for mine in steps)
    return [(a, b) for a, b in steps[0] if begun <= a and b <= ended]


def run_rows(
    engine: Engine, prompts: Sequence[list[int]], tokens: int
) -> tuple[float, float]:
    """Seconds of a step with all of these running, and the share beside its forward."""
    params = SamplingParams(max_tokens=tokens, min_tokens=tokens, temperature=0.0)
    submitted, completions = [], []
    for prompt in prompts:
        submitted.append(time.perf_counter())
        completions.append(engine.submit(prompt, params))
    results = [completion.result() for completion in completions]
    steps = all_running(results, submitted)
    pairs = list(itertools.pairwise(steps))
    periods = [after[0] - before[0] for before, after in pairs]
    rest = [after[0] - before[1] for before, after in pairs]
    return statistics.median(periods), sum(rest) / sum(periods)


def measure(dtype: str, options: Any, folder: Path) -> dict[str, Any]:
    """Steps and shares by rows, and transformers' steps, a list per round."""
    config = EngineConfig(
        model=options.model,
        cache_dir=folder,
        dtype=dtype,
        threads=options.threads,
        max_batch_size=max(options.rows),
        ssd_bytes=0,
        resident_rows=0,
        store_answers=False,
    )
    found: dict[str, Any] = {"step": {}, "rest": {}, "generate": []}
    with Engine(config) as engine:
        source = options.model or str(next((folder / "models").glob("[!.]*")))
        about = engine.stats()
        prompts = [
            real_tokens(engine.tokenizer, options.tokens, which=which)
            for which in range(max(options.rows))
        ]
        with PlainProcess(source, dtype, options.threads) as plain:
            for index in range(-1, options.rounds):  # the first round warms up
                generate = plain.call("step", prompts[0])
                for rows in options.rows:
                    step, rest = run_rows(engine, prompts[:rows], options.output)
                    if index >= 0:
                        found["step"].setdefault(rows, []).append(step)
                        found["rest"].setdefault(rows, []).append(rest)
                if index >= 0:
                    found["generate"].append(generate)
    return {**found, "decoding": about.decoding, "dtype": about.dtype}


def rows_of(dtype: str, found: dict[str, Any]) -> list[list[str]]:
    print(f"{dtype}: rows in one forward are {found['decoding']}")
    one = next(iter(found["step"].values()))
    lines = []
    for rows, steps in found["step"].items():
        gain = [rows * a / b for a, b in zip(one, steps, strict=True)]
        share = Spread.of([100 * rest for rest in found["rest"][rows]])
        line = [dtype, str(rows), Spread.of(steps).ms()]
        line += [f"{rows / Spread.of(steps).median:.0f}", Spread.of(gain).ratio()]
        line += [f"{share.median:.1f} % ({share.low:.1f}-{share.high:.1f})"]
        line += [Spread.of(found["generate"]).ms() if rows == 1 else ""]
        line += [ratios(steps, found["generate"]).ratio() if rows == 1 else ""]
        lines.append(line)
    return lines


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.set_defaults(tokens=100)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--output", type=int, default=64, help="tokens per answer")
    options = parser.parse_args()
    by_dtype("decode", options, HEAD, measure, rows_of)


if __name__ == "__main__":
    main()
