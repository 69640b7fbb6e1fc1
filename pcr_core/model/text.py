"""From token ids to text while they arrive: partial characters and stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_UNFINISHED = "\ufffd"


class TextStream:
    """Turns one request's tokens into text that can be shown at once.

    Holds back an incomplete multi-byte character, and any tail that may be the
    beginning of a stop string; finds stop strings in the text, so across token
    borders. What ``push`` and ``finish`` return, joined, is the whole text.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._tokens: list[int] = []
        # Decoding restarts a few tokens back: some tokenizers strip the space of a
        # first token, so a token's text depends on there being one before it.
        self._context = 0
        self._read = 0
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Add a token; return the text that is now certain."""
        self._tokens.append(token)
        before = self._decode(self._context, self._read)
        now = self._decode(self._context, len(self._tokens))
        if len(now) <= len(before) or now.endswith(_UNFINISHED):
            return ""
        self._context, self._read = self._read, len(self._tokens)
        return self._release(now[len(before) :])

    def finish(self) -> str:
        """No more tokens: return what was held back."""
        if self.stopped:
            return ""
        before = self._decode(self._context, self._read)
        rest = self._decode(self._context, len(self._tokens))[len(before) :]
        out = self._release(rest)
        if not self.stopped:
            out, self._held = out + self._held, ""
        return out

    def _decode(self, start: int, stop: int) -> str:
        text: str = self._tokenizer.decode(
            self._tokens[start:stop],
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )
        return text

    def _release(self, text: str) -> str:
        text = self._held + text
        self._held = ""
        found = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            return text[: min(found)]
        keep = self._possible_stop(text)
        if keep:
            text, self._held = text[:-keep], text[-keep:]
        return text

    def _possible_stop(self, text: str) -> int:
        """Length of the longest tail of ``text`` that begins a stop string."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stop):
                return size
        return 0
