"""``pcr capacity``: what it prints, writes and refuses."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner, Result

from pcr_core import command
from pcr_core.simulator.kv_size import PACKAGED, KvSize
from pcr_core.simulator.rates import Rates

QUICK = ("--requests", 100, "--warm-up", 50, "--documents", 50, "--rate", 0.5)
RATES = ("--prefill", 900, "--prefill", "4096:450", "--ssd-read", "1GB")


def capacity(*arguments: object) -> Result:
    result = CliRunner().invoke(command.app, ["capacity", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


def figures(path: Path, *arguments: object) -> dict:
    capacity(*QUICK, *arguments, "--json", path)
    return json.loads(path.read_text())


def test_the_table_says_what_the_figures_say(tmp_path):
    path = tmp_path / "figures.json"
    output = capacity(*QUICK, *RATES, "--decode-step", 0.04, "--json", path).output
    found = json.loads(path.read_text())
    rows = [line.split("│") for line in output.splitlines() if line.startswith("│")]
    assert [row[1].strip() for row in rows] == [
        "no cache",
        "DRAM only",
        "DRAM + SSD",
        "DRAM without limit",
    ]
    for row, forecast in zip(rows, found["forecasts"], strict=True):
        assert row[2].strip() == f"{forecast['dram_hits']:.1%}"
        assert row[4].strip() == f"{forecast['ttft']['mean'] * 1e3:.0f} ms"
        assert row[7].strip() == f"{forecast['most']:.2f}"
    assert "a prompt of" in output
    assert "times as soon as without the cache" in output.replace("\n", " ")


def test_an_overload_is_named():
    output = capacity(*QUICK, *RATES, "--rate", 50).output
    assert "are too many: the queue grows" in output
    assert "grows" in output.split("no cache")[1].splitlines()[0]


def test_ssd_that_does_not_pay_is_named():
    output = capacity(*QUICK, *RATES, "--ssd-read", "100KB", "--dram", 0).output
    assert "are on SSD but computed" in output


def test_the_model_decides_the_size(tmp_path):
    path = tmp_path / "figures.json"
    assert figures(path, *RATES)["plan"]["kv"] == asdict(PACKAGED)
    half = figures(path, *RATES, "--dtype", "float32")["plan"]["kv"]
    assert half == asdict(replace(PACKAGED, dtype="float32"))
    numbers = ("--layers", 32, "--kv-heads", 8, "--head-dim", 128)
    assert figures(path, *RATES, *numbers)["plan"]["kv"] == asdict(KvSize(32, 8, 128))
    values = {"num_hidden_layers": 4, "num_attention_heads": 2, "head_dim": 8}
    (tmp_path / "config.json").write_text(json.dumps(values))
    from_folder = figures(path, *RATES, "--model", tmp_path)["plan"]["kv"]
    assert from_folder == asdict(KvSize(4, 2, 8, "float32"))


def test_rates_from_a_file_and_over_it(tmp_path):
    saved, path = tmp_path / "rates.json", tmp_path / "figures.json"
    capacity(*QUICK, *RATES, "--save-rates", saved)
    rates = figures(path, "--rates", saved, "--decode-step", 0.5)["plan"]["rates"]
    assert rates == {**json.loads(saved.read_text()), "decode_step": 0.5}
    assert rates["prefill"] == [[0.0, 900.0], [4096.0, 450.0]]


def test_measured_rates(tmp_path, monkeypatch):
    """The measurement itself is tested with an engine."""
    kv, rates = KvSize(2, 1, 16), Rates(prefill=((0, 800),), ssd_read=1e9)
    asked = []

    def measure(config):
        asked.append((config.model, config.dtype))
        return SimpleNamespace(kv=kv, rates=rates)

    fake = SimpleNamespace(measure=measure)
    monkeypatch.setitem(sys.modules, "pcr_core.measuring", fake)
    plan = figures(tmp_path / "f.json", "--measure", "--overhead", 0.1)["plan"]
    assert asked == [(None, "auto")]
    assert plan["kv"] == asdict(kv)
    assert (plan["rates"]["ssd_read"], plan["rates"]["overhead"]) == (1e9, 0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "how fast is the machine? Give --measure"),
        (("--prefill", 900), "read rate is not known"),
        (("--prefill", "fast"), "--prefill is 'fast'; write tokens per second"),
        (("--prefill", "x:9"), "--prefill is 'x:9'"),
        (("--prefill", "0"), "must be pairs of a depth"),
        ((*RATES, "--dram", "much"), "--dram: 'much' is not a size"),
        ((*RATES, "--dram", "1KB"), "dram_bytes is 1000, but one chunk takes"),
        ((*RATES, "--rate", "0"), "rate is 0.0"),
        ((*RATES, "--zipf", "-1"), "zipf is -1.0"),
        ((*RATES, "--per-prompt", "2000"), "cannot have 2000 of 1000 documents"),
        ((*RATES, "--layers", "3"), "go together; give all"),
        ((*RATES, "--layers", "3", "--model", "m"), "give either --model or --layers"),
        ((*RATES, "--model", "missing"), "there is no config.json of 'missing'"),
        ((*RATES, "--dtype", "int8"), "dtype is 'int8'; it must be one of"),
        (("--measure", "--layers", "3"), "--measure runs a model"),
        (("--measure", "--rates", "x.json"), "--measure runs a model"),
        (("--rates", "x.json"), "cannot read rates x.json"),
        ((*RATES, *QUICK, "--json", "no/such/file"), "cannot write no/such/file"),
    ],
)
def test_a_mistake_is_told_in_one_line(capsys, monkeypatch, arguments, message):
    monkeypatch.setattr(sys, "argv", ["pcr", "capacity", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        command.main()
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("pcr: ")
    assert error.count("\n") == 1
    assert message in error
