"""Where speculation counts. Any thread."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace

from pcr_integrations.speculation._stats import SpeculationStats

_log = logging.getLogger("pcr_integrations.speculation")


class Ledger:
    """Adds up ``SpeculationStats``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stats = SpeculationStats()

    def add(self, **counts: int) -> None:
        """Add to counters by their names."""
        with self._lock:
            sums = {name: getattr(self._stats, name) + n for name, n in counts.items()}
            self._stats = replace(self._stats, **sums)

    def fail(self, error: Exception) -> None:
        """Count a failure; the first one is logged, too."""
        words = f"{type(error).__name__}: {error}"
        with self._lock:
            first = not self._stats.failed
            failed = self._stats.failed + 1
            self._stats = replace(self._stats, failed=failed, last_error=words)
        if first:
            _log.warning("speculation failed (answers are not affected): %s", words)

    @property
    def stats(self) -> SpeculationStats:
        """Counters as they are now."""
        return self._stats
