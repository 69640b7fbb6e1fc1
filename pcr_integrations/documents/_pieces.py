"""Pieces of texts, for documents that a chain has cut to fit its context window."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator

from pcr_integrations.documents._text_index import Match, TextIndex

SHORTEST_PIECE = 80
"""Characters; below that, sentences and lines are joined."""
_MOST_TEXTS = 256
_MOST_OWNERS = 3
_MOST_PIECES = 64
"""Of one text; together the pieces take 16 MiB at most, beside the registry's own."""
_END = re.compile(r"(?<=[.!?])\s+|\n+|(?<=[\u3002\uff01\uff1f])")


def pieces_of(text: str) -> list[str]:
    """Cut a text into runs of whole sentences or lines; a short rest is left out."""
    pieces, start = [], 0
    for stop in [*(end.start() for end in _END.finditer(text)), len(text)]:
        piece = text[start:stop].strip()
        if len(piece) >= SHORTEST_PIECE:
            pieces.append(piece)
            start = stop
    return pieces


class PieceIndex:
    """The pieces of the texts handed over last. No lock: its owner has one."""

    def __init__(self) -> None:
        self._texts: OrderedDict[str, list[str]] = OrderedDict()
        self._owners: dict[str, list[str]] = {}
        self._index = TextIndex()

    def add(self, text: str) -> None:
        """Take in a text; of the oldest, the pieces are dropped."""
        if text in self._texts:
            self._texts.move_to_end(text)
            return
        pieces = [piece for piece in dict.fromkeys(pieces_of(text)) if piece != text]
        del pieces[_MOST_PIECES:]
        self._texts[text] = pieces
        for piece in pieces:
            if piece not in self._owners:
                self._owners[piece] = []
                self._index.add(piece)
            self._owners[piece].append(text)
        if len(self._texts) > _MOST_TEXTS:
            self.remove(next(iter(self._texts)))

    def remove(self, text: str) -> None:
        """Drop a text, if it is here."""
        for piece in self._texts.pop(text, ()):
            owners = self._owners[piece]
            owners.remove(text)
            if not owners:
                del self._owners[piece]
                self._index.remove(piece)

    def find(
        self, string: str, whole: list[Match]
    ) -> Iterator[tuple[Match, list[str]]]:
        """Yield pieces that stand outside of whole texts, with the texts they are of.

        What more than three texts have in common is of none of them.

        Args:
            string: Where to look.
            whole: Texts that were found there as a whole.
        """
        here = {match.text for match in whole}
        for piece in self._index.find(string):
            owners = self._owners[piece.text]
            if len(owners) > _MOST_OWNERS or not here.isdisjoint(owners):
                continue
            if not any(m.start < piece.stop and piece.start < m.stop for m in whole):
                yield piece, owners
