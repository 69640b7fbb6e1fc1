"""What ``explain`` is told: plain values, gathered by whoever owns the tiers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from pcr_core.documents import DocumentSpan
from pcr_core.explain.history import PastPrompt, Sighting

ChunkState = Literal["none", "dram", "ssd"]


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
