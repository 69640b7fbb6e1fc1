"""The notebooks of docs/how_to/: well formed, without outputs, listed, and they run.

They are run in one process with one engine, because loading a model eight times proves
nothing. ``--run-slow`` also runs each alone, with a process and a cache folder for it.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.children import Ended, Place

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "how_to"
CHILD = ROOT / "tests" / "notebook_child.py"
SHARE = "--share-engines"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
CELL_KEYS = {
    "markdown": {"cell_type", "id", "metadata", "source"},
    "code": {"cell_type", "id", "metadata", "source", "execution_count", "outputs"},
}
each = pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)


def load(notebook: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(notebook.read_text(encoding="utf-8"))
    return found


def sources(notebook: Path, kind: str) -> list[str]:
    cells = load(notebook)["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == kind]


def test_there_are_eight() -> None:
    assert len(NOTEBOOKS) == 8


@each
def test_it_is_a_notebook_of_format_4_5(notebook: Path) -> None:
    content = load(notebook)
    assert set(content) == {"cells", "metadata", "nbformat", "nbformat_minor"}
    assert (content["nbformat"], content["nbformat_minor"]) == (4, 5)
    assert content["metadata"]["kernelspec"] == {
        "display_name": "Python 3",
        "language": "python",
        "name": "python3",
    }
    ids = [cell["id"] for cell in content["cells"]]
    assert len(set(ids)) == len(ids)
    for cell in content["cells"]:
        assert set(cell) == CELL_KEYS[cell["cell_type"]]
        assert re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", cell["id"])
        lines = cell["source"]
        assert lines
        assert all(line.endswith("\n") for line in lines[:-1])
        assert not lines[-1].endswith("\n")


@each
def test_it_has_no_outputs_and_names_no_machine(notebook: Path) -> None:
    for cell in load(notebook)["cells"]:
        assert cell.get("outputs", []) == []
        assert cell.get("execution_count") is None
    text = notebook.read_text(encoding="utf-8")
    assert not re.search(r"[\"'\s(](/[a-z]+/|[A-Z]:\\|~/)", text)


@each
def test_it_begins_with_a_title_and_every_cell_compiles(notebook: Path) -> None:
    assert load(notebook)["cells"][0]["source"][0].startswith("# ")
    for source in sources(notebook, "code"):
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        compile(source, notebook.name, "exec", flags, dont_inherit=True)


@each
def test_its_links_lead_somewhere(notebook: Path) -> None:
    for text in sources(notebook, "markdown"):
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
            assert target.startswith("https://") or (FOLDER / target).exists()


@each
def test_the_readme_lists_it(notebook: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"(docs/how_to/{notebook.name})" in readme


@pytest.fixture
def place(tmp_path: Path, smollm2_dir: Path, smollm2_probes: Path) -> Place:
    """Where a notebook can run: ``model=None`` finds the packaged model there."""
    place = Place(tmp_path, smollm2_dir, smollm2_probes, seconds=280)
    place.make_cache(place.home / ".cache" / "pcr")
    return place


def execute(place: Place, *arguments: object) -> str:
    return shown_by(place.run_python(CHILD, *arguments))


def shown_by(child: Ended) -> str:
    assert child.returncode == 0, f"{child.stdout[-3000:]}\n{child.stderr[-3000:]}"
    return child.stdout


def run_notebooks(place: Place) -> Ended:
    place.make_cache(place.home / ".cache" / "pcr")
    return place.run_python(CHILD, SHARE, *NOTEBOOKS)


@pytest.mark.child(run_notebooks, seconds=500)
def test_they_run(child: Ended) -> None:
    shown = shown_by(child)
    for notebook in NOTEBOOKS:
        count = len(sources(notebook, "code"))
        assert shown.count(f"--- {notebook.name}[") == count


@pytest.mark.slow
@each
def test_it_runs_alone_and_again(notebook: Path, place: Place) -> None:
    for _ in range(2):  # the second time, what it asks is on SSD already
        execute(place, notebook)


# --- the child that runs them ---


@pytest.fixture
def bare(tmp_path: Path) -> Place:
    """Where a notebook can run that needs no model."""
    return Place(tmp_path, tmp_path, tmp_path, seconds=60)


def write(path: Path, *cells: str) -> Path:
    content = [{"cell_type": "code", "source": [cell]} for cell in cells]
    path.write_text(json.dumps({"cells": content}), encoding="utf-8")
    return path


def test_cells_share_names_and_a_running_loop(tmp_path: Path, bare: Place) -> None:
    book = write(
        tmp_path / "a.ipynb",
        "import asyncio\nloop = asyncio.get_running_loop()",
        "task = asyncio.create_task(asyncio.sleep(0, 'waited'))\nawait task",
        "assert asyncio.get_running_loop() is loop\ntask.result() + '!'",
    )
    shown = execute(bare, book)
    assert "waited\n" in shown
    assert "waited!\n" in shown


@pytest.mark.parametrize(
    "cell",
    [
        "1 / 0",
        "class Shown:\n    def _repr_html_(self): return 1 / 0\nShown()",
        "await missing()",
    ],
)
def test_a_cell_that_fails_fails_all(tmp_path: Path, bare: Place, cell: str) -> None:
    book = write(tmp_path / "bad.ipynb", "x = 1", cell)
    good = write(tmp_path / "good.ipynb", "print('went on')")
    with pytest.raises(AssertionError, match=r"(?s)went on.*bad\.ipynb\[2\]"):
        execute(bare, book, good)


def test_notebooks_share_no_names(tmp_path: Path, bare: Place) -> None:
    first = write(tmp_path / "a.ipynb", "only_here = 1")
    second = write(tmp_path / "b.ipynb", "'only_here' in globals()")
    assert "False\n" in execute(bare, first, second)
