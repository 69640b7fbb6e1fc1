"""The benchmarks run and print their tables; what they measure is not checked here."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from examples.benchmarks import all as everything
from examples.benchmarks import noise
from examples.benchmarks.all import EXPERIMENTS, Experiment, command
from examples.benchmarks.noise import CALM, Noise, Watch
from examples.benchmarks.proc import TICK, busy, tree_busy
from examples.benchmarks.report import Run

ROOT = Path(__file__).resolve().parents[2]
LOUD, QUIET = Noise([CALM + 1] * 5), Noise([0.0] * 5)


def options(folder: Path, **others: object) -> argparse.Namespace:
    return argparse.Namespace(**{"out": folder / "out", "noisy": False, **others})


@pytest.fixture
def seen(monkeypatch):
    """Decide what a watch has seen."""

    def decide(noise: Noise) -> None:
        monkeypatch.setattr(Watch, "start", lambda self: None)
        monkeypatch.setattr(Watch, "end", lambda self: noise)

    return decide


def written(folder: Path) -> dict:
    return json.loads((folder / "out" / "name.json").read_text())


def test_a_calm_run_prints_its_tables(tmp_path, capsys, seen):
    seen(QUIET)
    with Run("name", options(tmp_path, threads=1)) as run:
        run.figures["a"] = {"seconds": [1.0]}
        run.table(("what", "ms"), [["a", "1000"]], "a title")
    told = capsys.readouterr().out
    assert "a title" in told
    assert "| a    | 1000 |" in told
    found = written(tmp_path)
    assert found["figures"] == {"a": {"seconds": [1.0]}}
    assert found["machine"]["threads"] == 1
    assert found["noise"] == {"cores": [0.0] * 5}
    assert found["tables"] == [
        {"title": "a title", "head": ["what", "ms"], "rows": [["a", "1000"]]}
    ]


def test_a_disturbed_run_says_so_instead(tmp_path, capsys, seen):
    seen(LOUD)
    run = Run("name", options(tmp_path)).__enter__()
    run.figures["a"] = 1
    run.table(("what", "ms"), [["a", "1000"]])
    with pytest.raises(SystemExit) as ended:
        run.__exit__(None, None, None)
    assert ended.value.code == everything.DISTURBED
    told = capsys.readouterr().out
    assert "withheld" in told
    assert "1000" not in told
    assert written(tmp_path)["figures"] == {"a": 1}
    assert not Noise(**written(tmp_path)["noise"]).calm


@pytest.mark.parametrize("by", ["option", "vouch"])
def test_figures_that_hold_are_shown(by, tmp_path, capsys, seen):
    seen(LOUD)
    with Run("name", options(tmp_path, noisy=by == "option")) as run:
        if by == "vouch":
            run.vouch()
        run.table(("what", "ms"), [["a", "1000"]])
    assert "1000" in capsys.readouterr().out


def test_what_was_found_before_an_error_is_kept(tmp_path, capsys, seen):
    seen(QUIET)
    run = Run("name", options(tmp_path)).__enter__()
    run.figures["a"] = 1
    run.save()
    assert written(tmp_path)["noise"] is None
    run.figures["b"] = 2
    run.table(("what",), [["never"]])
    run.__exit__(ValueError, ValueError(), None)
    assert written(tmp_path)["figures"] == {"a": 1, "b": 2}
    assert "never" not in capsys.readouterr().out


def test_a_plot_is_a_picture(tmp_path, seen):
    seen(QUIET)
    with Run("name", options(tmp_path)) as run:
        run.plot("curve", lambda figure: figure.subplots().plot([1, 2], [3, 4]))
    assert (tmp_path / "out/name-curve.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_there_is_no_plot(tmp_path, capsys, seen, monkeypatch):
    seen(QUIET)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with Run("name", options(tmp_path)) as run:
        run.plot("curve", lambda figure: pytest.fail("drawn"))
    assert "pip install matplotlib" in capsys.readouterr().out


def test_a_few_disturbed_windows_do_not_count():
    assert Noise().calm
    assert Noise([CALM] * 100).calm
    assert Noise([0.0] * 9 + [2.0]).calm
    assert not Noise([0.0] * 8 + [2.0] * 2).calm


def test_own_work_is_told_from_the_work_of_others(monkeypatch):
    """On a fake clock and fake counters: 2 cores busy, of which we run 1.5."""
    ticks = iter(range(10**6))

    def now() -> tuple[float, int, int]:
        at = next(ticks)
        return float(at), 2 * TICK * at, int(1.5 * TICK * at)

    monkeypatch.setattr(noise, "_now", now)
    monkeypatch.setattr(noise, "WINDOW", 0.001)
    watch = Watch()
    watch.start()
    while len(watch._noise.cores) < 3:
        time.sleep(0.001)
    assert watch.end().cores[:3] == [0.5] * 3


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="needs /proc")
def test_what_children_run_is_our_own():
    before = tree_busy(os.getpid())
    spin = "import time\nwhile time.process_time() < 0.3: pass"
    with subprocess.Popen([sys.executable, "-c", spin]):
        pass  # ended and waited for: the kernel counts it for us
    assert tree_busy(os.getpid()) - before >= 0.25 * TICK
    assert busy([os.getpid()]) >= 0
    assert busy([2**30]) == 0  # nobody


def test_every_experiment_is_in_the_docs():
    told = (ROOT / "docs" / "benchmarks.md").read_text()
    missing = [e.name for e in EXPERIMENTS if f"benchmarks.{e.name}" not in told]
    assert not missing


def test_every_benchmark_is_an_experiment():
    """A module with a ``main`` is a command, and all commands are in the list."""
    folder = ROOT / "examples" / "benchmarks"
    parts = {"all", "served"}  # the list itself, and what others start
    commands = {
        path.stem for path in folder.glob("*.py") if "__main__" in path.read_text()
    }
    assert commands - parts == {experiment.name for experiment in EXPERIMENTS}


def test_how_an_experiment_is_run(tmp_path):
    asked = argparse.Namespace(
        out=tmp_path, quick=True, noisy=True, model="m", threads=3
    )
    found = command(Experiment("one", "", "--rounds 1"), asked)
    tail = ["--rounds", "1", "--noisy", "--model", "m", "--threads", "3"]
    assert found[1:] == ["-m", "examples.benchmarks.one", "--out", str(tmp_path), *tail]
    assert "--model" not in command(Experiment("one", "", models=False), asked)


def test_one_that_fails_does_not_stop_the_others(tmp_path, capsys, monkeypatch):
    ends = {"good": 0, "bad": 1, "loud": everything.DISTURBED}
    experiments = [Experiment(name, "") for name in ends]
    monkeypatch.setattr(everything, "EXPERIMENTS", experiments)
    monkeypatch.setattr(
        everything,
        "command",
        lambda e, _: [
            *(sys.executable, "-c"),
            f"print('from {e.name}'); raise SystemExit({ends[e.name]})",
        ],
    )
    assert everything.main(["--out", str(tmp_path)]) == 1
    told = capsys.readouterr().out
    rows = [[c.strip() for c in line.split("|")] for line in told.splitlines()]
    assert [row[2] for row in rows if row[1:2] and row[1] in ends] == [
        "done",
        "failed 1",
        "disturbed: no table",
    ]
    assert (tmp_path / "bad.txt").read_text() == "from bad\n"
    assert everything.main(["--out", str(tmp_path), "good"]) == 0


def test_an_unknown_experiment_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        everything.main(["--out", str(tmp_path), "nothing"])
    assert "first_token" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("smollm2_dir")
@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda e: e.name)
def test_it_runs(experiment: Experiment, tmp_path: Path) -> None:
    asked = argparse.Namespace(
        out=tmp_path, quick=True, noisy=True, model=None, threads=None
    )
    done = subprocess.run(
        command(experiment, asked),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "\n| " in done.stdout
    assert json.loads((tmp_path / f"{experiment.name}.json").read_text())["figures"]
