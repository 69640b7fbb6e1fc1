"""What looks as if it will change, and what must not look like it."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import given

from pcr_core.explain.volatile import Volatile, find_volatile


def found(text: str) -> list[tuple[str, str]]:
    return [(one.kind, one.text) for one in find_volatile(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Today is 2025-03-03.", "2025-03-03"),
        ("the date (2025/03/03)", "2025/03/03"),
        ("Date: 03/04/2025", "03/04/2025"),
        ("am 3.3.2025 um", "3.3.2025"),
        ("It is Monday, 3 March 2025.", "Monday, 3 March 2025"),
        ("It is Monday, March 3rd, 2025.", "Monday, March 3rd, 2025"),
        ("the 3rd of March 2025", "3rd of March 2025"),
        ("Today Date: 26 Jul 2024", "26 Jul 2024"),
        ("On Monday, March 3", "Monday, March 3"),
        ("Remember, today is Monday", "today is Monday"),
        ("Today is Monday, 3 March 2025", "Monday, 3 March 2025"),
    ],
)
def test_dates(text: str, expected: str) -> None:
    assert found(text) == [("date", expected)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2025-03-03T10:15:32Z", "2025-03-03T10:15:32Z"),
        ("[2025-03-03 10:15:32.123+00:00]", "2025-03-03 10:15:32.123+00:00"),
        ("Mon, 03 Mar 2025 10:15:00 +0000", "Mon, 03 Mar 2025 10:15:00 +0000"),
        ("March 3rd, 2025 at 10:15 AM", "March 3rd, 2025 at 10:15 AM"),
        ("Mon Mar  3 10:15:32 2025", "Mon Mar  3 10:15:32 2025"),
        ("20250303T101500Z", "20250303T101500Z"),
        ("it was 10:15:32 that day", "10:15:32"),
        ("Current time: 10:15", "10:15"),
        ("timestamp 1710000000", "1710000000"),
        ('{"ts": 1710000000123}', "1710000000123"),
        ("at 1710000000.25", "1710000000.25"),
    ],
)
def test_times(text: str, expected: str) -> None:
    assert found(text) == [("time", expected)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "<123e4567-e89b-12d3-a456-426614174000>",
            "123e4567-e89b-12d3-a456-426614174000",
        ),
        ("trace 9f86d081884c7d65", "9f86d081884c7d65"),
        ("01ARZ3NDEKTSV4RRFFQ69G5FAV", "01ARZ3NDEKTSV4RRFFQ69G5FAV"),
        ("chatcmpl-9aBcD12", "chatcmpl-9aBcD12"),
        ("session_id: abc123", "session_id: abc123"),
        ("The user id is bob@x.org.", "user id is bob@x.org"),
        ("Current user: alice", "Current user: alice"),
    ],
)
def test_ids(text: str, expected: str) -> None:
    assert found(text) == [("id", expected)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("This is request 123 today", "request 123"),
        ("request #123", "request #123"),
        ("Request no. 5:", "Request no. 5"),
        ("Turn 7", "Turn 7"),
        ("see #42", "#42"),
        ("Question: 5", "Question: 5"),
    ],
)
def test_counters(text: str, expected: str) -> None:
    assert found(text) == [("counter", expected)]


@pytest.mark.parametrize(
    "text",
    [
        "The war of 1939 to 1945 and the season 2024-2025",
        "Cutting Knowledge Date: December 2023",
        "Knowledge cutoff: 2024-06-01",
        "Write dates in ISO format, e.g. 2024-01-31",
        "Python 3.11.2 was released 2024-02-02",
        "Copyright © 2024-01-01",
        "Version 2024.1.10, model-20240620-v1",
        "Step 1: read. Step 2: write. Turn 1, turn 2.",
        "#1 rule: be kind. #2 rule: be brief",
        "run 5 tests, call 911, round 2 decimals, question 5",
        "John 3:16 says; open 9:00 AM to 5:00 PM",
        "A user id is required",
        '{"user_id": {"type": "string"}, "session_id": "string"}',
        "ISBN 1492032646, phone +15125551234, 1000000 tokens",
        "deadbeefcafe #ffaa00 #000000",
        "thread-safe-queue-implementation",
        "You may march 10 miles",
        "2025-13-45 and 99.99.2025x",
        "",
    ],
)
def test_what_stays_is_left_alone(text: str) -> None:
    assert found(text) == []


def test_a_sentence_about_a_version_does_not_cover_the_next() -> None:
    assert found("Version 2. Today is 2025-03-03") == [("date", "2025-03-03")]


def test_in_order_with_places() -> None:
    text = "Turn 7 on 2025-03-03 at 10:15:32, user_id=u1"
    assert find_volatile(text) == [
        Volatile("counter", "Turn 7", 0),
        Volatile("time", "2025-03-03 at 10:15:32", 10),
        Volatile("id", "user_id=u1", 34),
    ]


PIECES = st.sampled_from(
    [
        "2025-03-03",
        " ",
        "10:15",
        ":32",
        "T",
        "Turn 7",
        "#",
        "42",
        "1710000000",
        "id: a1",
    ]
)


@given(st.lists(PIECES, max_size=10).map("".join))
def test_findings_are_in_the_text_and_apart(text: str) -> None:
    findings = find_volatile(text)
    for one in findings:
        assert text[one.start : one.stop] == one.text != ""
    for one, following in itertools.pairwise(findings):
        assert one.stop <= following.start
