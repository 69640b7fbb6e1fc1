"""Small tables of names and values, for terminals and notebooks."""

from __future__ import annotations

import html
from collections.abc import Sequence

Rows = Sequence[tuple[str, str]]


def as_text(rows: Rows) -> str:
    """One line a row; the values stand below each other."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def as_html(rows: Rows) -> str:
    """An HTML table; names and values are escaped."""
    cells = "".join(
        f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
        f"<td>{html.escape(value)}</td></tr>"
        for name, value in rows
    )
    return f"<table>{cells}</table>"
