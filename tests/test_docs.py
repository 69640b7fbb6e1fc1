"""Every Python block in README.md and docs/ runs as it is printed.

The blocks of a file share one namespace, top to bottom, in a process of its own and in
an empty folder. A block that opens with ```` ```python no-run ```` is only compiled.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.children import Ended, Place

ROOT = Path(__file__).resolve().parent.parent
_BLOCK = re.compile(r"^```python([^\n]*)\n(.*?)^```\s*$", re.DOTALL | re.MULTILINE)
_TAGS = {"", "no-run"}


@dataclass(frozen=True)
class Block:
    """One block: its code stands in its own line of the file, so errors name it."""

    line: int
    tag: str
    code: str


def blocks_of(text: str) -> list[Block]:
    found = []
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start(2)) + 1
        found.append(Block(line, match[1].strip(), match[2]))
    return found


def pages() -> list[Path]:
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in found if page.exists()]


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_there_is_a_readme() -> None:
    if not (ROOT / "README.md").exists():
        pytest.skip("README.md is not written yet")
    assert blocks_of((ROOT / "README.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", pages(), ids=_name)
def test_blocks_compile(page: Path) -> None:
    for block in blocks_of(page.read_text(encoding="utf-8")):
        assert block.tag in _TAGS, f"{_name(page)}:{block.line}: tag {block.tag!r}"
        compile("\n" * (block.line - 1) + block.code, _name(page), "exec")


def _to_run() -> list[Path]:
    return [
        page
        for page in pages()
        if any(not block.tag for block in blocks_of(page.read_text(encoding="utf-8")))
    ]


_RUNNER = """
import sys
for source in sys.stdin.read().split("\\0"):
    exec(compile(source, sys.argv[1], "exec"), globals())
"""


def run_page(place: Place, page: Path) -> Ended:
    """``model=None`` finds the packaged model, converted and measured already.

    In the default folder, and in the one that pages call ``cache``.
    """
    place.make_cache(place.home / ".cache" / "pcr")
    place.make_cache(place.folder / "cache")
    blocks = blocks_of(page.read_text(encoding="utf-8"))
    sources = ["\n" * (b.line - 1) + b.code for b in blocks if not b.tag]
    return place.run_python("-c", _RUNNER, _name(page), text="\0".join(sources))


@pytest.mark.child(run_page, seconds=280)
@pytest.mark.parametrize("page", _to_run(), ids=_name)
def test_blocks_run(page: Path, child: Ended) -> None:
    assert child.returncode == 0, f"{_name(page)}: {child.stderr[-3000:]}"


def test_blocks_are_found() -> None:
    text = "a\n```python\nx = 1\n```\n```python no-run\ny\n```\n```bash\nls\n```\n"
    assert blocks_of(text) == [Block(3, "", "x = 1\n"), Block(6, "no-run", "y\n")]
