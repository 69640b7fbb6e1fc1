"""The command ``pcr``: what it prints, writes and refuses."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from pcr_core import command
from pcr_core.simulator.contenders import NAMES, USUAL
from pcr_core.simulator.workloads import generate
from pcr_core.trace import TraceWriter

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).resolve().parent.parent
QUICK = ("--policy", "lru", "--policy", "optimum", "--budget", "12")


def simulate(*arguments: object) -> Result:
    result = CliRunner().invoke(command.app, ["simulate", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


def refusal(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    *arguments: object,
) -> str:
    monkeypatch.setattr(sys, "argv", ["pcr", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        command.main()
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """W1-mini as an engine would have recorded it, with chunks of 1 MiB."""
    path = tmp_path / "requests.jsonl"
    writer = TraceWriter(path, chunk_tokens=16, chunk_bytes=2**20, clock=lambda: 1000.0)
    for r in generate("W1-mini").requests:
        writer.record(1000 + r.arrival, r.prompt_tokens, r.output_tokens, r.chunks)
    writer.close()
    return path


def rows_of(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("│")]


def test_every_policy_has_a_row_and_every_budget_a_column():
    output = simulate(
        "--workload", "W1-mini", "--budget", 5, "--budget", "9.5", "--window", "auto"
    ).output
    for name in USUAL:
        assert any(line.startswith(f"│ {name} ") for line in rows_of(output)), name
    assert "lookahead-lru W=auto" in output
    assert "5 requests" in output
    assert "9.5 requests" in output
    assert "A cache without a limit would reuse" in output


def test_the_others_are_shown_when_asked_for():
    others = sorted(set(NAMES) - set(USUAL))
    asked = [option for name in others for option in ("--policy", name)]
    output = simulate("--workload", "W1-mini", "--budget", 5, *asked).output
    for name in ("gdsf", "lfu"):
        assert any(line.startswith(f"│ {name} ") for line in rows_of(output)), name


def test_a_recorded_trace_gives_the_table_of_its_traffic(recorded):
    options = ("--budget", 5, "--budget", 12, "--load", 1.2)
    replayed = rows_of(simulate(recorded, *options).output)
    assert len(replayed) == len(USUAL) + 2
    assert replayed == rows_of(simulate("--workload", "W1-mini", *options).output)


def test_budgets_in_bytes_need_a_recorded_trace(recorded):
    output = simulate(recorded, "--budget", "64MiB", "--policy", "lru").output
    assert "64MiB" in output
    assert "64 chunks" in output


def test_figures_are_written_as_json(tmp_path, recorded):
    path = tmp_path / "figures.json"
    output = simulate(recorded, *QUICK, "--json", path).output
    figures = json.loads(path.read_text())
    assert figures["trace"] == "requests.jsonl"
    assert (figures["requests"], figures["load"]) == (100, 0.9)
    lru, optimum = figures["outcomes"]
    assert (lru["policy"], lru["budget"]) == ("lru", "12 requests")
    assert lru["hit_rate"] == lru["hit_tokens"] / lru["prompt_tokens"]
    assert lru["hit_rate"] < optimum["hit_rate"] <= figures["infinite_reuse"]
    assert f"{100 * lru['hit_rate']:.1f}" in output


def test_a_seed_is_another_stream():
    one, other = (
        rows_of(simulate("--workload", "W1-mini", "--seed", seed, *QUICK).output)
        for seed in (1, 2)
    )
    assert one != other


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either the file of a recorded trace, or --workload"),
        (["--workload", "W3"], "no workload 'W3'; there are: W1, W2"),
        (["missing.jsonl"], "cannot read the trace missing.jsonl: No such file"),
        (["x", "--workload", "W1"], "give either the file"),
        (["--workload", "W1-mini", "--budget", "2GiB"], "how many bytes a chunk has"),
        (["--workload", "W1-mini", "--budget", "lots"], "'lots' is no budget; write"),
        (["--workload", "W1-mini", "--budget", "0"], "must hold at least one"),
        (["--workload", "W1-mini", "--budget", "-3"], "must hold at least one"),
        (["--workload", "W1-mini", "--budget", "nan"], "must hold at least one"),
        (["--workload", "W1-mini", "--budget", "inf"], "must hold at least one"),
        (["--workload", "W1-mini", "--policy", "fifo"], "no policy 'fifo'"),
        (["--workload", "W1-mini", "--window", "0"], "at least 1 request"),
        (["--workload", "W1-mini", "--window", "all"], "a number of requests or auto"),
        (["--workload", "W1-mini", "--load", "0"], "--load"),
    ],
)
def test_a_mistake_is_told_in_one_line(capsys, monkeypatch, arguments, message):
    assert message in refusal(capsys, monkeypatch, "simulate", *arguments)


def test_a_bad_trace_names_its_line(capsys, monkeypatch, recorded):
    with recorded.open("a") as file:
        file.write("hello\n")
    error = refusal(capsys, monkeypatch, "simulate", recorded)
    assert error.startswith("pcr: ")
    assert "line 102" in error


def test_json_that_cannot_be_written_is_said_after_the_table(
    capsys, monkeypatch, tmp_path
):
    target = tmp_path / "no" / "figures.json"
    arguments = ["simulate", "--workload", "W1-mini", *QUICK, "--json", str(target)]
    monkeypatch.setattr(sys, "argv", ["pcr", *arguments])
    with pytest.raises(SystemExit):
        command.main()
    captured = capsys.readouterr()
    assert "optimum" in captured.out
    assert captured.err.startswith("pcr: cannot write ")


def test_version(capsys, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"9.9 of {name}")
    result = CliRunner().invoke(command.app, ["--version"])
    assert result.output == "pcr-rag 9.9 of pcr-rag\n"


def test_alone_it_shows_its_help():
    assert "simulate" in CliRunner().invoke(command.app, []).output


@pytest.mark.parametrize(("patience", "shown"), [(-1.0, True), (3600.0, False)])
def test_a_bar_appears_when_it_takes_long(monkeypatch, patience, shown):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(command, "_PATIENCE", patience)
    result = simulate("--workload", "W1-mini", *QUICK)
    assert ("replaying" in result.stderr) is shown


def test_the_entry_point_is_the_command():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, name = project["scripts"]["pcr"].split(":")
    assert getattr(importlib.import_module(module), name) is command.main


def test_it_loads_no_model_library():
    code = (
        "import sys, pcr_core.command; "
        "print(*{'torch', 'transformers', 'lmdb'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []
