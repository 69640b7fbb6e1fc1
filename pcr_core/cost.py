"""What prefilling and reading cost here: measured, remembered, interpolated.

Both estimates are arithmetic on what others measured: no clock, no torch. Engine
thread only. They steer time, never results: a wrong one costs speed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator

_RATE = 0.3  # weight of the newest measurement
_CLIP = 2.0


def _growth(expected: float, measured: float) -> float:
    """The factor by which an expectation changes: an EWMA of logarithms.

    A process that is paused measures too long, and nothing makes it measure too
    short: a long time counts as at most ``_CLIP`` times what was expected.
    """
    return math.pow(min(measured / expected, _CLIP), _RATE)


# Roughly right is enough: it only matters where nothing was measured.
_ATTENTION = 4096.0  # keys whose attention takes as long as a token's linear layers
_GUESS = 1e-3  # seconds per token, before anything is measured


def _work(cached: int, new: int) -> float:
    """Work of a forward in tokens: affine in its prefix, because of attention."""
    return new + (cached * new + new * new / 2) / _ATTENTION


class PrefillTimes:
    """Expected seconds of a forward over ``new`` tokens behind ``cached`` ones.

    A coarse grid of (cached, new) with bilinear interpolation in its cells, as in
    RAGCache (arXiv 2404.12457, PGDSF), but without a profiling run: grid points follow
    a law, ``fixed + scale * work``, until there are measurements around them. The first
    measurements only set that law; every later one also moves the corners of its cell,
    each as far as it had a part in the expectation. The grid has no end, so nothing is
    extrapolated.

    Engine thread only.
    """

    _FEW = 4
    _RECENT = 32

    def __init__(self) -> None:
        self._learned: dict[tuple[int, int], float] = {}  # (cached, new) -> seconds
        self._recent: deque[tuple[float, float]] = deque(maxlen=self._RECENT)
        self._scale = self._fixed = _GUESS

    @property
    def ready(self) -> bool:
        """Whether anything was measured."""
        return bool(self._recent)

    def seconds(self, cached: int, new: int) -> float:
        """Expected seconds, always positive.

        Before anything is measured, a guess that is good for comparisons only.
        """
        corners = _corners(cached, new)
        return sum(weight * self._at(corner) for corner, weight in corners)

    def observe(self, cached: int, new: int, seconds: float) -> None:
        """Take in the measured time of a forward.

        Args:
            cached: Tokens whose KV was in place.
            new: Tokens that it computed.
            seconds: Of the forward alone. Nothing is learned from zero.
        """
        if new <= 0 or seconds <= 0.0:
            return
        self._recent.append((_work(cached, new), seconds))
        self._set_law()
        if len(self._recent) < self._FEW:
            return
        parts = {at: weight * self._at(at) for at, weight in _corners(cached, new)}
        growth = _growth(sum(parts.values()), seconds)
        most = max(parts.values())
        for corner, part in parts.items():
            self._learned[corner] = self._at(corner) * growth ** (part / most)

    def _at(self, corner: tuple[int, int]) -> float:
        learned = self._learned.get(corner)
        if learned is not None:
            return learned
        return self._fixed + self._scale * _work(*corner)

    def _set_law(self) -> None:
        """The slope is taken from the large forwards, what is fixed from the small."""
        pairs, fixed = self._recent, self._fixed
        self._scale = _median((max(t - fixed, t / 2) / w, w) for w, t in pairs)
        rest = _median((t - self._scale * w, 1.0 / w) for w, t in pairs)
        self._fixed = max(rest, self._scale)  # positive: a token's at least


def _corners(cached: int, new: int) -> Iterator[tuple[tuple[int, int], float]]:
    """The corners of the grid cell around a point, and their bilinear weights."""
    a0, a1, u = _bracket(cached)
    b0, b1, v = _bracket(new)
    for a, weight_a in ((a0, 1.0 - u), (a1, u)):
        for b, weight_b in ((b0, 1.0 - v), (b1, v)):
            if weight_a > 0.0 and weight_b > 0.0:
                yield (a, b), weight_a * weight_b


def _bracket(tokens: int) -> tuple[int, int, float]:
    """Grid lines 0, 16, 64, 256, ... on both sides, and how far it is between them."""
    low, high = 0, 16
    while tokens > high:
        low, high = high, 4 * high
    return low, high, (tokens - low) / (high - low)


def _median(weighted: Iterable[tuple[float, float]]) -> float:
    """The (lower) median of values with weights, of which there is at least one."""
    pairs = sorted(weighted)
    left = sum(weight for _, weight in pairs) / 2
    for value, weight in pairs:
        left -= weight
        if left <= 0.0:
            return value
    return pairs[-1][0]


class ReadTimes:
    """Expected seconds to read bytes from SSD, several reads at a time.

    ``latency + bytes / bandwidth``. Bandwidth is that of all readers together, with
    whatever each read waits for included; latency is what the readers hold at the end:
    of ``parallel`` equal reads under way, all must end before the last byte is there.

    Engine thread only.
    """

    def __init__(self) -> None:
        self._per_byte = 0.0
        self._ahead = 0.0

    @property
    def ready(self) -> bool:
        """Whether anything was measured."""
        return self._per_byte > 0.0

    @property
    def bandwidth(self) -> float:
        """Bytes per second of all readers together; 0.0 before the first read."""
        return 1.0 / self._per_byte if self._per_byte else 0.0

    @property
    def latency(self) -> float:
        """Seconds beside the bytes' own time."""
        return self._ahead * self._per_byte

    def seconds(self, nbytes: int) -> float:
        """Expected seconds until ``nbytes`` bytes, asked for now, are all there."""
        return self.latency + nbytes * self._per_byte if nbytes > 0 else 0.0

    def observe(self, nbytes: int, seconds: float, *, parallel: float = 1.0) -> None:
        """Take in the measured time of one read.

        Args:
            nbytes: Bytes read.
            seconds: From its start to its end, waiting in a queue not included.
            parallel: Reads under way meanwhile, this one included; may be a mean.
        """
        if nbytes <= 0 or seconds <= 0.0:
            return
        per_byte, ahead = seconds / (nbytes * parallel), nbytes * (parallel - 1)
        if not self.ready:
            self._per_byte, self._ahead = per_byte, ahead
            return
        self._per_byte *= _growth(self._per_byte, per_byte)
        self._ahead += _RATE * (ahead - self._ahead)
