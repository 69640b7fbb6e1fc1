"""What a notebook shows: every value, nothing that could run, no colour of its own."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from pcr_core import Explanation, Result, Timing, Usage
from pcr_core.explain.explanation import Difference, Part
from pcr_core.stats import StoreCounters
from pcr_core.table import as_html, grid_html, quote_html

TIMING = Timing(queue=1.0, load_wait=0.5, prefill=2.5, ttft=4.0, decode=3.0, total=17.0)
USAGE = Usage(1000, 9, {"dram": 256, "ssd": 512})
RESULT = Result("The <b>tide</b>", [1, 2], None, "stop", USAGE, TIMING)
PROMPT = Part("prompt", 0, 100, 0, 64, 0, "text changed", "other <text> was there")
EXPLANATION = Explanation(
    prompt=PROMPT,
    documents=(Part("<ferry>", 10, 40, 0, 30, 0, "reused", ""),),
    chunk_tokens=32,
    difference=Difference(70, "a", "<now>", "then", "after", "after"),
    hints=("move the <date>",),
)
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\0"))


class Page(HTMLParser):
    """Tags must be closed in order; collects them, and the text of each cell."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.cells: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        self._open.append(tag)
        if tag in ("td", "th", "blockquote"):
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.cells[-1] += data


@given(TEXT, TEXT, st.integers())
def test_any_text_comes_back_and_nothing_of_it_is_a_tag(
    name: str, value: str, number: int
) -> None:
    rows = Page(as_html([(name, value)]))
    assert (rows.cells, rows.tags) == ([name, value], {"table", "tr", "th", "td"})
    grid = Page(grid_html(["", value], [[name, number], [value, name]]))
    assert grid.cells == ["", value, name, str(number), value, name]
    quote = Page(quote_html(value))
    assert (quote.cells, quote.tags) == ([value], {"blockquote"})


def test_numbers_stand_at_the_right_and_their_heading_too() -> None:
    cells = re.findall(
        r"text-align:(\w+)[^>]*>([^<]*)<", grid_html(["part", "n"], [["a", 5]])
    )
    assert cells == [("left", "part"), ("right", "n"), ("left", "a"), ("right", "5")]


@pytest.mark.parametrize(
    "shown", [RESULT, EXPLANATION, StoreCounters().snapshot()], ids=type
)
def test_a_theme_chooses_the_colours(shown: Any) -> None:
    page = shown._repr_html_()
    assert Page(page).tags <= {
        "table",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
        "blockquote",
    }
    assert not re.search(r"color|background|font|#[0-9a-f]{3}", page)


def test_a_result_has_its_text_counts_and_times() -> None:
    cells = Page(RESULT._repr_html_()).cells
    assert cells[0] == RESULT.text
    table = dict(zip(cells[1::2], cells[2::2], strict=True))
    assert table == {
        "answer": "9 tokens, at its end",
        "prompt": "1000 tokens, 232 computed",
        "reused": "768 (77%): 0 device, 256 DRAM, 512 SSD",
        "first token": "4000.0 ms after submit",
        "in all": "17.0 s, 1000.0 ms in the queue",
    }


def test_a_result_of_several_answers_shows_each() -> None:
    second = replace(RESULT, text="second", finish_reason="length")
    cells = Page(replace(RESULT, others=(second,))._repr_html_()).cells
    assert cells[:3] == [RESULT.text, "second", "answer"]
    assert "cut at max_tokens" in dict(second.rows())["answer"]


def test_an_explanation_has_a_row_for_each_part() -> None:
    cells = Page(EXPLANATION._repr_html_()).cells
    assert cells[:7] == ["", "tokens", "device", "DRAM", "SSD", "computed", "why"]
    why = "text changed: other <text> was there"
    assert cells[7:14] == ["prompt", "100", "0", "64", "0", "36", why]
    assert cells[14:21] == ["document <ferry>", "30", "0", "30", "0", "0", "reused"]
    rest = dict(zip(cells[21::2], cells[22::2], strict=True))
    assert rest["prompt"] == "100 tokens, 3 full chunks of 32"
    assert "<now>" in rest["  it is"]
    assert rest["hint"] == "move the <date>"
