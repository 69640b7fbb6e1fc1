"""Estimates follow what is measured, and one stray measurement moves them little."""

from __future__ import annotations

import random
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from pcr_core.cost import PrefillTimes, ReadTimes

KNOTS = (0, 16, 64, 256, 1024, 4096)


def forward(cached: int, new: int) -> float:
    """A machine: 5 ms a forward, 0.2 ms a token, attention as much at 6,000 keys."""
    return 5e-3 + 2e-4 * (new + (cached * new + new * new / 2) / 6000)


def taught(
    law: Callable[[int, int], float], points: list[tuple[int, int]], rounds: int
) -> PrefillTimes:
    times = PrefillTimes()
    for _ in range(rounds):
        for cached, new in points:
            times.observe(cached, new, law(cached, new))
    return times


def test_nothing_measured() -> None:
    times = PrefillTimes()
    assert not times.ready
    # Good for comparisons: more work is more time, deeper is more time.
    assert 0 < times.seconds(0, 16) < times.seconds(0, 512) < times.seconds(4096, 512)
    times.observe(0, 0, 1.0)
    times.observe(0, 16, 0.0)
    assert not times.ready
    times.observe(0, 16, 1e-2)
    assert times.ready


@pytest.mark.parametrize("cached", [0, 300, 5000])
def test_the_first_measurement_scales_everything(cached: int) -> None:
    times, blank = PrefillTimes(), PrefillTimes()
    times.observe(cached, 256, 3.0)
    assert times.seconds(cached, 256) == pytest.approx(3.0, rel=0.05)
    ratio = times.seconds(0, 1024) / blank.seconds(0, 1024)
    assert times.seconds(9000, 100) / blank.seconds(9000, 100) == pytest.approx(ratio)


def test_exact_where_it_is_measured() -> None:
    points = [(a, b) for a in KNOTS for b in KNOTS[1:]]
    times = taught(forward, points, 40)
    for cached, new in points:
        assert times.seconds(cached, new) == pytest.approx(forward(cached, new), 1e-3)


@settings(max_examples=25)
@given(
    st.tuples(*[st.floats(1e-7, 1e-3)] * 4),
    st.integers(64, 4096),
    st.integers(64, 4096),
)
def test_bilinear_between_grid_points(
    terms: tuple[float, ...], cached: int, new: int
) -> None:
    """Where T = a + b cached + c new + d cached new, the grid is exact in its cells."""
    a, b, c, d = terms

    def bilinear(x: int, y: int) -> float:
        return a + b * x + c * y + d * x * y

    times = PrefillTimes()
    for x in KNOTS[2:]:
        for y in KNOTS[2:]:
            for _ in range(30):
                times.observe(x, y, bilinear(x, y))
    assert times.seconds(cached, new) == pytest.approx(bilinear(cached, new), rel=1e-4)


def test_between_grid_points_it_learns_too() -> None:
    """Prompts do not come in grid sizes."""
    rng = random.Random(1)
    points = [(rng.randrange(6000), rng.randrange(16, 3000)) for _ in range(400)]
    times = taught(forward, points, 2)
    errors = [abs(times.seconds(*p) / forward(*p) - 1) for p in points]
    assert sorted(errors)[len(errors) // 2] < 0.04
    assert max(errors) < 0.3


def test_one_size_only() -> None:
    times = taught(forward, [(700, 900)], 40)
    assert times.seconds(700, 900) == pytest.approx(forward(700, 900), rel=1e-3)


@given(
    st.lists(
        st.tuples(st.integers(0, 10**6), st.integers(1, 10**5), st.floats(1e-9, 1e6)),
        max_size=40,
    ),
    st.integers(0, 10**6),
    st.integers(0, 10**6),
)
def test_always_positive(
    seen: list[tuple[int, int, float]], cached: int, new: int
) -> None:
    times = PrefillTimes()
    for point in seen:
        times.observe(*point)
    assert 0.0 < times.seconds(cached, new) < float("inf")


@pytest.mark.parametrize("warm", [1, 2, 3, 5, 40])
def test_a_paused_process_is_soon_forgotten(warm: int) -> None:
    times = taught(forward, [(512, 256)], warm)
    times.observe(512, 256, 1000 * forward(512, 256))
    assert times.seconds(512, 256) < 1.4 * forward(512, 256)
    for _ in range(5):
        times.observe(512, 256, forward(512, 256))
    assert times.seconds(512, 256) == pytest.approx(forward(512, 256), rel=0.1)


def test_a_slow_first_forward_is_soon_forgotten() -> None:
    times = PrefillTimes()
    times.observe(0, 300, 50 * forward(0, 300))
    times.observe(0, 300, forward(0, 300))
    assert times.seconds(0, 300) == pytest.approx(forward(0, 300), rel=0.1)


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_a_machine_that_changes_is_followed(factor: float) -> None:
    times = taught(forward, [(0, 800), (2048, 100)], 30)
    for _ in range(20):
        for point in ((0, 800), (2048, 100)):
            times.observe(*point, factor * forward(*point))
    for point in ((0, 800), (2048, 100)):
        assert times.seconds(*point) == pytest.approx(factor * forward(*point), rel=0.1)


def test_many_small_forwards_do_not_price_the_large() -> None:
    """A full hit is mostly overhead; a cold prompt is not expected to be."""
    times = PrefillTimes()
    times.observe(0, 4000, 4.0)
    for _ in range(25):
        times.observe(8000, 16, 0.5)
    assert times.seconds(0, 2000) == pytest.approx(2.0, rel=0.4)
    assert times.seconds(8000, 16) == pytest.approx(0.5, rel=0.05)


# --- reads ---


def test_no_read_yet() -> None:
    reads = ReadTimes()
    assert not reads.ready
    assert (reads.bandwidth, reads.latency, reads.seconds(100)) == (0.0, 0.0, 0.0)
    reads.observe(0, 1.0)
    reads.observe(10, 0.0)
    assert not reads.ready


def test_one_reader() -> None:
    reads = ReadTimes()
    reads.observe(1000, 0.5)
    assert reads.ready
    assert reads.bandwidth == pytest.approx(2000)
    assert reads.latency == 0.0
    assert reads.seconds(3000) == pytest.approx(1.5)
    assert reads.seconds(0) == 0.0


@pytest.mark.parametrize("parallel", [1, 2, 4])
@pytest.mark.parametrize("count", [1, 2, 5, 16, 17])
def test_several_readers(parallel: int, count: int) -> None:
    """``parallel`` readers that take 0.1 s a read: right within one read."""
    reads = ReadTimes()
    for _ in range(10):
        reads.observe(500, 0.1, parallel=parallel)
    truth = -(-count // parallel) * 0.1
    assert truth - 1e-9 <= reads.seconds(500 * count) < truth + 0.1


def test_a_stuck_read_is_soon_forgotten_and_a_slower_disk_is_not() -> None:
    reads = ReadTimes()
    for _ in range(10):
        reads.observe(1000, 1.0)
    reads.observe(1000, 500.0)
    assert reads.bandwidth > 700
    for _ in range(5):
        reads.observe(1000, 1.0)
    assert reads.bandwidth == pytest.approx(1000, rel=0.1)
    for _ in range(15):
        reads.observe(1000, 10.0)
    assert reads.bandwidth == pytest.approx(100, rel=0.1)
    for _ in range(15):
        reads.observe(1000, 0.1)
    assert reads.bandwidth == pytest.approx(10000, rel=0.1)
