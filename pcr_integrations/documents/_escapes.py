"""What a string would be without the escapes of JSON or of a printed Python string."""

from __future__ import annotations

import re

_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}"
    r"|x[0-9a-fA-F]{2}|.)",
    re.DOTALL,
)
_SHORT = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}


def unescaped(string: str) -> str:
    """Resolve every escape once. What is none loses its backslash."""
    return _ESCAPE.sub(_character, string)


def _character(match: re.Match[str]) -> str:
    escape = match[0][1:]
    if len(escape) == 1:
        return _SHORT.get(escape, escape)
    try:
        if len(escape) == 11:  # a character beyond the first 65,536, in two halves
            high, low = int(escape[1:5], 16), int(escape[7:], 16)
            return chr(0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00))
        return chr(int(escape[1:], 16))
    except ValueError:
        return match[0]
