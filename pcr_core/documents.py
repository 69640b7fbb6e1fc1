"""Documents inside a prompt: what they are called, and which tokens they became.

A language model object is handed a finished prompt. Which documents are in it is known
to the retriever only, so their texts are searched in the rendered prompt; the tokens
stay those of the whole prompt. Pure functions and frozen values, any thread.
"""

from __future__ import annotations

import hashlib
import json
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pcr_core.errors import DocumentNotFoundError, RequestError

CharSpan = tuple[int, int]
"""First character, and the one behind the last."""
Form = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Document:
    """A document that a prompt contains.

    Attributes:
        id: The caller's name for it; ``engine.forget`` takes it. Several texts may
            share one id, such as the pieces of one file.
        text: Its text as handed to the prompt. White space around it may differ there,
            and it may stand inside a JSON string, as tool results do, or inside a
            Python string.

    Raises:
        RequestError: If either is not a string, or has no visible character.
    """

    id: str
    text: str

    def __post_init__(self) -> None:
        for name, value in (("id", self.id), ("text", self.text)):
            if not isinstance(value, str):
                raise RequestError(
                    f"a document's {name} must be a string, not {type(value).__name__}"
                )
            if not value.strip():
                raise RequestError(
                    f"a document's {name} is empty; leave such a document out"
                    if name == "text"
                    else "a document's id is empty; give it a name that stays the same"
                )


@dataclass(frozen=True, slots=True)
class DocumentSpan:
    """Where one document stands in one prompt. Holds no text.

    Attributes:
        document: Its id.
        first_token: First token that holds any of it, never a later one.
        stop_token: The token behind the last that holds any of it.
        text_digest: 16 bytes naming its text, to notice when that changes.
        digest: ``document_digest`` of its id.
    """

    document: str
    first_token: int
    stop_token: int
    text_digest: bytes = b""
    digest: bytes = b""


@dataclass(frozen=True, slots=True)
class ForgetReceipt:
    """What ``engine.forget`` has removed.

    Attributes:
        document: Its id.
        keys: Chunk keys (64 hex digits) of everything that was removed, from either
            tier. Empty if nothing was known under this id.
        files: Names of the chunk files that were removed.
        left: Names of files that could not be removed now. They are never read again,
            and go with the next write or opening.
        ssd_bytes: Bytes of ``files``.
        dram_chunks: Chunks removed from this process's memory.
        prompts: Prompts dropped from what ``explain`` remembers.
        epoch: Number of this removal in the folder; every process that uses the folder
            drops its copies when it sees it, within seconds. 0 without an SSD tier.
    """

    document: str
    keys: tuple[str, ...]
    files: tuple[str, ...]
    left: tuple[str, ...]
    ssd_bytes: int
    dram_chunks: int
    prompts: int
    epoch: int

    def __str__(self) -> str:
        if not self.keys:
            return f"forgot {self.document!r}: nothing was stored under this id"
        text = (
            f"forgot {self.document!r}: {len(self.keys)} chunks, {len(self.files)} "
            f"files ({self.ssd_bytes} bytes), {self.dram_chunks} copies in memory"
        )
        return text + (f"; {len(self.left)} files are left" if self.left else "")


def document_digest(namespace: str, id: str) -> bytes:
    """Return 16 bytes naming a document of a tenant.

    Args:
        namespace: The tenant, as in ``EngineConfig.namespace``.
        id: ``Document.id``.
    """
    return _digest(b"document", namespace, id)


def _digest(tag: bytes, *fields: str) -> bytes:
    """blake2b-128 over tagged, length-prefixed fields, as in ``index.chunk``.

    Half the length of a chunk key: it names a few documents, not every chunk.
    """
    state = hashlib.blake2b(digest_size=16, person=b"pcr-doc-1")
    for part in (tag, *(field.encode("utf-8", "surrogatepass") for field in fields)):
        state.update(struct.pack("<Q", len(part)))
        state.update(part)
    return state.digest()


def head_chunk(span: DocumentSpan, chunk_tokens: int) -> int:
    """Index of the first chunk with any of the document; all later ones follow it."""
    return span.first_token // chunk_tokens


def locate(
    text: str,
    documents: Sequence[Document],
    token_spans: Sequence[CharSpan],
    namespace: str = "",
) -> list[DocumentSpan]:
    """Find every occurrence of every document.

    Documents may overlap, contain each other, or share a text or an id: each gets its
    own spans. Occurrences of one document among themselves do not overlap. A span may
    hold a token more than the document has characters in, never one less, so that
    whoever deletes from its head on deletes all of it.

    Args:
        text: The rendered prompt.
        documents: What to look for; an equal one given twice counts once.
        token_spans: The characters of each token of the prompt, in order. Gaps are
            fine: some tokenizers leave out blanks around a token.
        namespace: The tenant, see ``document_digest``.

    Returns:
        Spans in the order of the prompt; of two with the same tokens, the document
        given first comes first.

    Raises:
        DocumentNotFoundError: If any are not in the text; it names all of them.
        RequestError: For what is no document.
    """
    tokens = _TokenMap(token_spans)
    places = {one: _occurrences(text, one.text) for one in _distinct(documents)}
    if missing := [document for document, found in places.items() if not found]:
        raise DocumentNotFoundError(missing)
    spans = []
    for document, found in places.items():
        names = _digest(b"text", document.text), document_digest(namespace, document.id)
        spans += [DocumentSpan(document.id, *tokens.range(*at), *names) for at in found]
    return sorted(spans, key=lambda span: (span.first_token, span.stop_token))


def _distinct(documents: Sequence[Document]) -> list[Document]:
    given = [documents] if isinstance(documents, Document) else list(documents)
    for one in given:
        if not isinstance(one, Document):
            raise RequestError(
                f"documents must be Document objects, not {type(one).__name__}; "
                "write documents=[Document(id=..., text=...)]"
            )
    return list(dict.fromkeys(given))


# --- characters ---


def _plain(text: str) -> str:
    return text


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _ascii_json(text: str) -> str:
    return json.dumps(text)[1:-1]


def _python(text: str) -> str:
    return repr(text)[1:-1]


def _python_quoted(text: str) -> str:
    return repr(f'{text}"')[1:-2]  # as in a string that holds a double quote


# Chat templates put tool results through `tojson`, and the result of a tool is often
# JSON by itself: escaped once or twice. Some chains print a Python list of texts.
_FORMS: tuple[Form, ...] = (
    _plain,
    _json,
    _ascii_json,
    lambda text: _json(_json(text)),
    lambda text: _json(_ascii_json(text)),
    _python,
    _python_quoted,
)


def _occurrences(text: str, wanted: str) -> list[CharSpan]:
    """Where ``wanted`` stands, in any form, with as much of its own margins as is left.

    Only its core is searched, because templates strip what surrounds a message.
    """
    core = wanted.strip()
    lead, _, trail = wanted.partition(core)
    forms = {tuple(map(form, (lead, core, trail))): form for form in reversed(_FORMS)}
    found: dict[int, CharSpan] = {}
    for (_, escaped, _), form in forms.items():
        at = text.find(escaped)
        while at >= 0:
            stop = at + len(escaped)
            known = found.get(at, (at, stop))
            found[at] = (
                min(known[0], at - _left_margin(text, at, lead, form)),
                max(known[1], stop + _right_margin(text, stop, trail, form)),
            )
            at = text.find(escaped, stop)
    return sorted(set(found.values()))


def _left_margin(text: str, at: int, lead: str, form: Form) -> int:
    for cut in range(len(lead)):
        margin = form(lead[cut:])
        if text.endswith(margin, 0, at):
            return len(margin)
    return 0


def _right_margin(text: str, at: int, trail: str, form: Form) -> int:
    for cut in range(len(trail), 0, -1):
        margin = form(trail[:cut])
        if text.startswith(margin, at):
            return len(margin)
    return 0


# --- characters to tokens ---


class _TokenMap:
    """Finds the tokens of a range of characters.

    A character that no token claims (a trimmed blank, one that the tokenizer drops) may
    belong to the token on either side of the gap, so both are taken.
    """

    def __init__(self, token_spans: Sequence[CharSpan]) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        start = stop = 0
        for first, behind in token_spans:
            if first == behind <= stop:
                start = stop  # a special token that stands in no text: (0, 0)
            else:  # comparisons, not max(): this runs for every token of a prompt
                start = first if first > start else start
                stop = behind if behind > stop else stop
            self._starts.append(start)
            self._stops.append(stop)

    def range(self, start: int, stop: int) -> tuple[int, int]:
        """First token, and the one behind the last."""
        last = len(self._starts) - 1
        first = min(bisect_right(self._stops, start), last)
        if self._starts[first] > start and first > 0:
            first -= 1
        end = max(bisect_left(self._starts, stop) - 1, first)
        if self._stops[end] < stop and end < last:
            end += 1
        return first, end + 1
