"""When prefill begins before a search has ended, on a virtual clock."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pcr_core import ConfigError, Document, SamplingParams
from pcr_integrations._background import Worker
from pcr_integrations.speculation import SpeculationStats, Speculator, explicit
from tests.integrations.virtual_engine import Clock, VirtualEngine

WORDS = 4
"""Words of a document, so seconds to compute one."""


def prompt_of(documents: Sequence[str]) -> str:
    words = (f"{one}{i}" for one in documents for i in range(WORDS))
    return " ".join(["head", *words])


@dataclass
class Told:
    """What became of one retrieval and its request."""

    stats: SpeculationStats
    text: str
    seconds: float
    engine: VirtualEngine


def tell(
    stages: Sequence[tuple[float, str]],
    *,
    agreeing: int | None = 2,
    others: Sequence[tuple[float, str]] = (),
    engine: VirtualEngine | None = None,
) -> Told:
    """Search, then ask about what was found.

    Args:
        stages: When each stage ends, and the candidates then, a letter each.
        agreeing: See ``Speculator``; ``None`` for no speculation.
        others: When somebody else asks, and which documents about.
        engine: With its own clock.
    """
    engine = engine or VirtualEngine(Clock())
    clock = engine.clock
    plan = explicit(engine, prompt_of, lambda d: Document(id=d, text=f"{d}0"))
    speculator = Speculator(plan, agreeing=agreeing or 1, post=clock.post)
    speculation = speculator.begin()
    asked: list[Any] = []

    def stage(found: str) -> None:
        if agreeing:
            speculation.stage(found)

    def end(found: str) -> None:
        if agreeing:
            speculation.finish(found)
        prompt = f"{prompt_of(found)} question"
        asked.append(engine.submit(prompt, SamplingParams()))

    for time, found in stages[:-1]:
        clock.at(time, lambda found=found: stage(found))
    clock.at(stages[-1][0], lambda: end(stages[-1][1]))
    for time, found in others:
        clock.at(
            time, lambda found=found: engine.submit(prompt_of(found), SamplingParams())
        )
    clock.run()
    result = asked[0].result(0)
    return Told(speculator.stats, result.text, result.timing.total, engine)


def test_each_new_order_is_prefilled_as_ragcache_does() -> None:
    told = tell([(1, "AB"), (7, "AC"), (30, "AC")], agreeing=1)
    assert told.stats.launched == 2
    assert told.stats.cancelled == told.stats.used == 1
    # B had begun when the order changed: its forward ended, and C came behind it.
    assert told.engine.submitted[:4] == [
        prompt_of("A"), prompt_of("AB"), prompt_of("A"), prompt_of("AC"),
    ]  # fmt: skip
    assert told.stats.wasted_tokens == WORDS
    assert told.stats.computed_tokens == 1 + 3 * WORDS + 1
    assert told.seconds == 31  # the question alone was left to compute


def test_an_order_is_prefilled_once_two_stages_agree() -> None:
    told = tell([(1, "AB"), (2, "AC"), (3, "AC"), (30, "AC")])
    assert told.stats.launched == told.stats.used == 1
    assert told.stats.cancelled == told.stats.wasted_tokens == 0
    assert told.engine.submitted[:2] == [prompt_of("A"), prompt_of("AC")]
    assert told.seconds == 31


def test_the_search_and_the_prefill_overlap() -> None:
    stages = [(1, "AB"), (2, "AB"), (6, "AB")]
    plain, told = tell(stages, agreeing=None), tell(stages)
    assert plain.seconds == 6 + 1 + 2 * WORDS + 1
    # A is computed from 2 to 7, beside the search; the request does the rest.
    assert told.seconds == 7 + WORDS + 1
    assert told.text == plain.text


def test_nothing_is_prefilled_while_the_engine_has_requests() -> None:
    told = tell([(1, "AB"), (2, "AB"), (3, "AB"), (9, "AB")], others=[(0, "XYZ")])
    assert told.stats.launched == 0
    assert told.stats.busy == 2
    assert told.engine.submitted == [prompt_of("XYZ"), f"{prompt_of('AB')} question"]
    assert told.engine.hinted == [prompt_of("AB")]  # costs no compute


def test_a_later_stage_tries_again() -> None:
    told = tell([(1, "A"), (2, "A"), (8, "A"), (20, "A")], others=[(0, "X")])
    assert told.stats.busy == told.stats.launched == told.stats.used == 1


def test_other_requests_come_first_between_two_documents() -> None:
    told = tell([(0, "ABC"), (1, "ABC"), (40, "ABC")], others=[(3, "X")])
    assert told.stats.yielded == 1
    assert told.engine.submitted[:2] == [prompt_of("A"), prompt_of("X")]
    assert told.seconds == 40 + 2 * WORDS + 1  # A was kept


def test_what_a_changed_order_begins_with_is_not_cancelled() -> None:
    told = tell([(0, "AB"), (1, "AB"), (2, "AC")])
    assert told.stats.cancelled == 1
    assert told.stats.used == told.stats.wasted_tokens == 0
    assert told.seconds == 6 + WORDS + 1  # A went on to its end


@pytest.mark.parametrize(
    ("later", "final", "cancelled"),
    [
        ("AB", "AC", False),  # A, which is being computed, is wanted
        ("AC", "AC", False),
        ("CA", "AC", True),  # it was not wanted for a while
        ("AB", "CA", True),
        ("CA", "CA", True),
    ],
)
def test_only_what_is_not_wanted_is_cancelled(
    later: str, final: str, cancelled: bool
) -> None:
    told = tell([(0, "AB"), (1, "AB"), (2, later), (3, final)])
    assert told.engine.submitted[0] == prompt_of("A")
    assert told.engine.completions[0].cancelled is cancelled


def test_a_wrong_first_document_is_waste() -> None:
    told = tell([(0, "A"), (1, "A"), (20, "B")])
    assert told.stats.wasted_tokens == told.stats.computed_tokens == 1 + WORDS
    assert told.stats.cancelled == 1


def test_a_search_that_fails_gives_its_work_up() -> None:
    clock = Clock()
    engine = VirtualEngine(clock)
    speculator = Speculator(explicit(engine, prompt_of), agreeing=1, post=clock.post)

    def fail() -> None:
        with contextlib.suppress(OSError), speculator.begin() as speculation:
            speculation.stage("AB")
            raise OSError("the index is on a disk that has gone")

    clock.at(0, fail)
    clock.run()
    assert engine.submitted == engine.hinted == []
    assert speculator.stats.launched == 0


def test_an_end_within_the_same_moment_starts_nothing() -> None:
    told = tell([(1, "A"), (1, "A"), (1, "A")])
    assert told.stats.launched == 0
    assert told.engine.submitted == [f"{prompt_of('A')} question"]


def test_no_candidates_start_nothing() -> None:
    told = tell([(1, ""), (2, ""), (3, "")])
    assert told.stats == SpeculationStats(searches=1)


def test_what_is_prefilled_is_named_so_that_it_can_be_forgotten() -> None:
    told = tell([(0, "AB"), (1, "AB"), (30, "AB")])
    named = [[one.id for one in documents] for documents in told.engine.documents]
    assert named == [["A"], ["A", "B"], []]


def test_what_is_prefilled_comes_behind_every_request() -> None:
    told = tell([(0, "AB"), (1, "AB"), (30, "AB")])
    assert max(told.engine.priorities[:2]) < told.engine.priorities[2] == 0


@pytest.mark.parametrize("trouble", ["closed", "full", "long", "plan"])
def test_failures_are_counted_and_reach_nobody(
    trouble: str, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    engine = VirtualEngine(
        clock,
        longest=2 if trouble == "long" else 1000,
        most=0 if trouble == "full" else 100,
    )
    engine.closed = trouble == "closed"

    def broken(documents: Sequence[Any]) -> str:
        raise ZeroDivisionError("a caller's mistake")

    plan = explicit(engine, broken if trouble == "plan" else prompt_of)
    speculator = Speculator(plan, agreeing=1, post=clock.post)
    speculation = speculator.begin()
    with caplog.at_level(logging.WARNING):
        clock.at(0, lambda: speculation.stage("AB"))
        clock.at(9, lambda: speculation.stage("B"))
        clock.at(20, lambda: speculation.finish("B"))
        clock.run()
    assert speculator.stats.failed >= 2
    assert speculator.stats.last_error
    assert speculator.stats.computed_tokens == 0
    assert len(caplog.records) == 1  # the first one, and the counter
    assert "answers are not affected" in caplog.text


def test_a_plan_that_knows_nothing_is_counted() -> None:
    clock = Clock()
    speculator = Speculator(lambda documents: None, agreeing=1, post=clock.post)
    speculation = speculator.begin()
    clock.at(0, lambda: speculation.stage("A"))
    clock.at(1, lambda: speculation.finish("A"))
    clock.run()
    assert speculator.stats.unknown == 1  # asked once for hint and prefill
    assert speculator.stats.failed == 0


LETTERS = st.lists(st.sampled_from("ABCD"), unique=True, min_size=1, max_size=3)


@settings(max_examples=150)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 7), LETTERS.map("".join)), min_size=1, max_size=6
    ),
    others=st.lists(
        st.tuples(st.integers(0, 20), LETTERS.map(lambda one: "".join(one).lower())),
        max_size=2,
    ),
    agreeing=st.integers(1, 3),
)
def test_whatever_happens_answers_stay_and_the_delay_is_bounded(
    steps: list[tuple[int, str]], others: list[tuple[int, str]], agreeing: int
) -> None:
    time, stages = 0.0, []
    for wait, found in steps:
        time += wait
        stages.append((time, found))
    plain = tell(stages, agreeing=None, others=others)
    told = tell(stages, agreeing=agreeing, others=others)
    stats = told.stats
    assert told.text == plain.text
    # A request waits for one forward at most, of one document and the head; others
    # that came before it may each have waited, too.
    assert told.seconds <= plain.seconds + (1 + len(others)) * (1 + WORDS)
    assert stats.launched == stats.used + stats.cancelled
    assert 0 <= stats.wasted_tokens <= stats.computed_tokens
    assert stats.failed == 0
    if stats.used and not others:
        assert told.seconds <= plain.seconds


@dataclass
class Ticking:
    """A speculator and a clock; the engine always has nothing to do."""

    lead: float
    now: float = 0.0

    def __post_init__(self) -> None:
        self.speculator = Speculator(
            lambda found: explicit(VirtualEngine(Clock()), prompt_of)(found),
            agreeing=1,
            lead=self.lead,
            post=lambda work: work(),
            clock=lambda: self.now,
        )

    def search(self, *waits: float) -> bool:
        """Whether a search whose stages take so long starts a prefill."""
        before = self.speculator.stats.launched
        with self.speculator.begin() as speculation:
            for wait in waits[:-1]:
                self.now += wait
                speculation.stage("ab")
            self.now += waits[-1]
            speculation.finish("ab")
        return self.speculator.stats.launched > before


def test_nothing_is_started_where_too_little_of_the_search_is_left() -> None:
    ticking = Ticking(lead=1.0)
    assert ticking.search(0.0, 0.9)  # nothing is known of the first one
    assert not ticking.search(0.0, 0.9)
    assert ticking.speculator.stats.late == 1
    assert not ticking.search(0.0, 0.9, 0.0)  # the second stage is a new one, too late
    for _ in range(9):
        ticking.search(0.0, 1.0)
    assert ticking.search(0.0, 0.9)  # by now they are known to take longer
    assert ticking.search(5.0, 0.0, 1.0)


def test_one_long_search_changes_nothing() -> None:
    ticking = Ticking(lead=1.0)
    for _ in range(3):
        ticking.search(0.0, 0.1)
    ticking.search(0.0, 9.0)
    assert not ticking.search(0.0, 0.1)


def test_a_search_that_failed_says_nothing_about_time() -> None:
    ticking = Ticking(lead=1.0)
    search = ticking.speculator.begin()
    search.stage("ab")
    search.__exit__(OSError, OSError("down"), None)
    assert ticking.search(0.0, 0.1)
    assert not ticking.search(0.0, 0.1)


def test_without_lead_it_always_starts() -> None:
    ticking = Ticking(lead=0.0)
    assert all(ticking.search(0.0, 0.0) for _ in range(3))
    assert ticking.speculator.stats.late == 0


@pytest.mark.parametrize(
    "options", [{"agreeing": 0}, {"lead": -0.1}, {"lead": float("nan")}], ids=str
)
def test_bad_settings_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        Speculator(lambda documents: None, **options)


def test_the_counters_can_be_read() -> None:
    stats = SpeculationStats(launched=2, used=1, wasted_tokens=30)
    assert "wasted tokens   30" in str(stats)
    assert "last error" not in str(stats)
    assert "<td>30</td>" in stats._repr_html_()
    failed = SpeculationStats(failed=1, last_error="QueueFullError: <full>")
    assert "QueueFullError: <full>" in str(failed)
    assert "&lt;full&gt;" in failed._repr_html_()
    speculator = Speculator(lambda documents: None)
    assert repr(speculator) == (
        "<Speculator: launched 0, used 0, cancelled 0, 0 tokens wasted>"
    )


def test_the_worker_does_everything_in_order_and_goes() -> None:
    worker, done = Worker("test"), []
    gate = threading.Event()
    worker.post(lambda: gate.wait(60))
    for number in range(50):
        worker.post(lambda number=number: done.append(number))
    gate.set()
    assert worker.wait(60)
    assert done == list(range(50))
    worker.post(lambda: done.append(50))
    assert worker.wait(60)
    assert done[-1] == 50
