"""Texts that retrievers have handed over, so that prompts can be searched for them.

A language model object never receives documents, only a finished prompt. So whoever
hands documents to a chain notes their texts here, and the language model looks which of
them stand in the messages, before a template escapes or trims them.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import ReferenceType, ref

from pcr_core import Document
from pcr_integrations._counters import Counters
from pcr_integrations.documents._escapes import unescaped
from pcr_integrations.documents._pieces import PieceIndex
from pcr_integrations.documents._text_index import SHORTEST, Match, TextIndex

if TYPE_CHECKING:
    from pcr_integrations.documents._source import DocumentSource

MAX_BYTES = 64 << 20
_ENTRY_BYTES = 1000
"""What an entry takes beside its text: index, ids, dictionaries (measured)."""
_MOST_IDS = 16
_ESCAPED_TWICE = 2


@dataclass(slots=True, eq=False)
class Entry:
    """One text.

    Attributes:
        text: Without the white space around it.
        ids: What it has been called, newest last.
        source: Who handed it over last.
    """

    text: str
    ids: dict[str, None] = field(default_factory=dict)
    source: ReferenceType[DocumentSource] | None = None

    @property
    def nbytes(self) -> int:
        """Memory it takes, about."""
        return sys.getsizeof(self.text) + _ENTRY_BYTES


@dataclass(frozen=True, slots=True)
class Place:
    """A known text in one of several strings.

    Attributes:
        part: Index of the string.
        start, stop: Its characters there; ``None`` if it stands there escaped.
        text: The text, without the white space around it; or a piece of it.
        documents: That under each of its ids.
        source: Who handed it over last.
    """

    part: int
    start: int | None
    stop: int | None
    text: str
    documents: tuple[Document, ...]
    source: ReferenceType[DocumentSource] | None = field(compare=False, default=None)


@dataclass(frozen=True, slots=True)
class DocumentStats(Counters):
    """Counters of a ``DocumentRegistry``, since it was made.

    Attributes:
        texts: How many it holds now.
        bytes: Memory they take, about; the oldest leave above ``max_bytes``.
        evicted: Texts that have left for room.
        too_short: Texts handed over that were not taken: below 16 characters a text
            stands in prompts by chance.
        prompts: Prompts in which documents were found.
        found: Documents found in them, each once per prompt.
        lost: Of these, documents that the rendered prompt did not hold any more, so
            that the engine was not told of them.
    """

    texts: int = 0
    bytes: int = 0
    evicted: int = 0
    too_short: int = 0
    prompts: int = 0
    found: int = 0
    lost: int = 0


class DocumentRegistry:
    """Exact texts and what they are called. Any thread.

    There is one per process, ``pcr_integrations.documents.registry()``: a retriever is
    built without knowing which model its documents will reach.

    The same text may be handed over under several ids (the 16 newest count). An id
    may have several texts, which are versions or pieces of one document: all of them
    are found, and ``engine.forget(id)`` removes what any of them has left.

    Args:
        max_bytes: Memory for texts and index, about; the texts not handed over and not
            found for longest leave first.

    Raises:
        ValueError: If ``max_bytes`` is not positive.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        if max_bytes <= 0:
            raise ValueError(f"max_bytes must be above 0, not {max_bytes}")
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._index = TextIndex()
        self._pieces = PieceIndex()
        self._bytes = 0
        self._evicted = self._too_short = 0
        self._prompts = self._found = self._lost = 0

    def add(
        self, documents: Iterable[Document], source: DocumentSource | None = None
    ) -> None:
        """Note documents.

        Args:
            documents: Texts with their ids.
            source: Who hands them over.
        """
        with self._lock:
            for document in documents:
                self._add(document, None if source is None else ref(source))

    def find(self, parts: Sequence[str]) -> list[Place]:
        """Say which texts stand in some strings, such as the contents of messages.

        A text of which a longer known text covers an occurrence is not reported for
        that occurrence. Where a string has backslashes, it is also searched with its
        escapes resolved, once and twice: results of tools are JSON.

        Of the 256 texts handed over last, pieces of 80 characters or more are found
        where the whole is not: runs of whole sentences or lines. A chain that cuts
        documents to fit its context window leaves those.

        Returns:
            In the order in which they stand; a text that stands several times in one
            string is there several times.
        """
        with self._lock:
            return [
                place for i, part in enumerate(parts) for place in self._in(i, part)
            ]

    def count(self, found: int, lost: int = 0) -> None:
        """Count a prompt with ``found`` documents, of which ``lost`` were left out."""
        with self._lock:
            self._prompts += 1
            self._found += found
            self._lost += lost

    def discard(self, id: str) -> int:
        """Drop an id, and the texts that have no other; returns how many texts had it.

        ``engine.forget(id)`` removes what the engine stores; this is about the text
        that is kept here for searching.
        """
        with self._lock:
            named = [entry for entry in self._entries.values() if id in entry.ids]
            for entry in named:
                del entry.ids[id]
                if not entry.ids:
                    self._drop(entry)
            return len(named)

    def clear(self) -> None:
        """Drop all texts; counters stay."""
        with self._lock:
            self._entries.clear()
            self._index = TextIndex()
            self._pieces = PieceIndex()
            self._bytes = 0

    @property
    def stats(self) -> DocumentStats:
        """Counters as they are now."""
        with self._lock:
            return DocumentStats(
                texts=len(self._entries),
                bytes=self._bytes,
                evicted=self._evicted,
                too_short=self._too_short,
                prompts=self._prompts,
                found=self._found,
                lost=self._lost,
            )

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, text: object) -> bool:
        return isinstance(text, str) and text.strip() in self._entries

    def renew_lock(self) -> None:
        """In a forked child: the parent's lock may be held by a thread that is gone."""
        self._lock = threading.Lock()

    # --- inside, under the lock ---

    def _add(
        self, document: Document, source: ReferenceType[DocumentSource] | None
    ) -> None:
        text = document.text.strip()
        if len(text) < SHORTEST:
            self._too_short += 1
            return
        entry = self._entries.get(text)
        if entry is None:
            entry = self._entries[text] = Entry(text)
            self._index.add(text)
            self._bytes += entry.nbytes
        entry.ids.pop(document.id, None)
        entry.ids[document.id] = None
        while len(entry.ids) > _MOST_IDS:
            del entry.ids[next(iter(entry.ids))]
        entry.source = source
        self._entries.move_to_end(text)
        self._pieces.add(text)
        while self._bytes > self._max_bytes and len(self._entries) > 1:
            self._drop(next(iter(self._entries.values())))
            self._evicted += 1

    def _drop(self, entry: Entry) -> None:
        del self._entries[entry.text]
        self._index.remove(entry.text)
        self._pieces.remove(entry.text)
        self._bytes -= entry.nbytes

    def _in(self, part: int, string: str) -> list[Place]:
        whole = self._index.find(string)
        places = [self._place(part, one, one.text) for one in whole]
        for piece, owners in self._pieces.find(string, whole):
            places += [self._place(part, piece, owner) for owner in owners]
        places.sort(key=lambda place: (place.start, place.stop))
        known = {place.text for place in places}
        for _ in range(_ESCAPED_TWICE):
            if "\\" not in string:
                break
            string = unescaped(string)
            for match in self._index.find(string):
                if match.text not in known:
                    known.add(match.text)
                    places.append(self._place(part, None, match.text))
        return places

    def _place(self, part: int, match: Match | None, owner: str) -> Place:
        """Where a text stands, or a piece of it; ``None`` if it is escaped there."""
        self._entries.move_to_end(owner)
        entry = self._entries[owner]
        text = owner if match is None else match.text
        named = tuple(Document(id=id, text=text) for id in entry.ids)
        if match is None:
            return Place(part, None, None, text, named, entry.source)
        return Place(part, match.start, match.stop, text, named, entry.source)


_REGISTRY = DocumentRegistry()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _REGISTRY.renew_lock())


def registry() -> DocumentRegistry:
    """Return the registry of this process, which every wrapper uses."""
    return _REGISTRY
