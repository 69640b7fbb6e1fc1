"""The forward pass, piece by piece: what each part of it is worth, alone and together.

    python -m examples.benchmarks.forward_variants

Stock is transformers with sdpa, a ``DynamicCache`` and logits of the last position.
"+ kv" is stock with one piece of the engine, "all" has every one, "all - kv" lacks one.
"engine" is "all" with rows padded as exact reuse asks. "stock, all logits" is what a
call without ``logits_to_keep`` costs. The pieces (see ``ingredients``):

    kv         a preallocated row instead of concatenation
    linear     row tiles, on packed weights where the probe found them faster
    pages      packed weights in huge pages
    attention  grouped heads, without expanding K and V
    lean       fused q/k/v and gate/up, few small operations
    compiled   what is between the products of lean layers, compiled for this CPU
    head       the output head on packed weights in decode steps

All variants share one copy of the weights that they do not pack, in one process, and
take turns in every round: a cold prompt, then its last tokens over the rest (mean of
some repetitions), then decode steps (mean). Ratios are within a round.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from examples.benchmarks.common import Spread, arguments, ratios, real_tokens, timed
from examples.benchmarks.ingredients import Forward, opened, variants
from examples.benchmarks.report import by_dtype

WORK = ("cold", "hit", "step")
HEAD = ("dtype", "variant", "cold, ms", "/ stock", "hit, ms", "/ stock", "step, ms",
        "/ stock", "same token")  # fmt: skip


def one_round(
    forward: Forward, ids: Sequence[int], suffix: int, hits: int, steps: int
) -> tuple[dict[str, float], int]:
    """Seconds of each kind of work, and the first token that comes out.

    Args:
        forward: Runs it.
        ids: The prompt.
        suffix: Tokens at its end that a hit computes.
        hits: Repetitions of the hit.
        steps: Decode steps.
    """
    token = 0
    prefix, rest = len(ids) - suffix, ids[-suffix:]

    def cold() -> None:
        nonlocal token
        token = int(forward.cold(ids).argmax())

    def some_hits() -> None:
        for _ in range(hits):
            int(forward.hit(rest, prefix).argmax())

    def some_steps() -> None:
        following = token
        for _ in range(steps):
            following = int(forward.step(following).argmax())

    seconds = {
        "cold": timed(cold),
        "hit": timed(some_hits) / hits,
        "step": timed(some_steps) / steps,
    }
    forward.rewind(steps)
    return seconds, token


def in_turns(
    forwards: Mapping[str, Forward], prompts: Sequence[Sequence[int]], options: Any
) -> dict[str, Any]:
    """Each variant on each prompt; the first round warms up and does not count.

    After ``options.seconds`` no further round begins.
    """
    until = time.monotonic() + options.seconds
    seconds: dict[str, dict[str, list[float]]] = {
        name: {work: [] for work in WORK} for name in forwards
    }
    same = dict.fromkeys(forwards, 0)
    names = list(forwards)
    number = 0
    for number, ids in enumerate(prompts):
        if number > 1 and time.monotonic() > until:
            number -= 1
            break
        turn = number % len(names)
        tokens = {}
        for name in names[turn:] + names[:turn]:
            found, tokens[name] = one_round(
                forwards[name], ids, options.suffix, options.hits, options.steps
            )
            if number:
                for work in WORK:
                    seconds[name][work].append(found[work])
        for name in names:
            same[name] += tokens[name] == tokens["stock"]
        print(f"round {number}", flush=True)
    return {"seconds": seconds, "same": same, "prompts": number + 1}


def measure(dtype: str, options: Any, folder: Path) -> dict[str, Any]:
    """All variants with one dtype."""
    loaded, plans = opened(dtype, options, folder)
    room = options.tokens + options.steps
    prompts = [
        real_tokens(loaded.tokenizer, options.tokens, which=number)
        for number in range(options.rounds + 1)
    ]
    with ExitStack() as lifetimes:
        makers = variants(loaded, plans, room)
        wanted = options.variants or list(makers)
        forwards = {
            name: make(lifetimes)
            for name, make in makers.items()
            if name in {"stock", *wanted}
        }
        print(f"{len(forwards)} variants are ready", flush=True)
        found = in_turns(forwards, prompts, options)
    packed = [shape[:2] for shape, plan in plans.layers.items() if plan.packed]
    return {
        **found,
        "packed": packed,
        "head packed": bool(plans.head and plans.head.packed),
        "attention": str(plans.attention),
    }


def rows_of(dtype: str, found: dict[str, Any]) -> list[list[str]]:
    """A row a variant; ms with quartiles, ratio to stock within rounds."""
    seconds, rows = found["seconds"], []
    for name, mine in seconds.items():
        cells = [dtype, name]
        for work in WORK:
            spread = Spread.of([one * 1e3 for one in mine[work]])
            cells.append(f"{spread.median:.1f} ({spread.low:.1f}-{spread.high:.1f})")
            cells.append(ratios(mine[work], seconds["stock"][work]).ratio())
        rows.append([*cells, f"{found['same'][name]}/{found['prompts']}"])
    return rows


def main() -> None:
    parser = arguments((__doc__ or "").splitlines()[0])
    parser.add_argument("--suffix", type=int, default=20, help="tokens of a hit")
    parser.add_argument("--hits", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=600.0, help="for all rounds")
    parser.add_argument("--variants", nargs="+", help="only these, and stock")
    parser.add_argument("--cache", type=Path, help="keeps the start-up probe's figures")
    by_dtype("forward_variants", parser.parse_args(), HEAD, measure, rows_of)


if __name__ == "__main__":
    main()
