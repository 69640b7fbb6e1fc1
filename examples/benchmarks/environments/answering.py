"""The loop of a system under test: JSON lines in, JSON lines out.

For the servers beside it, each of which runs in an environment of its own, so this
imports the standard library only. The format is described in
``examples/benchmarks/children.py``. What a library prints goes to standard error.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from typing import Any, Protocol, TextIO


class Server(Protocol):
    """One system, one request at a time.

    Attributes:
        about: What it says about itself: versions and settings.
    """

    about: dict[str, Any]

    def generate(
        self, prompt: list[int], max_tokens: int, prefix: int
    ) -> dict[str, Any]:
        """Answer one prompt greedily."""

    def close(self) -> None:
        """Write what is to outlive this process and let go of the rest."""


def private_stdout() -> TextIO:
    """The real standard output, for answers; prints of any library go to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return answers


def serve(server: Server, answers: TextIO) -> None:
    """Tell about ``server``, then answer until standard input ends; close it."""
    about = {**server.about, "python": platform.python_version()}
    print(json.dumps(about), file=answers)
    for line in sys.stdin:
        print(json.dumps(server.generate(**json.loads(line))), file=answers)
    server.close()
