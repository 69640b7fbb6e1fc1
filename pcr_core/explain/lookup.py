"""What ``explain`` is told: plain values, gathered by whoever owns the tiers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from pcr_core.documents import DocumentSpan
from pcr_core.explain.history import PastPrompt, Sighting

ChunkState = Literal["none", "dram", "ssd"]
Tier = Literal["device", "dram", "ssd"]


class Departure(Protocol):
    """How a chunk left a tier; ``when`` is Unix time in seconds, ``by`` may be ""."""

    @property
    def tier(self) -> str: ...  # noqa: D102
    @property
    def when(self) -> float: ...  # noqa: D102
    @property
    def reason(self) -> str: ...  # noqa: D102
    @property
    def by(self) -> str: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class Lookup:
    """All that is known about a prompt.

    Attributes:
        tokens: Its token ids.
        chunk_tokens: Tokens per chunk.
        states: For each full chunk, the fastest tier that has it.
        must_compute: Tokens at its end that run anyway; they may begin in a chunk that
            is read.
        spans: The documents in it.
        earlier: Earlier prompts that may be like it; of two that are as like, the first
            counts. After a restart: the tokens up to the first missing chunk, followed
            by those of a stored chunk that has the same parent.
        sightings: How each document of ``spans`` was seen before, where that is known.
            What ``earlier`` tells about the same text comes first.
        gone: How missing chunks were lost, by chunk index.
        dram_chunks: Chunks that DRAM holds; ``None`` if that is not known.
        resident: Leading tokens that the device holds; at least the last is missing.
        heads: How many first tokens of a chunk that is not stored would be read all the
            same, by chunk index; a last partial chunk may be one.

    Raises:
        ValueError: If there is not one state for each full chunk, or not one sighting
            for each document (or none at all).
    """

    tokens: Sequence[int]
    chunk_tokens: int
    states: Sequence[ChunkState]
    must_compute: int = 1
    spans: Sequence[DocumentSpan] = ()
    earlier: Sequence[PastPrompt] = ()
    sightings: Sequence[Sighting | None] = ()
    gone: Mapping[int, Departure] = field(default_factory=dict)
    dram_chunks: int | None = None
    resident: int = 0
    heads: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        full = len(self.tokens) // self.chunk_tokens
        if len(self.states) != full:
            raise ValueError(f"{len(self.states)} states do not fit {full} full chunks")
        if self.sightings and len(self.sightings) != len(self.spans):
            raise ValueError(
                f"{len(self.sightings)} sightings do not fit {len(self.spans)} spans"
            )

    @property
    def usable(self) -> int:
        """Leading chunks of which something may be read rather than computed."""
        readable = max(0, len(self.tokens) - self.must_compute)
        return min(len(self.states), -(-readable // self.chunk_tokens))

    @property
    def in_place(self) -> int:
        """Leading tokens that would be used where the device holds them.

        A chunk that it holds only in part is read whole if it is stored.
        """
        chunk = self.resident // self.chunk_tokens
        if chunk < self.usable and self.states[chunk] != "none":
            return chunk * self.chunk_tokens
        return self.resident

    def reused(self) -> Iterator[tuple[int, int, Tier]]:
        """First token, the one behind the last, and tier of what would be reused."""
        size, held = self.chunk_tokens, self.in_place
        end = len(self.tokens) - self.must_compute
        yield 0, held, "device"
        for chunk in range(held // size, self.usable):
            state = self.states[chunk]
            if state != "none":
                yield chunk * size, min(end, (chunk + 1) * size), state
        for chunk, count in self.heads.items():
            yield max(held, chunk * size), chunk * size + count, "dram"
