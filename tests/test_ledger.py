"""What the queue is told of a document that was forgotten."""

from __future__ import annotations

from pcr_core.documents import DocumentSpan
from pcr_core.index.chunk import ChunkKey
from pcr_core.ledger import Ledger
from pcr_core.request import Request
from pcr_core.sampling_params import SamplingParams
from pcr_core.tiers import Removed

DOCUMENT = b"d" * 16
KEYS = [ChunkKey(bytes([number]) * 32) for number in range(5)]


class Tiers:
    """Says once that something was forgotten."""

    chunk_tokens = 10

    def __init__(self, removed: Removed) -> None:
        self.removed: Removed | None = removed

    def catch_up(self) -> Removed | None:
        removed, self.removed = self.removed, None
        return removed

    def keys_of(self, tokens) -> list[ChunkKey]:
        return []


def waiting(document: bytes = b"", chunk: int = 0) -> Request:
    span = DocumentSpan("d", 10 * chunk + 3, 10 * chunk + 5, digest=document)
    request = Request([1] * 50, list(KEYS), SamplingParams(), spans=[span])
    request.usable = 5
    return request


def strike(removed: Removed, request: Request) -> tuple[int, int]:
    cleared: list[str] = []
    Ledger(Tiers(removed), lambda: cleared.append("rows")).catch_up([request])
    assert cleared == ["rows"], "and nothing of it stays on the device"
    return len(request.keys), request.usable


def test_a_waiting_request_does_not_store_a_forgotten_document_again() -> None:
    removed = Removed(frozenset(KEYS[3:4]), frozenset([DOCUMENT]), [])
    assert strike(removed, waiting(DOCUMENT, 3)) == (3, 3)


def test_nor_behind_a_prefix_that_was_never_computed() -> None:
    removed = Removed(frozenset([ChunkKey(b"x" * 32)]), frozenset([DOCUMENT]), [])
    assert strike(removed, waiting(DOCUMENT, 2)) == (2, 2)
    assert strike(removed, waiting(b"e" * 16, 2)) == (5, 5)


def test_after_too_much_was_forgotten_nothing_that_waits_is_stored() -> None:
    assert strike(Removed(None, None, []), waiting()) == (0, 0)
