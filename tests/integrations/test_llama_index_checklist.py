"""The checklist in docs/integrations-llama-index.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
PAGE = TESTS.parent / "docs" / "integrations-llama-index.md"
_ROW = re.compile(r"^\| (\d+) \|(.*)\|$", re.MULTILINE)
_TEST = re.compile(r"`([\w/]+\.py)(?:::(\w+))?`")


def rows() -> dict[int, str]:
    return {int(n): row for n, row in _ROW.findall(PAGE.read_text(encoding="utf-8"))}


def test_every_point_is_there() -> None:
    assert sorted(rows()) == list(range(1, 35))


def test_every_named_test_exists() -> None:
    named = [found for row in rows().values() for found in _TEST.findall(row)]
    assert len(named) > 40
    missing = [
        f"{file}::{name}"
        for file, name in named
        if f"def {name or 'test_'}" not in (TESTS / file).read_text(encoding="utf-8")
    ]
    assert not missing
