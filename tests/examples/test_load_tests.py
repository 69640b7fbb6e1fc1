"""The load tests' pure parts: what is compared, what is counted, how slow a disk is."""

from __future__ import annotations

import argparse
import math
import threading
from pathlib import Path
from typing import Any

import pytest

from examples.benchmarks import disk as disks
from examples.benchmarks import reordering, serve_load, windows
from examples.benchmarks.disk import REAL, Disk, disk_name, on_disk
from examples.benchmarks.load_bench import (
    AGAIN,
    Stream,
    again,
    contenders,
    served_in_turn,
)
from examples.benchmarks.load_report import (
    HEAD,
    LATER_HEAD,
    METRICS,
    STEP_HEAD,
    draw_plots,
    figures,
    later_rows,
    paired,
    percentiles,
    rows_of,
    step_rows,
    summary,
)
from examples.benchmarks.load_serving import Answer, Served, serve
from examples.benchmarks.load_systems import DRAM, NONE, PAPER, PREFETCH, SSD
from examples.benchmarks.load_work import make_arrivals, recipe_for
from examples.benchmarks.report import Run
from pcr_core import Completion, EngineConfig, QueueFullError, Result
from pcr_core.result import Timing, Usage
from pcr_core.simulator.workloads import RECIPES, draw
from pcr_core.tiers.store.files import Files

SLOW = Disk.named("30")


def by_character(text: str, **_: Any) -> dict[str, list[int]]:
    """A tokenizer: one token per character."""
    return {"input_ids": [ord(character) for character in text]}


def answer(number: int, ttft: float, queue: float = 0.0, sent: float = 0.0) -> Answer:
    """Of 100 tokens, of which 20 came from DRAM and 30 from SSD."""
    timing = Timing(
        queue=queue, prefill=ttft - queue, ttft=ttft, decode=1.0, total=ttft + 1.0
    )
    usage = Usage(100, 4, {"dram": 20, "ssd": 30})
    return Answer(number, sent, Result("a", [1], None, "stop", usage, timing))


def stream(system: str, *answers: Answer, disk: str = "", seed: int = 0) -> Stream:
    served = Served(10.0, list(answers), [0.25], 0.0, [])
    counted = {"prefetch used": 3, "prefetch late": 2, "recomputed": 1}
    return Stream(system, disk, 1.5, 0.75, seed, served, counted)


# --- the stream ---


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


def test_fewer_requests_are_about_fewer_documents() -> None:
    whole = RECIPES["W1-mini"]
    half = recipe_for("W1-mini", 50, None)
    assert (half.requests, half.documents) == (50, round(whole.documents / 2))
    assert recipe_for("W1-mini", 1, None).documents == 3  # a recipe's least
    assert recipe_for("W1-mini", None, None) == whole


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
    assert [one.number for one in served.answers] == [0, 1, 2, *range(4, 10)]
    found = summary(served)
    assert found["ttft"] == dict.fromkeys(METRICS, 1.0)
    assert found["queue"]["P99"] == 0.25
    assert found["service"]["mean"] == 0.75
    assert found["hit_tokens"] == {"device": 0, "dram": 270, "ssd": 0}
    assert found["hit_rate"] == 270 / found["prompt_tokens"]
    assert found["failed"] == 1


# --- the systems ---


def test_the_papers_systems_are_settings_of_the_engine() -> None:
    for system in PAPER:
        config = EngineConfig(**system.settings)
        assert bool(config.ssd_bytes) == system.disk
        assert (config.lookahead_window == 0) == (system is not PREFETCH)
    assert [system.cache for system in PAPER] == [False, True, True, True, True]


def test_loads_are_outside_and_the_first_system_is_its_own_control() -> None:
    class Bench:
        rounds = 2

        def serve(self, system: Any, disk: Disk, load: float, seed: int) -> Any:
            return load, seed, system.name, str(disk)

    entries = contenders([NONE, SSD, PREFETCH], [Disk(), SLOW])
    bench: Any = Bench()
    found: list[Any] = list(served_in_turn(bench, entries, [0.5, 1.0]))
    turn = [
        ("no cache", "real disk"),
        ("SCCache", "real disk"),
        ("PCR", "real disk"),
        ("SCCache", "disk slowed to 30 MB/s"),
        ("PCR", "disk slowed to 30 MB/s"),
        (AGAIN, "real disk"),
    ]
    expected = [(a, s, *one) for a in (0.5, 1.0) for s in (0, 1) for one in turn]
    assert found == expected
    assert again(DRAM).settings == DRAM.settings


def test_each_system_is_compared_with_the_one_before_it() -> None:
    found = serve_load.steps(PAPER, [SLOW])
    where = f", {SLOW}"
    assert found == [
        ("CCache", "no cache"),
        (f"SCCache{where}", "CCache"),
        (f"+ overlap{where}", f"SCCache{where}"),
        (f"PCR{where}", f"+ overlap{where}"),
        (f"PCR{where}", f"SCCache{where}"),
        (AGAIN, "no cache"),
    ]
    assert serve_load.steps([SSD, PREFETCH], [SLOW])[-1] == (
        f"{AGAIN}{where}",
        f"SCCache{where}",
    )


def test_windows_are_compared_with_the_first() -> None:
    systems = [windows.window(size) for size in (0, 4)]
    assert [s.settings for s in systems] == [
        {"lookahead_window": 0},
        {"lookahead_window": 4},
    ]
    assert windows.steps(systems, [SLOW]) == [
        (f"window 4, {SLOW}", f"window 0, {SLOW}"),
        (f"{AGAIN}, {SLOW}", f"window 0, {SLOW}"),
    ]


def test_orders_are_compared_within_a_cache() -> None:
    systems = [
        reordering.ordered(cache, order, 7)
        for cache in reordering.CACHES
        for order in reordering.ORDERS
    ]
    assert all(EngineConfig(**s.settings).max_overtakes == 7 for s in systems)
    assert reordering.steps(systems, Disk()) == [
        ("DRAM cache_aware", "DRAM fcfs"),
        ("DRAM + SSD cache_aware, real disk", "DRAM + SSD fcfs, real disk"),
        (AGAIN, "DRAM fcfs"),
    ]


def test_overtaking_counts_later_requests_that_began_before() -> None:
    assert reordering.overtaken([0.0, 1.0, 2.0]) == [0, 0, 0]
    assert reordering.overtaken([3.0, 1.0, 4.0, 2.0]) == [2, 0, 1, 0]
    assert reordering.overtaken([]) == []
    served = stream("a", answer(0, 9.0, 5.0, sent=0.0), answer(1, 3.0, 1.0, sent=2.0))
    assert reordering.overtaking(served) == [1, 0]
    (row,) = reordering.overtaking_rows([served])
    assert row[1:4] == ["a", "50%", "0.5"]
    assert row[-1] == "1"
    assert len(row) == len(reordering.OVERTAKING)


# --- the disk ---


def test_a_slow_disk_serves_all_readers_as_one_device(monkeypatch) -> None:
    now = [100.0]
    slept = list[float]()
    monkeypatch.setattr(disks.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(disks.time, "sleep", slept.append)
    disk = Disk(1000.0)
    disk.wait(500)
    disk.wait(250)  # at the same moment: behind the first
    now[0] = 110.0
    disk.wait(100)
    assert slept == pytest.approx([0.5, 0.75, 0.1])
    Disk().wait(10**12)
    assert slept[-1] == 0


def test_disks_have_names() -> None:
    assert [str(Disk.named(name)) for name in (REAL, "30")] == [
        "real disk",
        "disk slowed to 30 MB/s",
    ]
    assert disk_name("2.5") == "2.5"
    for wrong in ("0", "-1", "nan", "inf", "fast"):
        with pytest.raises(ValueError, match=r"number of MB|could not convert"):
            disk_name(wrong)


def test_chunks_are_read_through_the_disk(tmp_path, monkeypatch) -> None:
    path = tmp_path / "chunk"
    path.write_bytes(b"0123456789")
    waited = list[int]()
    disk = Disk()
    monkeypatch.setattr(disk, "wait", waited.append)
    before = Files.preadv, Files.open_read
    with on_disk(disk):
        files, buffer = Files(), bytearray(4)
        handle = files.open_read(path)
        assert files.preadv(handle, [buffer], 3) == 4
        files.close(handle)
    assert buffer == b"3456"
    assert waited == [4]
    assert (Files.preadv, Files.open_read) == before


# --- the report ---


def test_percentiles() -> None:
    found = percentiles([float(n) for n in range(101)])
    assert found == {"mean": 50, "P50": 50, "P75": 75, "P90": 90, "P95": 95, "P99": 99}
    assert all(math.isnan(value) for value in percentiles([]).values())


def test_requests_are_compared_with_themselves() -> None:
    """Also where one of them has no answer in one of the systems."""
    a = [stream("a", answer(0, 1.0), answer(1, 3.0), answer(2, 9.0))]
    b = [stream("b", answer(0, 2.0), answer(2, 3.0))]
    found = paired(a, b, "ttft")
    assert (found.low, found.median, found.high) == (1.125, 1.75, 2.375)
    assert math.isnan(paired(a, [stream("b")], "ttft").median)


def test_tables_have_a_line_for_each_system() -> None:
    streams = [
        stream("a", answer(0, 2.0, 0.5), answer(1, 4.0, 1.5)),
        stream("b", answer(0, 1.0), answer(1, 3.0), disk="real disk"),
        stream("b", answer(0, 3.0), answer(1, 5.0), disk="real disk", seed=1),
    ]
    first, second = rows_of(streams)
    assert first == [
        "1.50", "0.75", "a", "3000", "3000", "3900", "3980", "1000", "1450",
        "2000", "2450", "0.0%", "20.0%", "30.0%", "50.0%",
    ]  # fmt: skip
    assert second[2:4] == ["b, real disk", "3000"]  # both seeds together
    assert len(HEAD) == len(first)
    assert [len(row) for row in later_rows(streams)] == [len(LATER_HEAD)] * 2
    assert later_rows(streams)[1][-3:] == ["6", "4", "2"]
    steps = step_rows([streams[0], streams[1]], [("b, real disk", "a"), ("c", "a")])
    assert steps == [
        ["1.50", "b, real disk ÷ a", "0.67 (0.67-0.67)", "0.62 (0.56-0.69)",
         "0.93 (0.80-1.07)"],
    ]  # fmt: skip
    assert len(STEP_HEAD) == len(steps[0])
    (raw,) = figures([streams[0]])
    assert [one["number"] for one in raw["requests"]] == [0, 1]
    assert raw["requests"][1]["service"] == 2.5


def test_plots_are_pictures(tmp_path: Path) -> None:
    streams = [
        stream("a", answer(0, 2.0, 0.5), answer(1, 4.0, 1.5)),
        stream("window 0", answer(0, 1.0), answer(1, 3.0), disk="real disk"),
        stream(AGAIN, answer(0, 1.0), answer(1, 3.0)),
    ]
    options = argparse.Namespace(out=tmp_path, noisy=True)
    with Run("load", options) as run:
        draw_plots(run, streams)
        run.plot("windows", lambda figure: windows.draw(figure, streams, [0]))
        run.plot("order", lambda figure: reordering.draw(figure, streams))
    written = list(tmp_path.glob("load-*.png"))
    assert len(written) == 8
    for path in written:
        assert path.read_bytes().startswith(b"\x89PNG")
