"""Runs notebooks as a kernel does: cell by cell, on a running event loop.

    python notebook_child.py [--share-engines] NOTEBOOK...

Each notebook has a namespace of its own, and the value of a cell's last line is shown.
With ``--share-engines`` equal configurations have one engine in this process, so that
the model is loaded once.
"""

from __future__ import annotations

import ast
import asyncio
import functools
import inspect
import json
import linecache
import sys
import time
import traceback
from pathlib import Path
from typing import Any

SHARE = "--share-engines"


def code_cells(notebook: Path) -> list[str]:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]


async def run_cell(source: str, name: str, namespace: dict[str, Any]) -> None:
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    tree = ast.parse(source, name)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    await _evaluate(tree, "exec", name, namespace)
    if isinstance(last, ast.Expr):
        shown = ast.Expression(last.value)
        show(await _evaluate(shown, "eval", name, namespace))


async def _evaluate(
    tree: ast.AST, mode: str, name: str, namespace: dict[str, Any]
) -> Any:
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    code = compile(tree, name, mode, flags, dont_inherit=True)
    value = eval(code, namespace)
    return await value if code.co_flags & inspect.CO_COROUTINE else value


def show(value: Any) -> None:
    """As text; a display that fails or is empty fails the cell."""
    if value is None:
        return
    say(str(value))
    as_html = getattr(value, "_repr_html_", None)
    if as_html is not None:
        assert as_html()


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


async def run(notebook: Path) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for number, source in enumerate(code_cells(notebook), 1):
        before = time.process_time()
        await run_cell(source, f"{notebook.name}[{number}]", namespace)
        spent = time.process_time() - before
        say(f"\n--- {notebook.name}[{number}] took {spent:.1f} s of CPU")


def main(arguments: list[str]) -> None:
    if SHARE in arguments:
        import pcr_core

        arguments.remove(SHARE)
        pcr_core.Engine = functools.cache(pcr_core.Engine)  # type: ignore
    failed = [argument for argument in arguments if not _passes(Path(argument))]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


def _passes(notebook: Path) -> bool:
    try:
        asyncio.run(run(notebook))
    except Exception:
        traceback.print_exc()
        return False
    return True


if __name__ == "__main__":
    main(sys.argv[1:])
