"""Text that is likely to differ in the next request: dates, times, counters, ids.

A hint for people, so it prefers silence to a false alarm: months without a day, years,
numbered lists, ids in examples and dates of releases are left alone. Whether a finding
matters depends on where it stands; that is for the caller to judge.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

VolatileKind = Literal["date", "time", "id", "counter"]


@dataclass(frozen=True, slots=True)
class Volatile:
    """Something that looks as if it will change.

    Attributes:
        kind: ``"time"`` has a time of day, or is a Unix time; ``"date"`` has none.
        text: As it stands there.
        start: Its first character.
    """

    kind: VolatileKind
    text: str
    start: int

    @property
    def stop(self) -> int:
        """The character behind its last."""
        return self.start + len(self.text)


def find_volatile(text: str) -> list[Volatile]:
    """Find what looks volatile, in order and without overlaps; the longer one wins."""
    found = [*_matches(text), *_counters(text)]
    found.sort(key=lambda one: (one.start, -len(one.text)))
    chosen: list[Volatile] = []
    for one in found:
        free = not chosen or one.start >= chosen[-1].stop
        if free and not _STEADY.search(text, max(0, one.start - 40), one.start):
            chosen.append(one)
    return chosen


def _matches(text: str) -> Iterator[Volatile]:
    for kind, pattern in _PATTERNS:
        for match in pattern.finditer(text):
            groups = pattern.groupindex
            clock = "clock" in groups and match["clock"] is not None
            found = "found" if "found" in groups else 0
            yield Volatile("time" if clock else kind, match[found], match.start(found))


def _counters(text: str) -> list[Volatile]:
    """Counters; a word with several numbers is a numbered list and none."""
    numbers: dict[str, set[str]] = {}
    matches = [match for pattern in _COUNTERS for match in pattern.finditer(text)]
    for match in matches:
        numbers.setdefault(match["word"].lower(), set()).add(match["number"])
    return [
        Volatile("counter", match[0], match.start())
        for match in matches
        if len(numbers[match["word"].lower()]) == 1
    ]


# --- patterns ---

_MONTH = (
    r"(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|"
    r"sept?(?:ember)?|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)\b\.?"
)
_WEEKDAY_NAME = r"(?:mon|tues|wednes|thurs|fri|satur|sun)day"
_WEEKDAY = rf"(?:{_WEEKDAY_NAME}|mon|tue|wed|thu|fri|sat|sun)\b\.?"
_DAY = r"(?:0?[1-9]|[12]\d|3[01])(?:st|nd|rd|th)?"
_DD = r"(?:0?[1-9]|[12]\d|3[01])"
_MM = r"(?:0?[1-9]|1[0-2])"
_YEAR = r"(?:19|20)\d\d"
_CLOCK = r"(?:[01]?\d|2[0-3]):[0-5]\d(?::[0-5]\d(?:[.,]\d{1,9})?)?"
_ZONE = (
    r"(?:\s?(?:[ap]\.?m\b\.?|(?:z|utc|gmt|cest|[cew]et|[bij]st|[cemp][sd]t)\b|"
    r"[+-]\d\d:?\d\d\b))"
)
_TAIL = rf"(?:(?:t|,?\s+(?:at\s+)?)(?P<clock>{_CLOCK}){_ZONE}*)?"

# What stands in front of a date or an id that stays: a version, an example, a format.
_STEADY = re.compile(
    r"\b(?:cut-?off|version|released?|since|copyright|effective|founded|born|"
    r"published|updated|such as|examples?|for instance|formats?|formatted|isbn)\b"
    r"[^\n.!?;]{0,24}$|(?:\be\.g\.|©)[^\n]{0,12}$",
    re.IGNORECASE,
)


def _pattern(body: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![\w.+-])(?:{body})(?![\w-])", re.IGNORECASE)


_NAMED = rf"{_DAY}\s+(?:of\s+)?{_MONTH}|{_MONTH}\s+{_DAY}"
_PATTERNS: tuple[tuple[VolatileKind, re.Pattern[str]], ...] = (
    ("date", _pattern(rf"{_YEAR}(?P<sep>[-/]){_MM}(?P=sep){_DD}{_TAIL}")),
    ("date", _pattern(rf"\d\d?(?P<sep>[/.])\d\d?(?P=sep){_YEAR}{_TAIL}")),
    ("date", _pattern(rf"(?:{_WEEKDAY},?\s+)?(?:{_NAMED}),?\s+{_YEAR}{_TAIL}")),
    ("date", _pattern(rf"{_WEEKDAY},?\s+(?:{_NAMED}){_TAIL}")),
    ("date", _pattern(rf"today(?:\s+is|:)\s+{_WEEKDAY_NAME}(?!,?\s+(?:{_NAMED}))")),
    (
        "time",
        _pattern(rf"{_WEEKDAY}\s+{_MONTH}\s+\d\d?\s+{_CLOCK}\s+(?:\w+\s+)?{_YEAR}"),
    ),
    ("time", _pattern(r"20\d{6}T\d{6}Z?")),
    (
        "time",
        _pattern(r"(?:[01]?\d|2[0-3]):[0-5]\d:[0-5]\d(?:[.,]\d{1,9})?" + _ZONE + "?"),
    ),
    (
        "time",
        _pattern(rf"(?:time|now|clock)\b[^\n\d]{{0,16}}(?P<found>{_CLOCK}{_ZONE}?)"),
    ),
    # Unix time from 2014 to 2033, in seconds, milli-, micro- or nanoseconds.
    ("time", _pattern(r"1[4-9]\d{8}(?:\.\d+|\d{3}|\d{6}|\d{9})?")),
    ("id", _pattern(r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}")),
    (
        "id",
        _pattern(r"(?:0x)?(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{12,64}"),
    ),
    ("id", re.compile(r"(?<!\w)(?=\w*\d)[0-7][0-9A-HJKMNP-TV-Z]{25}(?!\w)")),  # ULID
    (
        "id",
        _pattern(
            r"(?:req|request|sess|session|run|thread|user|usr|chat|chatcmpl|msg|trace|"
            r"conv|corr)[_-](?=(?:[\w-]*\d){2})[\w-]{6,}"
        ),
    ),
    (
        "id",
        _pattern(
            r"(?:user|session|request|trace|conversation|thread|tenant|customer|account|"
            r"correlation|client|chat|device|run|message)[ _-]?(?:id|uuid|token)\b"
            r"[\"']?\s*(?:[:=]|is\b)\s*[\"']?(?=[\w.+-]*[\d@])[\w.@+-]+\w"
        ),
    ),
    (
        "id",
        _pattern(
            r"(?:current|logged-in) user(?: ?name)?\s*(?:[:=]|is\b)\s*[\w.@+-]+\w"
        ),
    ),
)
_LABEL = r"(?:no\.?|nr\.?|number|count|counter)"
_COUNTERS = (
    _pattern(
        r"(?P<word>request|turn|iteration|attempt|conversation|session|ticket)"
        rf"(?:\s+{_LABEL})?\s*[:#=]?\s*(?P<number>\d{{1,9}})"
    ),
    # Also verbs ("run 5 tests", "round 2 decimals"), or in front of amounts.
    _pattern(
        r"(?P<word>message|query|question|round|run|job|call|visit|step)"
        rf"(?:\s+{_LABEL}\s*[:#=]?|\s*[:#=])\s*(?P<number>\d{{1,9}})"
    ),
    re.compile(r"(?<![\w&#])(?P<word>#)(?P<number>[1-9]\d{0,8})(?!\w)"),
)
