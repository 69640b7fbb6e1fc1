"""Where the time of a forward pass goes: a cold prompt, a hit and a decode step.

    python -m examples.benchmarks.profile_forward

torch.profiler on stock transformers and on the engine's forward, see
``forward_variants``. Shares are of the time under the profiler: what operations took
themselves, by kind, and as "Python" all else on the thread between them, model code and
the cost of profiling included. The time without the profiler stands beside it.
Attention has its own products and softmax; "copies" are concatenation, expansion,
padding and everything that only moves numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from examples.benchmarks.common import arguments, real_tokens, timed
from examples.benchmarks.ingredients import Forward, opened, variants
from examples.benchmarks.report import by_dtype

KINDS = {
    "attention": ("attention", "bmm", "softmax"),
    "products": ("mm", "linear", "matmul"),
    "copies": ("copy", "cat", "clone", "contiguous", "pad", "fill", "zero", "empty",
               "resize", "to_dense"),
}  # fmt: skip
"""Parts of the operations' names; the first kind that has one gets the operation."""

SHOWN = (*KINDS, "small", "python")
HEAD = ("dtype", "system", "work", "ms", "ms, profiled", "matrix products", "attention",
        "copies", "small operations", "Python", "operations")  # fmt: skip


def kind_of(name: str) -> str:
    """Which kind of operation this is; ``"small"`` for all that is no other."""
    bare = name.rpartition("::")[2]
    for kind, parts in KINDS.items():
        if any(part in bare for part in parts):
            return kind
    return "small"


def shares(operations: Iterable[tuple[str, float]], seconds: float) -> dict[str, float]:
    """Share of the time by kind; what no operation took is Python's.

    Args:
        operations: Name, and seconds in the operation itself.
        seconds: All of the time.
    """
    found = dict.fromkeys(SHOWN, 0.0)
    for name, took in operations:
        found[kind_of(name)] += took / seconds
    found["python"] = max(0.0, 1.0 - sum(found.values()))
    return found


def profiled(work: Callable[[], Any], calls: int) -> dict[str, Any]:
    """One kind of work, after a first call that does not count."""
    work()
    plain = timed(lambda: [work() for _ in range(calls)])
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        seconds = timed(lambda: [work() for _ in range(calls)])
    events = [e for e in seen.key_averages() if "::" in e.key]
    each = [(e.key, e.self_cpu_time_total / 1e6) for e in events]
    longest = sorted(each, key=lambda one: -one[1])[:12]
    return {
        "seconds": plain / calls,
        "profiled": seconds / calls,
        "shares": shares(each, seconds),
        "operations": sum(e.count for e in events) / calls,
        "longest": {name: took / seconds for name, took in longest},
    }


def works(
    forward: Forward, ids: list[int], options: Any
) -> dict[str, tuple[Callable[[], Any], int]]:
    """What is profiled, in this order, and how often."""
    prefix, rest = len(ids) - options.suffix, ids[-options.suffix :]

    def step() -> None:
        int(forward.step(ids[0]).argmax())

    return {
        "cold": (lambda: int(forward.cold(ids).argmax()), 2),
        "hit": (lambda: int(forward.hit(rest, prefix).argmax()), options.hits),
        "step": (step, options.steps),
    }


def measure(dtype: str, options: Any, folder: Path) -> dict[str, Any]:
    """Both systems with one dtype."""
    loaded, plans = opened(dtype, options, folder)
    ids = real_tokens(loaded.tokenizer, options.tokens)
    room = options.tokens + 3 * options.steps  # warm-up, plain and profiled
    with ExitStack() as lifetimes:
        makers = variants(loaded, plans, room)
        return {
            name: {
                work: profiled(call, count)
                for work, (call, count) in works(forward, ids, options).items()
            }
            for name in options.variants
            for forward in [makers[name](lifetimes)]
        }


def rows_of(dtype: str, found: dict[str, Any]) -> list[list[str]]:
    """A row a system and kind of work."""
    rows = []
    for name, works_found in found.items():
        for work, one in works_found.items():
            part = one["shares"]
            cells = [f"{part[k]:.0%}" for k in ("products", "attention", "copies")]
            cells += [f"{part[k]:.0%}" for k in ("small", "python")]
            ms = (f"{one[k] * 1e3:.1f}" for k in ("seconds", "profiled"))
            rows.append([dtype, name, work, *ms, *cells, f"{one['operations']:.0f}"])
            most = {key: f"{took:.1%}" for key, took in one["longest"].items()}
            print(f"{dtype} {name} {work}: {json.dumps(most)}")
    return rows


def main() -> None:
    parser = arguments((__doc__ or "").splitlines()[0])
    parser.add_argument("--suffix", type=int, default=20, help="tokens of a hit")
    parser.add_argument("--hits", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--variants", nargs="+", default=["stock", "engine"])
    parser.add_argument("--cache", type=Path, help="keeps the start-up probe's figures")
    by_dtype("profile_forward", parser.parse_args(), HEAD, measure, rows_of)


if __name__ == "__main__":
    main()
