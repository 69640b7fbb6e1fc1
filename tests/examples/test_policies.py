"""The policies benchmark: its rows and columns are those of the simulator."""

from __future__ import annotations

import json
import sys

import pytest

from examples.benchmarks import policies


@pytest.fixture
def small(monkeypatch):
    """One small stream for all tables, in this process."""
    row = {("W1-mini", 5, 0.9): policies.EXPECTED["W1", 12, 0.9]}
    monkeypatch.setattr(policies, "EXPECTED", row)
    monkeypatch.setattr(policies, "ALIKE", {"W1-mini": 3})
    monkeypatch.setattr(policies, "STREAMS", ("W1-mini",))
    monkeypatch.setattr(policies, "BUDGETS", (5,))


@pytest.mark.usefixtures("small")
def test_tables_and_figures(capsys, monkeypatch, tmp_path):
    arguments = ["policies", "--seeds", "2", "--jobs", "1", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    policies.main()
    output = capsys.readouterr().out
    rows = [line for line in output.splitlines() if line.startswith("| W1-mini")]
    assert len(rows) == 4  # reuse, the table twice, the engine's policies
    assert "(2.3)!" in rows[1]
    assert rows[3].rstrip(" |").endswith(("ok", "LRU", "behind"))
    figures = json.loads((tmp_path / "policies.json").read_text())["figures"]
    (row,) = figures["table"]
    assert (len(row["seeds"]), len(row["alike"])) == (2, 1)
    assert set(row["alike"][0]) == set(policies.COLUMNS)
    (stream,) = figures["streams"]
    assert set(stream["seeds"][0]) == {"queue", *policies.FIXED, "adaptive W=auto"}


def test_a_figure_more_than_a_point_off_is_marked():
    key = ("W1", 12, 0.90)
    exact = dict(zip(policies.COLUMNS, policies.EXPECTED[key], strict=True))
    assert not any("!" in cell for cell in policies.compared(key, [exact]))
    off = {**exact, "lru": exact["lru"] + 1.1, "queue": 50.0}
    marked = [cell for cell in policies.compared(key, [off]) if "!" in cell]
    assert marked == ["3.4 (2.3)!"]
