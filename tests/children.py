"""Child processes with the real model, each on one core, side by side.

Such a test names what its child does and the seconds it may take at most, and asks for
what became of it::

    @pytest.mark.child(run_it, seconds=280)  # run_it(place, **parameters of the test)
    def test_it(child: Ended) -> None: ...

The first of them to run waits for the children of all, so that none computes beside
the tests of pytest's own process, whose torch has two threads.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

_MOST = 4  # each has the model in memory


@dataclass(frozen=True)
class Place:
    """What one child finds.

    Attributes:
        folder: Its own; empty at first.
        model: The packaged model, converted.
        probes: What was measured of it, with one thread.
        seconds: How long it may take.
    """

    folder: Path
    model: Path
    probes: Path
    seconds: float

    @property
    def home(self) -> Path:
        """Its home folder."""
        return self.folder / "home"

    def make_cache(self, path: Path) -> None:
        """Make a cache folder in which that model is converted and measured."""
        path.mkdir(parents=True)
        (path / "models").symlink_to(self.model.parent)
        (path / "probes").symlink_to(self.probes)

    def run_python(
        self, *arguments: object, cwd: Path | None = None, text: str = ""
    ) -> Ended:
        """Run Python in ``cwd``, by default its folder, with ``text`` as its input."""
        done = subprocess.run(
            [sys.executable, *map(str, arguments)],
            input=text,
            capture_output=True,
            text=True,
            timeout=self.seconds,
            cwd=cwd or self.folder,
            # One thread: where others compute too, two that wait for each other crawl.
            env={**os.environ, "HOME": str(self.home), "OMP_NUM_THREADS": "1"},
            check=False,
        )
        return Ended(self, done.returncode, done.stdout, done.stderr)


@dataclass(frozen=True)
class Ended:
    """What became of a child."""

    place: Place
    returncode: int
    stdout: str
    stderr: str


def limit_time(items: Iterable[pytest.Item]) -> None:
    """Children have limits of their own, and the first test waits for all of them."""
    waiting = _jobs(items)
    together = sum(job.kwargs["seconds"] for job in waiting.values())
    for item in waiting:
        item.add_marker(pytest.mark.timeout(together))


def run_all(
    items: Iterable[pytest.Item], folders: Iterable[Path], **common: Any
) -> dict[str, Future[Ended]]:
    """Run the children of all these tests, those that may take longest first.

    Args:
        items: Tests; those without a child are passed over.
        folders: An empty one for each child.
        common: Further attributes of their places.

    Returns:
        What became of each, by its test's id. What a child raised, or that it was
        skipped, shows where its result is asked for.
    """
    waiting = _jobs(items)
    longest_first = sorted(waiting, key=lambda item: -waiting[item].kwargs["seconds"])
    with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), _MOST)) as pool:
        ended = {}
        for item, folder in zip(longest_first, folders, strict=False):
            job = waiting[item]
            place = Place(folder, seconds=job.kwargs["seconds"], **common)
            parameters = item.callspec.params if hasattr(item, "callspec") else {}
            ended[item.nodeid] = pool.submit(job.args[0], place, **parameters)
    return ended


def _jobs(items: Iterable[pytest.Item]) -> dict[pytest.Item, pytest.Mark]:
    found = {item: item.get_closest_marker("child") for item in items}
    return {
        item: job
        for item, job in found.items()
        if job is not None and item.get_closest_marker("skip") is None
    }
