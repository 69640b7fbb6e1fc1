"""Recorded traces: written without text, read back whole, refused with a reason."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcr_core.errors import ConfigError, PcrError, TraceError
from pcr_core.index.chunk import ChunkKey, Namespace, chunk_keys
from pcr_core.trace import HASH_BYTES, MOST_CHUNKS, TraceWriter, read_trace

HEADER = b'{"pcr_trace":1,"chunk_tokens":4,"chunk_bytes":64}\n'
LINE = b'{"at":1.5,"prompt":9,"output":2,"chunks":"AAAAAAAAAAEAAAAAAAAAAg=="}\n'


def keys_of(tokens: list[int]) -> list[ChunkKey]:
    return chunk_keys(Namespace.of([]), tokens, 4)


def writer_of(path: Path, **options: object) -> TraceWriter:
    return TraceWriter(
        path, chunk_tokens=4, chunk_bytes=64, clock=lambda: 100.0, **options
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "requests.jsonl"


# --- round trip ---


def test_what_was_recorded_is_read_back(path):
    writer = writer_of(path)
    first, second = keys_of([1] * 9), keys_of([1] * 4 + [2] * 8)
    writer.record(101.5, 9, 2, first)
    writer.record(102.0, 12, 0, second)
    writer.close()
    trace = read_trace(path)
    assert (trace.name, trace.chunk_tokens, trace.chunk_bytes) == (path.name, 4, 64)
    assert [(r.arrival, r.prompt_tokens, r.output_tokens) for r in trace.requests] == [
        (1.5, 9, 2),
        (2.0, 12, 0),
    ]
    one, other = (request.chunks for request in trace.requests)
    assert [len(key) for key in one + other] == [HASH_BYTES] * 5
    assert one[0] == other[0], "an equal prefix has an equal hash"
    assert len({*one, *other}) == 4
    assert trace.mean_chunks == 2.5
    assert trace.mean_tokens == 10.5


@given(
    st.lists(
        st.tuples(st.floats(0, 1e6), st.lists(st.integers(0, 3), max_size=20)),
        min_size=1,
        max_size=10,
    )
)
def test_hashes_are_equal_exactly_where_keys_are(tmp_path_factory, drawn):
    path = tmp_path_factory.mktemp("trace") / "t.jsonl"
    writer = writer_of(path)
    for arrival, tokens in drawn:
        writer.record(100.0 + arrival, len(tokens) + 1, 1, keys_of(tokens))
    writer.close()
    read = read_trace(path).requests
    written = sorted(drawn, key=lambda item: round(100.0 + item[0] - 100.0, 6))
    to_hash = {}
    for (_, tokens), request in zip(written, read, strict=True):
        assert request.prompt_tokens == len(tokens) + 1
        for key, hashed in zip(keys_of(tokens), request.chunks, strict=True):
            assert to_hash.setdefault(key, hashed) == hashed
    assert len(set(to_hash.values())) == len(to_hash)


def test_requests_are_read_in_order_of_arrival(path):
    writer = writer_of(path)
    for arrival, prompt in ((107.0, 7), (103.0, 3), (105.0, 5)):
        writer.record(arrival, prompt, 1, [])
    writer.close()
    assert [r.prompt_tokens for r in read_trace(path).requests] == [3, 5, 7]


# --- what a trace does not tell ---


def test_a_guessed_prompt_cannot_be_looked_up(tmp_path):
    """Neither keys nor their plain hashes are in the file, and no two files agree."""
    keys = keys_of(list(range(40)))
    found = []
    for name in ("a", "b"):
        writer = writer_of(tmp_path / name)
        writer.record(100.0, 40, 1, keys)
        writer.close()
        found.append(set(read_trace(tmp_path / name).requests[0].chunks))
    assert not found[0] & found[1]
    assert not found[0] & {key[:HASH_BYTES] for key in keys}


def test_the_salt_is_not_in_the_file(path):
    writer = writer_of(path)
    writer.record(100.0, 9, 1, keys_of([5] * 9))
    writer.close()
    header, line = path.read_bytes().splitlines()
    assert set(msgspec.json.decode(header)) == {
        "pcr_trace",
        "chunk_tokens",
        "chunk_bytes",
    }
    assert set(msgspec.json.decode(line)) == {"at", "prompt", "output", "chunks"}


# --- several sections, cut-off lines ---


def test_a_second_opening_continues_in_time_with_other_hashes(path):
    for _ in range(2):
        writer = writer_of(path)
        writer.record(103.0, 4, 1, keys_of([1] * 4))
        writer.close()
    one, other = read_trace(path).requests
    assert (one.arrival, other.arrival) == (3.0, 6.0)
    assert one.chunks != other.chunks


def test_half_a_last_line_is_ignored_and_then_overwritten(path):
    path.write_bytes(HEADER + LINE + LINE[:20])
    assert len(read_trace(path).requests) == 1
    writer = writer_of(path)
    writer.record(100.0, 4, 1, [])
    writer.close()
    assert path.read_bytes().startswith(HEADER + LINE + HEADER)
    assert len(read_trace(path).requests) == 2


def test_a_cut_header_is_not_a_trace(path):
    path.write_bytes(HEADER[:-5])
    with pytest.raises(ConfigError, match="not a trace"):
        writer_of(path)


# --- refusals ---


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no request"),
        (HEADER, "holds no request"),
        (LINE, "line 1: the first line must be a header"),
        (b"hello\n", "line 1: "),
        (HEADER + LINE + b"{}\n", "line 3: .*at"),
        (HEADER + b"\xff\n", "line 2: "),
        (HEADER + LINE.replace(b"1.5", b'"x"'), r"line 2: .*\$\.at"),
        (HEADER + LINE.replace(b"1.5", b"-1"), "line 2: a time"),
        (HEADER + LINE.replace(b":9,", b":0,"), "line 2: a time or a token count"),
        (HEADER + LINE.replace(b":9,", b":7,"), "line 2: more chunks than"),
        (HEADER + LINE.replace(b"AAg==", b"A"), "line 2: chunks must be a mult"),
        (HEADER + LINE.replace(b"AAg==", b"%%%%"), "line 2: "),
        (HEADER.replace(b":1,", b":2,"), "line 1: format 2, but this version reads"),
        (HEADER.replace(b":4,", b":0,"), "line 1: chunk_tokens"),
        (HEADER + LINE + HEADER.replace(b":4,", b":8,"), "line 3: a section with oth"),
        (HEADER + LINE[:-2] + b',"text":"hello"}\n', "line 2: .*text"),
    ],
)
def test_a_bad_file_is_refused_with_its_line(path, content, message):
    path.write_bytes(content)
    with pytest.raises(TraceError, match=message) as caught:
        read_trace(path)
    assert isinstance(caught.value, PcrError)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_named(path):
    with pytest.raises(TraceError, match=r"cannot read the trace .*No such file"):
        read_trace(path)


def test_another_file_is_never_touched(path):
    path.write_bytes(b"my diary, and half a line")
    with pytest.raises(ConfigError, match="not a trace"):
        writer_of(path)
    assert path.read_bytes() == b"my diary, and half a line"


def test_other_chunks_need_another_file(path):
    writer_of(path).close()
    with pytest.raises(ConfigError, match="4 tokens and 64 bytes per chunk"):
        TraceWriter(path, chunk_tokens=8, chunk_bytes=64)


def test_two_engines_do_not_share_a_file(path):
    writer = writer_of(path)
    with pytest.raises(ConfigError, match="another engine"):
        writer_of(path)
    writer.close()
    writer_of(path).close()


def test_a_missing_folder_is_a_setting_error(tmp_path):
    with pytest.raises(ConfigError, match=r"No such file .*writable folder"):
        writer_of(tmp_path / "missing" / "t.jsonl")


# --- trouble while recording ---


def test_trouble_is_logged_once_and_never_raised(path, caplog):
    writer = writer_of(path)
    fd = os.open(path, os.O_RDONLY)
    os.dup2(fd, writer._fd)  # every write fails from here on
    os.close(fd)
    with caplog.at_level(logging.WARNING, "pcr_core.trace"):
        for _ in range(3):
            writer.record(100.0, 4, 1, [])
    assert [r.message.split(":")[0] for r in caplog.records] == [
        f"recording of the trace {path} ends here"
    ]
    writer.close()


def test_a_file_stays_below_its_limit(path, caplog):
    writer = writer_of(path, max_bytes=400)
    for _ in range(50):
        writer.record(100.0, 4, 1, keys_of([1] * 4))
    writer.close()
    assert path.stat().st_size <= 400
    assert len(read_trace(path).requests) >= 3
    assert len(caplog.records) == 1


def test_a_huge_prompt_is_recorded_up_to_a_bound(path):
    writer = writer_of(path)
    keys = [ChunkKey(i.to_bytes(4, "big")) for i in range(MOST_CHUNKS + 5)]
    writer.record(100.0, 4 * len(keys), 1, keys)
    writer.close()
    (request,) = read_trace(path).requests
    assert len(request.chunks) == MOST_CHUNKS
    assert request.prompt_tokens == 4 * (MOST_CHUNKS + 5)


def test_recording_after_close_does_nothing(path):
    writer = writer_of(path)
    writer.close()
    writer.close()
    writer.record(100.0, 4, 1, [])
    assert path.read_bytes() == HEADER
