"""Recorded traces: what a replay of the traffic needs, and no text.

One JSON line per request: when it came, how long prompt and output were, and a hash of
each of its chunk keys. The hashes are keyed with a salt that is drawn at open and never
written down: equal chunks of one recording have equal hashes, but nobody can test a
trace for a prompt that they guess, nor link two recordings.

Every opening of a file starts a new section with a header line of its own, because its
salt is new: reuse across a restart is not seen in a replay.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pcr_core.errors import ConfigError, TraceError
from pcr_core.index.chunk import ChunkKey

_log = logging.getLogger("pcr_core.trace")

TRACE_FORMAT = 1
"""Version of the file; a reader refuses any other."""

HASH_BYTES = 8
"""Two of a million chunks share a hash with a probability of 3e-8."""

MOST_CHUNKS = 16_384
"""Chunks recorded of one request, so that a huge prompt costs milliseconds at most."""

_BLOCK = 65_536


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        arrival: Seconds since the trace began.
        prompt_tokens: Length of the prompt, in tokens.
        output_tokens: Tokens generated.
        chunks: Names of its full chunks, root first.
    """

    arrival: float
    prompt_tokens: int
    output_tokens: int
    chunks: tuple[ChunkKey, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival.

    Attributes:
        name: Where it comes from.
        chunk_tokens: Tokens per chunk.
        chunk_bytes: Bytes per chunk; 0 when unknown.
        requests: At least one.
    """

    name: str
    chunk_tokens: int
    chunk_bytes: int
    requests: tuple[TraceRequest, ...]

    @property
    def mean_chunks(self) -> float:
        """Mean number of full chunks per request."""
        return sum(len(r.chunks) for r in self.requests) / len(self.requests)

    @property
    def mean_tokens(self) -> float:
        """Mean length of a prompt, in tokens."""
        return sum(r.prompt_tokens for r in self.requests) / len(self.requests)


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pcr_trace: int
    chunk_tokens: int
    chunk_bytes: int


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``chunks`` is all hashes in a row; JSON carries it as base64."""

    at: float
    prompt: int
    output: int
    chunks: bytes


# --- writing ---


class TraceWriter:
    """Appends requests to a trace file. Engine thread only.

    One unbuffered write per request, about a microsecond per chunk before it. Trouble
    while recording (a full disk) is logged once and ends the recording; it never
    reaches a request.

    Args:
        path: The file; created if missing, continued if it is a trace.
        chunk_tokens: Tokens per chunk.
        chunk_bytes: Bytes per chunk.
        max_bytes: Recording ends when the file would grow beyond this.
        clock: Seconds; arrivals are recorded relative to its value now.

    Raises:
        ConfigError: If the file cannot be opened, is something else than a trace of
            such chunks, or is being written by another engine.
    """

    def __init__(
        self,
        path: Path,
        *,
        chunk_tokens: int,
        chunk_bytes: int,
        max_bytes: int = 2**30,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._salt = secrets.token_bytes(32)
        self._max_bytes = max_bytes
        self._start = clock()
        header = _Header(TRACE_FORMAT, chunk_tokens, chunk_bytes)
        self._fd: int | None = None
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            self._size = _continue(self._fd, path, header)
        except OSError as error:
            self.close()
            raise ConfigError(
                f"cannot record a trace to {path}: {error.strerror}; name a file in a "
                "writable folder"
            ) from error
        except ConfigError:
            self.close()
            raise
        self._append(header)

    def record(
        self,
        arrival: float,
        prompt_tokens: int,
        output_tokens: int,
        keys: Sequence[ChunkKey],
    ) -> None:
        """Append one finished request; never raises.

        Args:
            arrival: When it was submitted, on the writer's clock.
            prompt_tokens: Length of its prompt.
            output_tokens: Tokens generated.
            keys: Its chunk keys, root first; the first ``MOST_CHUNKS`` are recorded.
        """
        if self._fd is None:
            return
        at = round(max(0.0, arrival - self._start), 6)
        hashes = b"".join(map(self._hash, keys[:MOST_CHUNKS]))
        self._append(_Line(at, prompt_tokens, output_tokens, hashes))

    def close(self) -> None:
        """Close the file; recording after that does nothing."""
        fd, self._fd = self._fd, None
        if fd is not None:
            with contextlib.suppress(OSError):
                os.close(fd)

    def _hash(self, key: ChunkKey) -> bytes:
        return hashlib.blake2b(key, digest_size=HASH_BYTES, key=self._salt).digest()

    def _append(self, line: _Header | _Line) -> None:
        data = msgspec.json.encode(line) + b"\n"
        if self._size + len(data) > self._max_bytes:
            self._stop(f"it has reached its limit of {self._max_bytes} bytes")
            return
        assert self._fd is not None
        try:
            written = os.write(self._fd, data)
        except OSError as error:
            self._stop(str(error))
            return
        self._size += written
        if written < len(data):
            self._stop("the disk is full")

    def _stop(self, reason: str) -> None:
        _log.warning("recording of the trace %s ends here: %s", self._path, reason)
        self.close()


def _continue(fd: int, path: Path, header: _Header) -> int:
    """Make an open file ready for a new section; returns its size in bytes."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"{path} is being recorded by another engine; give each its own file"
        ) from None
    size = os.fstat(fd).st_size
    if size == 0:
        return 0
    first = os.pread(fd, 4096, 0).split(b"\n", 1)[0]
    try:
        found = msgspec.json.decode(first, type=_Header)
    except msgspec.DecodeError:
        raise ConfigError(
            f"{path} exists and is not a trace; name another file"
        ) from None
    if found != header:
        raise ConfigError(
            f"{path} holds a trace with {found.chunk_tokens} tokens and "
            f"{found.chunk_bytes} bytes per chunk, format {found.pcr_trace}; this "
            f"engine has {header.chunk_tokens} and {header.chunk_bytes}, format "
            f"{header.pcr_trace}: name another file"
        )
    whole = _end_of_last_line(fd, size)
    os.ftruncate(fd, whole)  # a process that was killed may leave half a line
    return whole


def _end_of_last_line(fd: int, size: int) -> int:
    end = size
    while end > 0:
        start = max(0, end - _BLOCK)
        newline = os.pread(fd, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


# --- reading ---


def read_trace(path: Path) -> Trace:
    """Read a whole trace; later sections follow the earlier ones in time.

    A last line without an end is what a killed process leaves, and is ignored.

    Raises:
        TraceError: If the file cannot be read, or a line is not what it should be; the
            message says which.
    """
    try:
        with path.open("rb") as file:
            return _parse(path, file)
    except OSError as error:
        raise TraceError(f"cannot read the trace {path}: {error.strerror}") from error


def _parse(path: Path, lines: Iterator[bytes]) -> Trace:
    first: _Header | None = None
    requests: list[TraceRequest] = []
    section: list[TraceRequest] = []
    start = 0.0
    for number, text in enumerate(lines, start=1):
        if not text.endswith(b"\n"):
            break
        try:
            line = _decode(text)
            if isinstance(line, _Header):
                first = _same(first, line)
                requests += _in_order(section)
                section, start = [], requests[-1].arrival if requests else 0.0
            elif first is None:
                raise ValueError("the first line must be a header")
            else:
                section.append(_request(line, first, start))
        except ValueError as error:
            raise TraceError(f"{path}, line {number}: {error}") from None
    requests += _in_order(section)
    if first is None or not requests:
        raise TraceError(f"{path} holds no request; is it a trace of this library?")
    return Trace(path.name, first.chunk_tokens, first.chunk_bytes, tuple(requests))


_HEADER = msgspec.json.Decoder(_Header)
_LINE = msgspec.json.Decoder(_Line)


def _decode(text: bytes) -> _Header | _Line:
    # Both raise a ValueError that names the field.
    return _HEADER.decode(text) if b"pcr_trace" in text[:32] else _LINE.decode(text)


def _same(first: _Header | None, header: _Header) -> _Header:
    if header.pcr_trace != TRACE_FORMAT:
        raise ValueError(
            f"format {header.pcr_trace}, but this version reads format {TRACE_FORMAT}"
        )
    if header.chunk_tokens < 1 or header.chunk_bytes < 0:
        raise ValueError("chunk_tokens or chunk_bytes is out of range")
    if first is not None and first != header:
        raise ValueError("a section with other chunks than the first")
    return header


def _request(line: _Line, header: _Header, start: float) -> TraceRequest:
    if line.at < 0 or line.prompt < 1 or line.output < 0:
        raise ValueError("a time or a token count is out of range")
    if len(line.chunks) % HASH_BYTES:
        raise ValueError(f"chunks must be a multiple of {HASH_BYTES} bytes")
    if len(line.chunks) // HASH_BYTES * header.chunk_tokens > line.prompt:
        raise ValueError("more chunks than the prompt has tokens for")
    ends = range(HASH_BYTES, len(line.chunks) + 1, HASH_BYTES)
    keys = tuple(ChunkKey(line.chunks[end - HASH_BYTES : end]) for end in ends)
    return TraceRequest(start + line.at, line.prompt, line.output, keys)


def _in_order(section: list[TraceRequest]) -> list[TraceRequest]:
    """Requests are recorded as they finish, and replayed as they came."""
    return sorted(section, key=lambda request: request.arrival)
