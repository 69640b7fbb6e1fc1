"""How child processes are run: longest first, and what becomes of one is its test's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.children import Ended, Place, limit_time, run_all

PLACE = {"model": Path("model"), "probes": Path("probes")}


class Item:
    """What is used of a test that pytest has collected."""

    def __init__(
        self, nodeid: str, /, *marks: pytest.MarkDecorator, **params: Any
    ) -> None:
        self.nodeid, self.marks = nodeid, [mark.mark for mark in marks]
        if params:
            self.callspec = SimpleNamespace(params=params)

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next((mark for mark in self.marks if mark.name == name), None)

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.append(mark.mark)


def child(job: Any, seconds: float = 1) -> pytest.MarkDecorator:
    return pytest.mark.child.with_args(job, seconds=seconds)


def run(items: Any) -> Any:
    return run_all(items, iter(lambda: Path("folder"), None), **PLACE)


def test_the_longest_are_begun_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    begun: list[str] = []
    jobs = [
        Item(name, child(lambda place, name: begun.append(name), seconds), name=name)
        for name, seconds in (("short", 1), ("longest", 9), ("long", 5))
    ]
    assert set(run(jobs)) == {"short", "longest", "long"}
    assert begun == ["longest", "long", "short"]


def test_what_is_raised_is_raised_in_the_test_of_that_child() -> None:
    def skipped(place: Place) -> Ended:
        pytest.skip("a package is missing")

    def passed(place: Place) -> Ended:
        return Ended(place, 0, "out", "")

    ended = run([Item("a", child(skipped)), Item("b", child(passed, 7))])
    with pytest.raises(pytest.skip.Exception, match="missing"):
        ended["a"].result()
    assert ended["b"].result().place.seconds == 7


def test_others_and_skipped_tests_have_none() -> None:
    def never(place: Place) -> Ended:
        raise AssertionError

    assert (
        run(
            [
                Item("a"),
                Item("b", child(never), pytest.mark.skip(reason="")),
            ]
        )
        == {}
    )


def test_the_first_may_wait_for_all() -> None:
    items: Any = [Item("a", child(None, 30)), Item("b"), Item("c", child(None, 12))]
    limit_time(items)
    limits = [item.get_closest_marker("timeout") for item in items]
    assert [limit and limit.args for limit in limits] == [(42,), None, (42,)]


def test_a_child_runs_in_its_folder_with_one_thread(tmp_path: Path) -> None:
    place = Place(tmp_path, tmp_path / "models" / "m", tmp_path / "probes", seconds=60)
    place.make_cache(place.folder / "cache")
    code = "import os; print(os.getcwd(), os.environ['OMP_NUM_THREADS'], input())"
    ended = place.run_python("-c", code, text="heard")
    assert ended.stdout.split() == [str(tmp_path), "1", "heard"], ended.stderr
    assert (tmp_path / "cache" / "probes").readlink() == place.probes
    assert (tmp_path / "cache" / "models").readlink() == place.model.parent
