"""Tables and a plot of what ``peers.py`` has measured; knows figures only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from examples.benchmarks.common import Spread, ratios
from examples.benchmarks.peer_systems import OURS
from examples.benchmarks.report import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = ("new", "part", "whole")
NOTHING = "nothing"
MIB = 2**20

ROUNDS_HEAD = ("system", "cold, ms", "ours / its", "hit, ms", "ours / its",
               "found in", "tokens computed")  # fmt: skip
STREAM_HEAD = ("system", "TTFT new, ms", "part, ms", "whole, ms", "mean, ms", "all, s",
               "reused", "peak MiB", "other first token")  # fmt: skip
TIERS_HEAD = ("system", "found in", "requests", "TTFT, ms", "tokens computed")
RESTART_HEAD = ("system", "stored MiB", "ready, s", "start to first token, s",
                "TTFT, ms", "further, ms", "found in")  # fmt: skip

Figures = dict[str, Any]


def report(dtype: str, run: Run) -> None:
    """Add all tables and the plot to ``run``."""
    systems = run.figures[dtype]["systems"]
    for name, found in systems.items():
        if "failed" in found:
            print(f"{dtype}: no figures of {name}: it failed")
    whole = {name: found for name, found in systems.items() if "restart" in found}
    if not whole:
        return
    run.table(ROUNDS_HEAD, round_rows(whole), f"{dtype}: one prompt, cold and hit")
    run.table(STREAM_HEAD, stream_rows(whole), f"{dtype}: the stream")
    run.table(TIERS_HEAD, tier_rows(whole), f"{dtype}: the stream, by tier")
    run.table(RESTART_HEAD, restart_rows(whole), f"{dtype}: after a restart")
    run.plot(f"stream-{dtype}", lambda figure: draw(figure, whole))


def round_rows(systems: Figures) -> list[list[str]]:
    """Cold and hit; ratios only where ours was measured in the same rounds."""
    rows = []
    ours = systems.get(OURS)
    for name, found in systems.items():
        row = [name]
        together = ours is not None and ours["run"] == found["run"]
        for work in ("cold", "hit"):
            its = [one[work]["seconds"] for one in found["rounds"]]
            row.append(Spread.of(its).ms() if its else "-")
            if ours is None or not together or not its or name == OURS:
                row.append("")
                continue
            mine = [one[work]["seconds"] for one in ours["rounds"]]
            row.append(ratios(mine, its).ratio() if len(mine) == len(its) else "")
        last = found["rounds"][-1]["hit"] if found["rounds"] else None
        row += [place(last["cached"]), str(last["computed"])] if last else ["-", "-"]
        rows.append(row)
    return rows


def stream_rows(systems: Figures) -> list[list[str]]:
    """TTFT by kind of request, time of all, what was reused, memory, agreement."""
    rows = []
    for name, found in systems.items():
        asked = found["stream"]["requests"]
        row = [name]
        for kind in KINDS:
            row.append(ms(one["seconds"] for one in asked if one["kind"] == kind))
        row.append(f"{1e3 * sum(one['seconds'] for one in asked) / len(asked):.0f}")
        row.append(f"{sum(one['wall'] for one in asked):.1f}")
        row.append(f"{share_reused(asked):.0%}")
        row.append(f"{found['stream']['peak'] / MIB:.0f}")
        rows.append([*row, differing(systems, name)])
    return rows


def tier_rows(systems: Figures) -> list[list[str]]:
    """TTFT in the stream by where the prefix was found."""
    rows = []
    for name, found in systems.items():
        groups: dict[str, list[Figures]] = {}
        for one in found["stream"]["requests"]:
            groups.setdefault(place(one["cached"]), []).append(one)
        for tier, some in sorted(groups.items()):
            computed = sum(one["computed"] for one in some) / len(some)
            seconds = ms(one["seconds"] for one in some)
            rows.append([name, tier, str(len(some)), seconds, f"{computed:.0f}"])
    return rows


def restart_rows(systems: Figures) -> list[list[str]]:
    """From the start of a new process to the first token of a repeated prompt."""
    rows = []
    for name, found in systems.items():
        after = found["restart"]
        first, *further = after["requests"]
        rows.append(
            [
                name,
                f"{after['stored'] / MIB:.0f}",
                f"{after['ready']:.1f}",
                f"{after['first']:.1f}",
                f"{1e3 * first['seconds']:.0f}",
                ms(one["seconds"] for one in further),
                place(first["cached"]),
            ]
        )
    return rows


def place(cached: dict[str, int]) -> str:
    """Where tokens were found, by name; of several places the names together."""
    return " + ".join(sorted(cached)) or NOTHING


def ms(seconds: Iterable[float]) -> str:
    sample = list(seconds)
    return Spread.of(sample).ms() if sample else "-"


def share_reused(asked: Sequence[Figures]) -> float:
    """Share of all prompt tokens that did not go through the model."""
    found = sum(sum(one["cached"].values()) for one in asked)
    return found / (found + sum(one["computed"] for one in asked))


def differing(systems: Figures, name: str) -> str:
    """How many first tokens of the stream are not those of our engine."""
    if OURS not in systems or name == OURS:
        return ""
    ours = [one["token"] for one in systems[OURS]["stream"]["requests"]]
    its = [one["token"] for one in systems[name]["stream"]["requests"]]
    if len(ours) != len(its):
        return "another stream"
    return f"{sum(a != b for a, b in zip(ours, its, strict=True))} of {len(its)}"


def draw(figure: Figure, systems: Figures) -> None:
    """Share of the stream's requests that had their first token by then."""
    axes = figure.subplots()
    for name, found in systems.items():
        seconds = sorted(one["seconds"] for one in found["stream"]["requests"])
        share = [(index + 1) / len(seconds) for index in range(len(seconds))]
        axes.step([1e3 * value for value in seconds], share, where="post", label=name)
    axes.set_xscale("log")
    axes.set_xlabel("time to first token, ms")
    axes.set_ylabel("share of the requests")
    axes.legend(fontsize="small")
