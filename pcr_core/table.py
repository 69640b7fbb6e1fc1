"""Tables of names and values, for terminals and for notebooks.

The HTML names no colours and no fonts: a notebook's theme, light or dark, has its own
for tables. All text is escaped.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

Rows = Sequence[tuple[str, str]]

_LEFT = "text-align:left;vertical-align:top"
_RIGHT = "text-align:right;vertical-align:top"


def as_text(rows: Rows) -> str:
    """One line a row; the values stand below each other."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def as_html(rows: Rows) -> str:
    """An HTML table of names and values."""
    cells = "".join(
        f"<tr>{_cell('th', name)}{_cell('td', value)}</tr>" for name, value in rows
    )
    return f"<table>{cells}</table>"


def grid_html(header: Sequence[str], rows: Sequence[Sequence[str | int]]) -> str:
    """An HTML table with a row of headings. Numbers stand at the right of their cells.

    Args:
        header: Heading of each column.
        rows: A cell for each column; the first names the row.
    """
    numbers = {at for row in rows for at, cell in enumerate(row) if type(cell) is int}
    head = "".join(
        _cell("th", text, _RIGHT if at in numbers else _LEFT)
        for at, text in enumerate(header)
    )
    body = "".join(f"<tr>{_cells(row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def quote_html(text: str) -> str:
    """A text of several lines as it stands: line breaks and spaces are kept."""
    style = "white-space:pre-wrap;margin:0.5em 0"
    return f"<blockquote style='{style}'>{html.escape(text)}</blockquote>"


def _cells(row: Sequence[str | int]) -> str:
    name, *values = row
    cells = (
        _cell("td", str(value), _RIGHT if type(value) is int else _LEFT)
        for value in values
    )
    return _cell("th", str(name)) + "".join(cells)


def _cell(tag: str, text: str, style: str = _LEFT) -> str:
    return f"<{tag} style='{style}'>{html.escape(text)}</{tag}>"
