"""Timelines made by hand: a pipeline of layers on a clock that nobody measures."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pcr_core.timeline import Interval, Timeline

MS = 1e-3


def _pipeline(layers: int, forwards: int = 1, *, queue: float = 4 * MS) -> Timeline:
    """Loads of 0.5 ms ahead of layers of 1 ms, offloads of 0.25 ms behind them."""
    made = [Interval("queue", None, 0.0, queue)]
    now = queue
    for _ in range(forwards):
        load = now
        now += 0.5 * MS
        for layer in range(layers):
            made.append(Interval("load", layer, load, load + 0.5 * MS, 128))
            made.append(Interval("compute", layer, now, now + 1 * MS, 16))
            load, now = load + 0.5 * MS, now + 1 * MS
            made.append(Interval("offload", layer, now, now + 0.25 * MS, 16))
    first_token = now + 0.25 * MS
    for step in range(4):
        start = first_token + 2 * MS * step
        made.append(Interval("decode", None, start, start + 2 * MS, 1))
    return Timeline(tuple(made), 144, 128, first_token)


@pytest.fixture(scope="session")
def pipeline() -> Callable[..., Timeline]:
    """``pipeline(layers, forwards=1, queue=0.004)``"""
    return _pipeline
