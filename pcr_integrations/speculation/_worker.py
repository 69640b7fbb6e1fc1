"""The thread on which speculation is planned and submitted."""

from __future__ import annotations

from pcr_integrations._background import process_wide

WORKER = process_wide("pcr-speculate")
