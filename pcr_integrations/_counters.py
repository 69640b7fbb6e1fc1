"""Counters that show themselves as a table, in terminals and in notebooks."""

from __future__ import annotations

import html
from dataclasses import fields
from typing import Any


class Counters:
    """Base of a dataclass of counters: one line, or one row, for each field."""

    __slots__ = ()

    def __str__(self) -> str:
        rows = self._rows()
        width = max(len(name) for name, _ in rows) + 1
        return "\n".join(f"{name:<{width}}{value}" for name, value in rows)

    def _repr_html_(self) -> str:
        rows = (
            f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>"
            for name, value in self._rows()
        )
        return f"<table>{''.join(rows)}</table>"

    def _rows(self) -> list[tuple[str, str]]:
        own: Any = self
        found = {one.name: getattr(self, one.name) for one in fields(own)}
        return [(k.replace("_", " "), str(v)) for k, v in found.items() if v != ""]
