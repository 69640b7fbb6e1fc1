"""A missing optional dependency, said in words that can be pasted into a shell."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needs_extra(extra: str, package: str) -> Iterator[None]:
    """Turn "no module named ``package``" into an error that names the extra.

    Any other import error passes unchanged: it is a bug, not a missing extra.

    Raises:
        ImportError: If ``package`` (a top-level import name) is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing != package and not missing.startswith(f"{package}."):
            raise
        raise ImportError(
            f'{missing} is not installed; run: pip install "pcr-rag[{extra}]"',
            name=missing,
        ) from error
