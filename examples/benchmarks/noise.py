"""Whether other work ran beside a measurement.

Torch's threads spin while they wait for each other, so that a second busy process makes
a figure several times too large and not a few percent. What others take is the CPU time
of the machine less our own, looked at in windows of two seconds.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field

from examples.benchmarks.proc import TICK, machine_busy, tree_busy

WINDOW = 2.0  # seconds
CALM = 0.25  # cores that others may take in a window that counts as calm
MOST = 0.1  # share of windows that may be disturbed


@dataclass(frozen=True)
class Noise:
    """What others took.

    Attributes:
        cores: Cores that other processes, or the host, took in each window, on average.
    """

    cores: list[float] = field(default_factory=list)

    @property
    def disturbed(self) -> float:
        """Share of windows that were not calm."""
        return sum(taken > CALM for taken in self.cores) / max(1, len(self.cores))

    @property
    def calm(self) -> bool:
        """Whether the figures may be read."""
        return self.disturbed <= MOST

    def __str__(self) -> str:
        mean = sum(self.cores) / max(1, len(self.cores))
        return (
            f"other work took {mean:.2f} cores on average and more than {CALM} "
            f"in {self.disturbed:.0%} of the time"
        )


class Watch:
    """Looks at the machine from its start to its end, in a thread of its own."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._noise = Noise()
        self._thread = threading.Thread(target=self._look, name="noise", daemon=True)

    def start(self) -> None:
        """Begin; where ``/proc`` is missing, nothing is ever seen."""
        if os.path.exists("/proc/stat"):
            self._thread.start()

    def end(self) -> Noise:
        """Stop looking; what was seen."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        return self._noise

    def _look(self) -> None:
        before = _now()
        while not self._over.wait(WINDOW):
            now = _now()
            others = (now[1] - before[1]) - (now[2] - before[2])
            self._noise.cores.append(max(0.0, others / TICK / (now[0] - before[0])))
            before = now


def _now() -> tuple[float, int, int]:
    """Seconds on the clock, ticks of the machine, ticks of this process' tree."""
    return time.monotonic(), machine_busy(), tree_busy(os.getpid())
