"""Where the time of one request went: intervals, their arithmetic and pictures."""

from pcr_core.timeline.interval import Interval, Lane
from pcr_core.timeline.timeline import Timeline

__all__ = ["Interval", "Lane", "Timeline"]
