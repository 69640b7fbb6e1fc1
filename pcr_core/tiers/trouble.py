"""Storage trouble, logged once per kind."""

from __future__ import annotations

import logging


class TroubleLog:
    """Logs each kind of trouble once, so that a full disk does not fill the log too."""

    def __init__(self) -> None:
        self._log = logging.getLogger("pcr_core.tiers")
        self._seen: set[str] = set()

    def once(self, kind: str, message: str, error: BaseException | None = None) -> None:
        """Log ``message`` at warning level unless ``kind`` was logged before."""
        if kind not in self._seen:
            self._seen.add(kind)
            detail = f": {error}" if error is not None else ""
            self._log.warning("%s%s (further ones are only counted)", message, detail)
