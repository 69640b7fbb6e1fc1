"""``pcr_integrations.langchain`` as a package: names, types, docs, checklist."""

from __future__ import annotations

import ast
import doctest
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

import pcr_integrations
from pcr_integrations import langchain

MakeEngine = Callable[..., Any]
HERE = Path(__file__).parent
PAGE = HERE.parent.parent / "docs" / "integrations-langchain.md"
MODELS = ["ChatPCR", "PCRLLM"]
# What the retriever's adapters hold.
OF_THE_RETRIEVER = {4, 31}


def test_names_types_and_version() -> None:
    assert set(MODELS) <= set(langchain.__all__)
    assert sorted(langchain.__all__) == sorted(set(langchain.__all__))
    assert all(hasattr(langchain, name) for name in langchain.__all__)
    assert resources.files("pcr_integrations").joinpath("py.typed").is_file()
    assert re.match(r"\d", pcr_integrations.__version__)


@pytest.mark.parametrize("name", langchain.__all__)
def test_everything_public_is_documented(name: str) -> None:
    public = getattr(langchain, name)
    assert public.__doc__
    for member, value in vars(public).items():
        if callable(value) and not member.startswith("_"):
            assert value.__doc__, f"{name}.{member}"


@pytest.mark.parametrize("name", MODELS)
def test_examples_in_docstrings_run(make_engine: MakeEngine, name: str) -> None:
    model = getattr(langchain, name)
    engine = make_engine(reply='{"name": "Paris"}')
    scope = {name: lambda **settings: model(engine=engine, **settings)}
    examples = doctest.DocTestParser().get_examples(model.__doc__)
    assert len(examples) > 1
    for example in examples:
        exec(example.source, scope)
    assert engine.submitted


OFFLINE = """
import sys
from pcr_integrations.langchain import ChatPCR
llm = ChatPCR(model=sys.argv[1], cache_dir=sys.argv[2], max_tokens=2, ssd_bytes=0,
              dram_bytes="8MiB", chunk_tokens=16, overlap="none")
assert not {"torch", "transformers"} & set(sys.modules)
llm.bind_tools([]).with_config(tags=["t"])
assert "torch" not in sys.modules
assert llm.get_num_tokens("hello") == 5
assert llm.invoke("hello").usage_metadata["output_tokens"] == 2
assert llm.profile["max_input_tokens"] == 2048
"""


def test_no_network_from_import_to_answer(tiny_llama_dir: Path, tmp_path: Path) -> None:
    """Children have no Internet sockets: see ``tests/no_network``."""
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE, str(tiny_llama_dir), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]


# --- the checklist's page ---


def rows() -> dict[int, list[str]]:
    """Point by point: the tests that docs/integrations-langchain.md names."""
    found = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if match := re.match(r"\| (\d+) \|.*\|([^|]*)\|$", line):
            found[int(match[1])] = re.findall(r"`([^`]+)`", match[2])
    return found


@cache
def existing() -> set[str]:
    """``file::name`` of every test function and class of this folder."""
    found = set()
    for file in HERE.glob("test_*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(f"{file.stem.removeprefix('test_')}::{node.name}")
    return found


def test_every_point_has_a_row() -> None:
    assert set(rows()) == set(range(1, 36))


@pytest.mark.parametrize("point", sorted(set(range(1, 36)) - OF_THE_RETRIEVER))
def test_the_tests_of_a_point_exist(point: int) -> None:
    named = {name for name in rows()[point] if "::" in name}
    assert named
    assert named <= existing()
