"""What ``engine.explain`` returns: a table of hits, misses and their reasons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pcr_core.table import as_html, as_text, grid_html

Verdict = Literal[
    "reused",
    "end of prompt",
    "gone",
    "not stored",
    "shared chunk",
    "not known",
    "text changed",
    "order changed",
    "other documents before it",
    "other text before it",
]
"""Why a part is not wholly reused; see ``Explanation``."""

_COLUMNS = ("", "tokens", "device", "DRAM", "SSD", "computed", "why")


@dataclass(frozen=True, slots=True)
class Part:
    """The prompt, or one document in it.

    Attributes:
        name: The document's id, or ``"prompt"``.
        first_token, stop_token: Its tokens; the second is the one behind its last.
        device_tokens: How many of them are where the model computes already.
        dram_tokens, ssd_tokens: How many of them would be read from which tier.
        verdict: Why not all of them, in a word.
        why: The same in a sentence, with what helps; ``""`` if all are reused.
    """

    name: str
    first_token: int
    stop_token: int
    device_tokens: int
    dram_tokens: int
    ssd_tokens: int
    verdict: Verdict
    why: str

    @property
    def tokens(self) -> int:
        """Its length."""
        return self.stop_token - self.first_token

    @property
    def hit_tokens(self) -> int:
        """Its tokens that would be reused, from any tier."""
        return self.device_tokens + self.dram_tokens + self.ssd_tokens

    @property
    def computed_tokens(self) -> int:
        """Its tokens that would go through the model."""
        return self.tokens - self.hit_tokens


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token that differs from the earlier prompt most like this one.

    Attributes:
        index: Its index in both prompts.
        before: Some of the text that both have in front of it.
        now: The text of this prompt's token; neighbours are added where a character
            would be cut.
        then: The earlier prompt's text there; ``""`` if it ended there.
        after_now, after_then: Some of what follows in each.
    """

    index: int
    before: str
    now: str
    then: str
    after_now: str
    after_then: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a prompt would reuse if it ran now, and why not more. Any thread.

    ``print(explanation)`` gives a table; a notebook shows it as HTML. A ``Part`` has a
    name, its tokens (``first_token``, ``stop_token``), how many of them come from where
    (``device_tokens``, ``dram_tokens``, ``ssd_tokens``, together ``hit_tokens``; the
    rest are ``computed_tokens``), a ``verdict``, and a sentence, ``why``. The verdicts:

    - ``"reused"``: all of it is.
    - ``"end of prompt"``: only the end of the prompt is missing, which always runs.
    - ``"gone"``: it was here; when it left, from which tier, and for what.
    - ``"not stored"``: it was computed before, but is in no tier.
    - ``"shared chunk"``: its end shares a chunk with the text behind it, which is new.
    - ``"not known"``: no remembered prompt and no stored chunk tells of it.
    - ``"text changed"``: other text was there before.
    - ``"order changed"``: seen before, with the same documents in another order.
    - ``"other documents before it"``: seen before, behind other documents.
    - ``"other text before it"``: seen before, behind other text.

    Attributes:
        prompt: The prompt as a whole, a ``Part``.
        documents: Each document in it, in order, a ``Part`` each.
        chunk_tokens: Tokens per chunk; DRAM and SSD hold whole chunks.
        difference: Where it leaves the nearest earlier prompt: the ``index`` of the
            first differing token, the text ``before`` it, the text ``now`` and
            ``then``, and some of what follows (``after_now``, ``after_then``).
            ``None`` without an earlier prompt that has a chunk, one of the documents,
            or half of its text in common.
        hints: What looks as if it will change with every request, and what to do.
    """

    prompt: Part
    documents: tuple[Part, ...]
    chunk_tokens: int
    difference: Difference | None
    hints: tuple[str, ...]

    @property
    def hit_tokens(self) -> int:
        """Tokens that would be reused, from any tier."""
        return self.prompt.hit_tokens

    @property
    def computed_tokens(self) -> int:
        """Tokens that would go through the model."""
        return self.prompt.computed_tokens

    def __str__(self) -> str:
        return as_text(self.rows())

    def _repr_html_(self) -> str:
        parts = [
            ("prompt", self.prompt),
            *zip(self._names(), self.documents, strict=True),
        ]
        grid = grid_html(_COLUMNS, [_cells(*part) for part in parts])
        return grid + as_html([self._prompt_row(), *self._advice()])

    def rows(self) -> list[tuple[str, str]]:
        """Name and value of each line of the table."""
        prompt = self.prompt
        rows = [
            self._prompt_row(),
            ("reused", _reused(prompt)),
            ("computed", _because(f"{prompt.computed_tokens}", prompt)),
        ]
        rows += [
            (name, _because(f"{_place(part)}: reused {_reused(part)}", part))
            for name, part in zip(self._names(), self.documents, strict=True)
        ]
        return rows + self._advice()

    def _names(self) -> list[str]:
        return [f"document {_short(part.name)}" for part in self.documents]

    def _prompt_row(self) -> tuple[str, str]:
        tokens = counted(self.prompt.tokens, "token")
        full = counted(self.prompt.tokens // self.chunk_tokens, "full chunk")
        return "prompt", f"{tokens}, {full} of {self.chunk_tokens}"

    def _advice(self) -> list[tuple[str, str]]:
        at = self.difference
        differs = [] if at is None else _difference_rows(at)
        return differs + [("hint", hint) for hint in self.hints]


def counted(number: int, noun: str) -> str:
    """A number and a noun, which takes an s unless there is one of it."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _place(part: Part) -> str:
    if part.tokens == 1:
        return f"token {part.first_token}"
    return f"tokens {part.first_token} to {part.stop_token - 1}"


def _reused(part: Part) -> str:
    share = part.hit_tokens / part.tokens if part.tokens else 0.0
    text = f"{part.hit_tokens} of {part.tokens} ({share:.0%})"
    if not share:
        return text
    return (
        f"{text}: {part.device_tokens} device, {part.dram_tokens} DRAM, "
        f"{part.ssd_tokens} SSD"
    )


def _cells(name: str, part: Part) -> list[str | int]:
    tiers = [part.device_tokens, part.dram_tokens, part.ssd_tokens]
    why = f"{part.verdict}: {part.why}" if part.why else part.verdict
    return [name, part.tokens, *tiers, part.computed_tokens, why]


def _because(text: str, part: Part) -> str:
    return f"{text}; {part.verdict}: {part.why}" if part.why else text


def _difference_rows(at: Difference) -> list[tuple[str, str]]:
    was = (
        f"{at.then!r}, then {at.after_then!r}"
        if at.then
        else "nothing: the earlier prompt ends here"
    )
    return [
        ("first difference", f"token {at.index}, after {at.before!r}"),
        ("  it is", f"{at.now!r}, then {at.after_now!r}"),
        ("  it was", was),
    ]


def _short(name: str) -> str:
    """A name for one cell: no line breaks, not too wide."""
    shown = name if name.isprintable() else repr(name)
    return shown if len(shown) <= 40 else shown[:37] + "..."
