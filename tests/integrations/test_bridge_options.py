"""Options of a call: merged, renamed, checked, never dropped."""

from __future__ import annotations

from typing import Any

import pytest

from pcr_core import RequestError
from pcr_integrations._options import read_options

TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
OTHER = {"type": "function", "function": {"name": "other"}}


def test_the_call_wins_over_the_wrapper() -> None:
    options = read_options(
        {"temperature": 0.5, "max_tokens": 7, "stop": ["a"], "timeout": 3},
        {"temperature": 0.0, "stop": ["b"]},
    )
    assert options.params.temperature == 0.0
    assert options.params.max_tokens == 7
    assert options.params.stop == ("b",)
    assert options.timeout == 3.0


def test_none_means_as_the_wrapper_has_it() -> None:
    options = read_options({"max_tokens": 7}, {"max_tokens": None, "tools": None})
    assert options.params.max_tokens == 7
    assert options.tools is None


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        ({"max_new_tokens": 3}, "max_tokens", 3),
        ({"max_completion_tokens": 3}, "max_tokens", 3),
        ({"stop_sequences": ["x"]}, "stop", ("x",)),
        ({"stop": "x"}, "stop", ("x",)),
        ({"seed": 4}, "seed", 4),
        ({"top_p": 0.5}, "top_p", 0.5),
    ],
)
def test_names_of_the_frameworks(given: dict[str, Any], field: str, value: Any) -> None:
    assert getattr(read_options({}, given).params, field) == value


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"temprature": 1}, "unknown call option 'temprature'.*temperature"),
        ({"frobnicate": None}, "unknown call option 'frobnicate'"),
        ({"max_tokens": 1, "max_new_tokens": 2}, "max_tokens was given twice"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": [1]}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"timeout": 0}, "timeout must be above 0"),
        ({"timeout": "soon"}, "timeout is a number"),
        ({"response_format": {"type": "xml"}}, "response_format is"),
        ({"response_format": {"type": "json_schema"}}, "response_format is"),
        ({"tools": [{"name": "add"}]}, "a tool is"),
        ({"tools": [TOOL], "tool_choice": "sub"}, "names no tool; there are: add"),
        ({"tool_choice": "any"}, "without any tools"),
    ],
)
def test_bad_options_are_refused(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        read_options({}, bad)


def test_what_the_framework_passes_for_itself_is_ignored() -> None:
    options = read_options({}, {"run_id": "x"}, ignored=frozenset({"run_id"}))
    assert options.params.max_tokens == 256


@pytest.mark.parametrize(
    ("choice", "names", "required"),
    [
        (None, {"add", "other"}, False),
        ("auto", {"add", "other"}, False),
        ("any", {"add", "other"}, True),
        ("required", {"add", "other"}, True),
        (True, {"add", "other"}, True),
        ("add", {"add"}, True),
        ({"type": "function", "function": {"name": "other"}}, {"other"}, True),
        ({"type": "auto"}, {"add", "other"}, False),
    ],
)
def test_tool_choices(choice: object, names: set[str], required: bool) -> None:
    use = read_options({}, {"tools": [TOOL, OTHER], "tool_choice": choice}).tools
    assert use is not None
    assert use.names == names
    assert use.required is required


@pytest.mark.parametrize("choice", ["none", False])
def test_no_tools_by_choice(choice: object) -> None:
    options = read_options({}, {"tools": [TOOL], "tool_choice": choice})
    assert options.tools is None
