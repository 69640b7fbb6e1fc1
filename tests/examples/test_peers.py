"""The benchmark of our peers: budgets, what each is given, a run of fake systems."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("transformers")

from examples.benchmarks import beside_vllm, children, peer_report, peers
from examples.benchmarks.environments.llama_server import LlamaServer
from examples.benchmarks.kept import Kept
from examples.benchmarks.peer_budget import ROUND, kv_bytes, popular, stretch
from examples.benchmarks.peer_systems import OURS, PEERS, Bench, Launch, Peer, present
from examples.benchmarks.report import Run
from examples.benchmarks.stream import Asked

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENTS = ROOT / "examples" / "benchmarks" / "environments"
# Keeps whole prompts in memory, and in the file that it is given; the token that it
# answers with is the first of the prompt, or one more if it is told to differ.
FAKE = """
import json, pathlib, sys
file, off = pathlib.Path(sys.argv[1]), int(sys.argv[2])
stored = set(map(tuple, json.loads(file.read_text()))) if file.exists() else set()
seen = set()
print(json.dumps({"kind": "fake"}), flush=True)
for line in sys.stdin:
    prompt = tuple(json.loads(line)["prompt"])
    tier = "memory" if prompt in seen else "disk" if prompt in stored else None
    seen.add(prompt)
    if prompt[0] == 13:
        sys.exit("asked to fail")
    print(json.dumps({
        "first": 0.5 if tier else 2.0, "last": 0.5, "tokens": [prompt[0] + off],
        "cached": {tier: len(prompt) - 1} if tier else {},
    }), flush=True)
file.write_text(json.dumps(sorted(seen)))
"""

needs_proc = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="children need /proc"
)


def bench(folder: Path, **others: object) -> Bench:
    return Bench(
        **{
            "model": "m",
            "gguf": Path("m.gguf"),
            "gguf_f32": Path("m.F32.gguf"),
            "dtype": "float32",
            "threads": 2,
            "window": 1152,
            "budget": 3200,
            "working_set": 12_800,
            "token_bytes": 1000,
            "environments": folder / "envs",
            "folder": folder,
            "logs": folder,
            **others,
        }
    )


# --- budgets ---


def test_the_budget_is_a_quarter_of_what_is_asked_about():
    stream = [
        Asked([*range(1000)], 900, "new", 0),
        Asked([*range(1000)], 900, "whole", 900),
        Asked([*range(500, 9100)], 8000, "part", 200),
    ]
    size = stretch(stream, 64)
    assert size.working_set == 1000 + 100 + 8400
    assert size.window > 8600
    assert size.window % ROUND == 0
    assert size.budget == size.window  # a quarter would not hold the longest prompt
    many = [Asked([7] * 100, 90, "new", 0)] * 40
    assert stretch(many, 64).budget == 1000
    assert stretch(many, 500).window > 500


@pytest.mark.parametrize(
    ("fields", "width"), [({"head_dim": 16}, 16), ({}, 8), ({"head_dim": None}, 8)]
)
def test_bytes_of_a_token(fields, width):
    config = SimpleNamespace(
        num_hidden_layers=3,
        num_key_value_heads=2,
        num_attention_heads=4,
        hidden_size=32,
        **fields,
    )
    assert kv_bytes(config, "float32") == 2 * 3 * 2 * width * 4
    assert kv_bytes(config, "bfloat16") == 2 * 3 * 2 * width * 2


def test_probes_are_the_last_requests_for_what_is_asked_for_most():
    rare, often, again = (
        Asked([1, 2, 8], 2, "new", 0),
        Asked([3, 4, 8], 2, "new", 0),
        Asked([3, 4, 9], 2, "whole", 2),
    )
    assert popular([rare, often, again], 1) == [again]
    assert popular([rare, often, again], 5) == [again, rare]


# --- caches kept by hand ---


def test_what_was_not_used_for_longest_goes_first():
    kept: Kept[str] = Kept(10)
    kept.put((1, 2, 3, 4), "a")
    kept.put((5, 6, 7, 8), "b")
    assert kept.take((1, 2, 3, 4)) == "a"  # taken: its user changes it
    assert kept.take((1, 2, 3, 4)) is None
    kept.put((1, 2, 3, 4), "a")
    kept.put((9, 9, 9), "c")
    assert kept.tokens == 7
    assert kept.take((5, 6, 7, 8)) is None
    assert kept.take((1, 2, 3, 4)) == "a"


def test_what_does_not_fit_is_not_kept_and_displaces_nothing():
    kept: Kept[str] = Kept(4)
    kept.put((1, 2), "a")
    kept.put((1, 2, 3, 4, 5), "b")
    assert kept.tokens == 2
    nothing: Kept[str] = Kept(0)
    nothing.put((1,), "a")
    assert nothing.take((1,)) is None


def test_without_a_limit_all_is_kept():
    kept: Kept[int] = Kept()
    for index in range(100):
        kept.put((index, index), index)
    assert kept.tokens == 200


# --- what each system is given ---


def settings(launch: Launch) -> dict:
    return json.loads(launch.command[-1])


@pytest.mark.parametrize("name", PEERS)
def test_every_system_gets_the_model_the_threads_and_a_shown_configuration(
    name, tmp_path
):
    launch = PEERS[name].launch(bench(tmp_path))
    given = settings(launch)
    assert given == launch.settings
    told = json.dumps(given)
    assert '"m"' in told or "m.gguf" in told or "m.F32.gguf" in told
    threads = re.findall(r'"(?:n_)?threads": (\d+)', told)
    assert set(threads) == {"2"} or launch.env["OMP_NUM_THREADS"] == "2"
    if launch.store is not None:
        assert str(launch.store) in told
        assert launch.store.parent == tmp_path


def test_budgets_are_in_each_systems_own_bytes(tmp_path):
    frame = bench(tmp_path)
    given = {name: settings(peer.launch(frame)) for name, peer in PEERS.items()}
    assert given["ours"]["dram_bytes"] == 3200 * 1000
    assert given["transformers"]["kept_tokens"] == 0
    assert given["by hand"]["kept_tokens"] == 3200
    assert given["llama.cpp"]["cache"]["capacity_bytes"] == 3200 * 500  # float16
    assert given["llama.cpp f32"]["cache"]["capacity_bytes"] == 3200 * 1000
    assert given["llama.cpp f32"]["type_k"] == 0
    assert given["vllm"]["num_gpu_blocks_override"] == 3200 // 32 + 1
    own = given["vllm+lmcache"]["vllm"]["num_gpu_blocks_override"]
    assert own == 1152 // 32 + 1
    memory = given["vllm+lmcache"]["lmcache"]["l1-size-gb"] * 2**30
    assert memory == pytest.approx(3200 * 1000 / 0.8, rel=0.1)
    assert given["kvboost"]["engine"]["max_cache_bytes"] == 3200 * 1000
    chunks = given["kvboost"]["engine"]["max_chunks"]
    assert 2 * chunks * 128 > frame.working_set  # its disk holds two times as many


def test_llama_gets_its_bytes_whatever_the_others_dtype_is(tmp_path):
    half = bench(tmp_path, dtype="bfloat16", token_bytes=500)
    for name, size in (("llama.cpp", 500), ("llama.cpp f32", 1000)):
        given = settings(PEERS[name].launch(half))
        assert given["cache"]["capacity_bytes"] == 3200 * size


def test_what_is_not_installed_is_said_and_left_out(tmp_path, capsys):
    found = [peer.name for peer in present([*PEERS], bench(tmp_path))]
    assert found == [OURS, "transformers", "by hand"]
    told = capsys.readouterr().out
    for name in set(PEERS) - set(found):
        assert f"LEFT OUT: {name}: " in told
    assert "`make .bench/lmcache` builds it" in told


def test_llama_is_left_out_without_a_file_for_it(tmp_path, capsys):
    interpreter = tmp_path / "envs" / "llama" / "bin" / "python"
    interpreter.parent.mkdir(parents=True)
    interpreter.touch()
    assert not [*present(["llama.cpp"], bench(tmp_path))]  # its build did not end
    (tmp_path / "envs" / "llama" / "made.stamp").touch()
    assert [*present(["llama.cpp"], bench(tmp_path))]
    assert not [*present(["llama.cpp"], bench(tmp_path, gguf=None))]
    assert "--gguf" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["kvboost", "llama", "lmcache"])
def test_pins_are_exact(name):
    lines = (ENVIRONMENTS / f"{name}.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert pins
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in pins)
    assert not any(line.startswith("torch==") for line in pins)


@pytest.mark.parametrize(
    "module", ["llama_server", "lmcache_server", "kvboost_server", "vllm_server"]
)
def test_servers_need_nothing_of_this_project_to_start(module):
    name = f"examples.benchmarks.environments.{module}"
    done = subprocess.run(
        [sys.executable, "-S", "-m", name, "not json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "JSONDecodeError" in done.stderr  # it was imported and read its settings


class Llama:
    """The part of ``llama_cpp.Llama`` that matters: its calls of its own methods."""

    def __init__(self, verbose: bool, **settings: object) -> None:
        self.context: list[int] = []
        self.states: list[list[int]] = []

    def set_cache(self, cache: list[list[int]]) -> None:
        self.states = cache

    def eval(self, tokens: list[int]) -> None:
        self.context += tokens

    def load_state(self, state: list[int]) -> None:
        self.context = list(state)

    def generate(self, tokens: list[int], **options: object):
        shared = common(self.context, tokens)
        self.context = self.context[:shared]
        self.eval(tokens[shared:])
        yield 7
        self.eval([7])
        yield 8

    def create_completion(self, prompt: list[int], max_tokens: int, **_: object):
        best = max(self.states, key=lambda state: common(state, prompt), default=[])
        if common(best, prompt) > common(self.context, prompt):
            self.load_state(best)
        made: list[int] = []
        for token in self.generate(prompt, temp=0.0):
            made.append(token)
            if len(made) == max_tokens:
                break
        self.states.append([*self.context])


def common(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next(
        (i for i, (a, b) in enumerate(pairs) if a != b), min(map(len, (one, other)))
    )


def test_llama_tells_where_it_found_what(monkeypatch):
    module = SimpleNamespace(
        Llama=Llama,
        LlamaRAMCache=lambda capacity_bytes: [],
        __version__="0",
        llama_print_system_info=lambda: b"AVX2 = 1",
    )
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    server = LlamaServer({"n_ctx": 64, "cache": {"capacity_bytes": 9}})
    assert server.about["built for"] == "AVX2 = 1"
    one, other = [1, 2, 3, 4], [5, 6]
    cold = server.generate(one, 2, 0)
    assert (cold["tokens"], cold["cached"]) == ([7, 8], {})
    assert cold["first"] <= cold["last"]
    assert server.generate([1, 2, 9], 1, 0)["cached"] == {"own context": 2}
    assert server.generate(other, 1, 0)["cached"] == {}
    assert server.generate([*one, 5], 1, 0)["cached"] == {"own memory": 4}


# --- a run ---


class Fresh:
    """Prompts without a corpus."""

    def __init__(self) -> None:
        self._count = 100

    def fresh(self) -> list[int]:
        self._count += 1
        return [self._count, *range(40)]

    short = fresh


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Start fake systems by name; the machine may be as busy as it likes."""
    monkeypatch.setattr(children, "CALM", 0.01)
    monkeypatch.setattr(beside_vllm, "CALM", 1000.0)
    begun = []

    def one(name: str, off: int = 0) -> peers.System:
        store = tmp_path / f"{name}-store"
        command = [sys.executable, "-c", FAKE, str(store / "kept"), str(off)]
        launch = Launch(command, {}, {"off": off}, store)
        system = peers.System(Peer(name, "fake", lambda _: launch), bench(tmp_path))
        system.figures["run"] = 1.0
        begun.append(system)
        return system

    yield one
    for system in begun:
        system.end()


STREAM = [
    Asked([5, *range(9)], 9, "new", 0),
    Asked([6, *range(9)], 9, "part", 1),
    Asked([5, *range(9)], 9, "whole", 10),
]


@needs_proc
def test_a_run_of_two_systems(fake, tmp_path, capsys):
    ours, other = fake(OURS), fake("other", off=1)
    assert peers.run_rounds([ours, other], Fresh(), 2) == [ours, other]
    for system in (ours, other):
        peers.run_stream(system, STREAM)
        peers.run_restart(system, STREAM[:2])
    rounds = other.figures["rounds"]
    assert [one["cold"]["seconds"] for one in rounds] == [2.0, 2.0]
    assert [one["hit"]["cached"] for one in rounds] == [{"memory": 40}] * 2
    tiers = [one["cached"] for one in other.figures["stream"]["requests"]]
    assert tiers == [{}, {}, {"memory": 9}]
    assert other.figures["stream"]["peak"] > 2**20
    after = other.figures["restart"]
    assert [one["cached"] for one in after["requests"]] == [{"disk": 9}] * 2
    assert after["first"] == after["ready"] + 0.5
    assert after["stored"] > 0

    options = argparse.Namespace(out=tmp_path / "out", noisy=True)
    capsys.readouterr()
    with Run("peers", options) as run:
        both = {OURS: ours.figures, "other": other.figures}
        run.figures["float32"] = {"systems": both}
        peer_report.report("float32", run)
    cells = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in capsys.readouterr().out.splitlines()
    ]
    same = "1.00 (1.00-1.00)"
    assert ["other", "2000 (2000-2000)", same, "500 (500-500)", same, "memory",
            "1"] in cells  # fmt: skip
    assert ["other", "nothing", "2", "2000 (2000-2000)", "10"] in cells
    assert ["other", "memory", "1", "500 (500-500)", "1"] in cells
    stream = next(row for row in cells if row[-1:] == ["3 of 3"])
    assert stream[:5] == ["other", "2000 (2000-2000)", "2000 (2000-2000)",
                          "500 (500-500)", "1500"]  # fmt: skip
    assert stream[6] == "30%"
    assert cells[-1][0] == "other"
    assert cells[-1][-3:] == ["500", "500 (500-500)", "disk"]


@needs_proc
def test_a_system_that_fails_is_told_and_leaves_the_others(fake, capsys):
    good, bad = fake("good"), fake("bad")

    def ask(system: peers.System) -> None:
        with system.child.turn():
            system.ask([13 if system is bad else 5, 1], 1)

    assert peers.survivors([bad, good], ask) == [good]
    assert "asked to fail" in bad.figures["failed"]
    told = capsys.readouterr().out
    assert "FAILED: bad" in told


@needs_proc
def test_a_prompt_that_is_not_fresh_ends_a_system(fake):
    class Stale(Fresh):
        def fresh(self) -> list[int]:
            return [5, *range(40)]

    system = fake("good")
    assert peers.run_rounds([system], Stale(), 2) == []
    assert "fresh prompt" in system.figures["failed"]


def test_no_ratios_between_runs():
    def one(name: str, run: float) -> dict:
        work = {"seconds": 1.0, "cached": {}, "computed": 1}
        return {"run": run, "rounds": [{"cold": work, "hit": work}]}

    together = {OURS: one(OURS, 1.0), "other": one("other", 1.0)}
    apart = {OURS: one(OURS, 1.0), "other": one("other", 2.0)}
    assert peer_report.round_rows(together)[1][2] == "1.00 (1.00-1.00)"
    assert peer_report.round_rows(apart)[1][2] == ""


@pytest.mark.slow
def test_ours_and_transformers_run(smollm2_dir, tmp_path):
    command = [
        *(sys.executable, "-m", "examples.benchmarks.peers"),
        *("--model", str(smollm2_dir), "--systems", OURS, "by hand"),
        *("--rounds", "1", "--tokens", "300", "--requests", "3", "--probes", "2"),
        *("--out", str(tmp_path), "--noisy"),
    ]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    systems = json.loads((tmp_path / "peers.json").read_text())["figures"]["float32"]
    after = systems["systems"][OURS]["restart"]
    assert after["requests"][0]["cached"]["ssd"] > 0
