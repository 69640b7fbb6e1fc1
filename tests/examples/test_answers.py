"""What the demo reports is what its answers say."""

from __future__ import annotations

import dataclasses
import io

import pytest

pytest.importorskip("rich")

from rich.console import Console

from examples.answers import GROUPS, Answer, differing, group_of, summarize
from examples.report import live_table, summary_table


def answer(question="q", *, dram=0, ssd=0, computed=0, ttft=0.1, text="a") -> Answer:
    return Answer(
        framework="LangChain",
        question=question,
        text=text,
        prompt_tokens=dram + ssd + computed,
        dram=dram,
        ssd=ssd,
        computed=computed,
        ttft=ttft,
    )


@pytest.mark.parametrize(
    ("dram", "ssd", "computed", "group"),
    [
        (0, 0, 1000, GROUPS[0]),
        (128, 0, 900, GROUPS[0]),
        (500, 0, 500, GROUPS[1]),
        (200, 300, 500, GROUPS[2]),
        (980, 0, 20, GROUPS[3]),
        (100, 880, 20, GROUPS[4]),
    ],
)
def test_groups_by_share_and_tier(dram, ssd, computed, group):
    assert group_of(answer(dram=dram, ssd=ssd, computed=computed)) == group


def test_the_summary_compares_each_prompt_with_itself():
    answers = [
        answer("a", dram=990, computed=10, ttft=0.1),
        answer("b", dram=980, computed=20, ttft=0.2),
        answer("c", dram=970, computed=30, ttft=0.6),
        answer("d", computed=1000, ttft=1.0),
        answer("not compared", dram=990, computed=10, ttft=9.0),
    ]
    uncached = {
        a.question: dataclasses.replace(a, dram=0, computed=1000, ttft=1.2)
        for a in answers[:4]
    }
    cold, warm = summarize(answers, uncached)
    assert cold["reused"] == GROUPS[0]
    assert cold["requests"] == 1
    assert cold["times_sooner"] == 1.2
    assert warm["reused"] == GROUPS[3]
    assert warm["requests"] == 3
    assert warm["computed_tokens"] == 20
    assert warm["ttft_ms"] == 200.0
    assert warm["ttft_ms_mean"] == 300.0
    assert warm["ttft_ms_uncached"] == 1200.0
    assert warm["times_sooner"] == 6.0


def test_an_answer_that_differs_is_found():
    uncached = {"a": answer("a", text="yes"), "b": answer("b", text="no")}
    same, other = answer("a", text="yes"), answer("b", text="no.")
    unknown = answer("c", text="?")
    assert differing([same, other, unknown], uncached) == [other]


def test_every_answer_is_a_line():
    console = Console(width=120, record=True, file=io.StringIO())
    with live_table(console, "title", 2) as show:
        show(answer("Who?", dram=7, ssd=8, computed=9, ttft=0.0421, text="He\ndid."))
        show(answer("x" * 500))
    text = console.export_text()
    assert "title" in text
    (line,) = (row for row in text.splitlines() if "Who?" in row)
    assert line.split() == ["1", "LangChain", "Who?", "He", "did.", "42", "7", "8", "9"]
    assert max(map(len, text.splitlines())) <= 120


def test_the_summary_is_a_table():
    answers = [answer("a", dram=990, computed=10, ttft=0.1)]
    records = summarize(answers, {"a": answer("a", computed=1000, ttft=0.5)})
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(summary_table(records))
    text = console.export_text()
    assert GROUPS[3] in text
    assert "100 (100)" in text
    assert "5.0 x" in text
