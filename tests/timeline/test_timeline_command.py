"""``pcr timeline``: what it prints, draws and writes, and what it refuses."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from pcr_core import command

TEXT = "The ferry leaves at nine and comes back at five. " * 8  # a token a byte


@pytest.fixture
def prompt(tmp_path: Path) -> Path:
    path = tmp_path / "prompt.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture
def engine_options(tiny_llama_dir: Path, tmp_path: Path) -> list[str]:
    folder = str(tmp_path / "cache")
    return ["--model", str(tiny_llama_dir), "--cache-dir", folder]


def timeline(*arguments: object, text: str | None = None) -> Result:
    result = CliRunner().invoke(
        command.app, ["timeline", *map(str, arguments)], input=text
    )
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


def refusal(capsys, monkeypatch, *arguments: object) -> str:
    monkeypatch.setattr(sys, "argv", ["pcr", "timeline", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        command.main()
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_a_repeated_prompt_is_shown_with_its_hit(prompt, engine_options, tmp_path):
    png, trace = tmp_path / "out.png", tmp_path / "out.json"
    outputs = ("--png", png, "--trace", trace)
    output = timeline(prompt, *engine_options, "--repeat", 2, *outputs).stdout
    assert "393 tokens: 384 reused, 9 computed" in output
    assert "first token" in output
    assert "computing" in output
    assert png.read_bytes().startswith(b"\x89PNG")
    read = json.loads(trace.read_text())
    assert read["otherData"] == {"prompt_tokens": 393, "cached_tokens": 384}
    assert {e["cat"] for e in read["traceEvents"] if "cat" in e} >= {
        "queue",
        "compute",
        "decode",
    }


def test_a_prompt_comes_from_standard_input_and_is_found_on_ssd_again(
    engine_options, tmp_path
):
    options = (*engine_options, "--dtype", "float32", "--max-tokens", 1)
    cold = timeline("-", *options, text=TEXT).stdout
    assert "393 tokens: 0 reused, 393 computed" in cold
    warm = timeline("-", *options, text=TEXT).stdout
    assert "393 tokens: 384 reused, 9 computed" in warm
    assert "SSD reads" in warm
    assert warm.count("(3 intervals of 3 layers)") == 1  # the loads


def test_a_missing_prompt(capsys, monkeypatch, tmp_path):
    error = refusal(capsys, monkeypatch, tmp_path / "nothing.txt")
    assert error.startswith("pcr: cannot read the prompt ")
    assert "No such file" in error
    assert "cannot read the prompt" in refusal(capsys, monkeypatch, tmp_path)


@pytest.mark.parametrize("text", ["", " \n\t\n"])
def test_an_empty_prompt(capsys, monkeypatch, prompt, text):
    prompt.write_text(text)
    assert "is empty" in refusal(capsys, monkeypatch, prompt)
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    assert "the prompt - is empty" in refusal(capsys, monkeypatch, "-")


def test_a_prompt_that_is_no_text(capsys, monkeypatch, prompt):
    prompt.write_bytes(b"\xff\xfe\x00")
    assert "is not UTF-8 text" in refusal(capsys, monkeypatch, prompt)


@pytest.mark.parametrize("option", ["--png", "--trace"])
def test_an_output_that_cannot_be_written_is_told_before_the_model_is_loaded(
    capsys, monkeypatch, prompt, tmp_path, option
):
    monkeypatch.setattr(command, "_measure", None)
    missing = tmp_path / "no" / "out"
    error = refusal(capsys, monkeypatch, prompt, option, missing)
    assert error.startswith(f"pcr: cannot write {missing}: its folder is missing")
    error = refusal(capsys, monkeypatch, prompt, option, tmp_path)
    assert "it is a folder; name a file" in error


def test_an_output_that_fails_later_is_told_after_the_table(
    capsys, monkeypatch, prompt, pipeline
):
    monkeypatch.setattr(command, "_measure", lambda *_: pipeline(2))
    monkeypatch.setattr(command, "_check_output", lambda _: None)
    arguments = ["pcr", "timeline", str(prompt), "--trace", str(prompt / "out")]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as caught:
        command.main()
    captured = capsys.readouterr()
    assert caught.value.code == 2
    assert "first token" in captured.out
    assert captured.err.startswith("pcr: cannot write ")


def test_a_drawing_needs_matplotlib_and_says_so_first(
    capsys, monkeypatch, prompt, tmp_path
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr(command, "_measure", None)
    error = refusal(capsys, monkeypatch, prompt, "--png", tmp_path / "out.png")
    assert 'pip install "pcr-rag[plot]"' in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dtype", "int3"], "dtype"),
        (["--overlap", "all"], "overlap"),
        (["--repeat", "0"], "--repeat"),
        (["--max-tokens", "0"], "--max-tokens"),
        (["--model", " "], "model"),
        (["--cache-dir", "."], "cache_dir"),
    ],
)
def test_a_bad_option_is_named(capsys, monkeypatch, prompt, options, message):
    assert message in refusal(capsys, monkeypatch, prompt, *options)
