"""The load test tool: its requests, its clock, its figures."""

from __future__ import annotations

import argparse
import math
import threading
from pathlib import Path
from typing import Any

from examples.benchmarks.load_report import METRICS, draw_plots, percentiles, summary
from examples.benchmarks.load_work import make_arrivals, recipe_for
from examples.benchmarks.report import Run
from examples.benchmarks.serve_load import serve
from pcr_core import Completion, QueueFullError, Result
from pcr_core.result import Timing, Usage
from pcr_core.simulator.workloads import draw

ROOT = Path(__file__).resolve().parents[2]


def by_character(text: str, **_: Any) -> dict[str, list[int]]:
    """A tokenizer: one token per character."""
    return {"input_ids": [ord(character) for character in text]}


def test_prompts_repeat_as_the_stream_does() -> None:
    recipe = recipe_for("W1-mini", 40, 60.0)
    visits, arrivals = draw(recipe, 3), make_arrivals(by_character, recipe, 3)
    assert [one.at for one in arrivals] == [visit.arrival for visit in visits]
    for visit, arrival in zip(visits, arrivals, strict=True):
        assert len(arrival.prompt) == sum(visit.lengths) + recipe.query_tokens
    texts: dict[int, list[int]] = {}
    for visit, arrival in zip(visits, arrivals, strict=True):
        first, second = visit.lengths
        parts = arrival.prompt[:first], arrival.prompt[first : first + second]
        for number, tokens in zip(visit.documents, parts, strict=True):
            assert texts.setdefault(number, tokens) == tokens
    assert len({tuple(tokens[:30]) for tokens in texts.values()}) == len(texts)
    queries = {tuple(one.prompt[-recipe.query_tokens :]) for one in arrivals}
    assert len(queries) == len(arrivals)


class Instant:
    """An engine whose answers are there at once, or never."""

    def __init__(self, *, refuse: int = -1) -> None:
        self.under_way = self.most = self.count = 0
        self._refuse = refuse
        self._lock = threading.Lock()

    def submit(self, prompt: Any, params: Any) -> Completion:
        with self._lock:
            self.count += 1
            if self.count == self._refuse:
                raise QueueFullError("full")
            self.under_way += 1
            self.most = max(self.most, self.under_way)
        completion = Completion()
        threading.Timer(0.02, self._answer, [completion, len(prompt)]).start()
        return completion

    def _answer(self, completion: Completion, length: int) -> None:
        with self._lock:
            self.under_way -= 1
        completion.emit("a")
        timing = Timing(queue=0.25, prefill=0.5, ttft=1.0, decode=1.0, total=2.0)
        usage = Usage(length, 1, {"dram": 30})
        completion.finish(Result("a", [1], None, "stop", usage, timing))


def test_every_request_is_sent_and_counted() -> None:
    recipe = recipe_for("W1-mini", 10, 60.0)
    arrivals = make_arrivals(by_character, recipe, 0)
    engine: Any = Instant(refuse=4)
    served = serve(engine, arrivals, rate=1000.0, output=1, concurrency=2)
    assert engine.count == 10
    assert engine.most <= 2
    assert served.failed == ["full"]
    found = summary(served)
    assert found["ttft"] == dict.fromkeys(METRICS, 1.0)
    assert found["queue"]["P99"] == 0.25
    assert found["service"]["mean"] == 0.75
    assert found["hit_tokens"] == {"device": 0, "dram": 270, "ssd": 0}
    assert found["hit_rate"] == 270 / found["prompt_tokens"]
    assert found["failed"] == 1


def test_percentiles() -> None:
    found = percentiles([float(n) for n in range(101)])
    assert found == {"mean": 50, "P50": 50, "P75": 75, "P90": 90, "P95": 95, "P99": 99}
    assert all(math.isnan(value) for value in percentiles([]).values())


def test_plots_are_pictures(tmp_path: Path) -> None:
    recipe = recipe_for("W1-mini", 3, 60.0)
    arrivals = make_arrivals(by_character, recipe, 0)
    engine: Any = Instant()
    found = summary(serve(engine, arrivals, 1000.0, 1, None))
    runs = [{"cache": "none", "load": n, "rate": n, **found} for n in (1.0, 2.0)]
    options = argparse.Namespace(out=tmp_path, noisy=True)
    with Run("load", options) as run:
        draw_plots(run, runs)
    written = list(tmp_path.glob("load-*.png"))
    assert len(written) == 6
    for path in written:
        assert path.read_bytes().startswith(b"\x89PNG")
