"""How a chain builds its prompts: what stands before and between the documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pcr_integrations._tools import ChatTurn
from pcr_integrations.documents._registry import Place

Prompt = str | Sequence[ChatTurn]
Tools = Sequence[Mapping[str, Any]]

_LONGEST_SEPARATOR = 200
"""Longer ones hold text of their own, such as a document that is not known."""
_ALIKE = 4
"""Characters that two fronts made by one template share at one end, at least."""


def contents(prompt: Prompt) -> list[str]:
    """Return the texts in which documents can stand."""
    if isinstance(prompt, str):
        return [prompt]
    return [str(turn.get("content") or "") for turn in prompt]


@dataclass(frozen=True)
class Front:
    """Everything in front of the first document of a prompt.

    Attributes:
        turns: Whole turns of the chat.
        turn: The turn in which the document stands, without its content; ``None`` for
            a text prompt.
        text: What precedes the document there.
        tools: Tools for the chat template.
    """

    turns: Sequence[ChatTurn]
    turn: ChatTurn | None
    text: str
    tools: Tools | None

    def prompt(self, behind: str = "") -> Prompt:
        """Return a prompt that ends with ``behind``."""
        if self.turn is None:
            return self.text + behind
        return [*self.turns, {**self.turn, "content": self.text + behind}]

    @property
    def words(self) -> str:
        """All its text."""
        return "\n".join([*contents(self.turns), self.text])

    @property
    def in_tool_result(self) -> bool:
        """Whether the document is what a tool has returned."""
        return self.turn is not None and self.turn["role"] == "tool"

    def is_like(self, other: Front) -> bool:
        """Whether the same template may have made both."""
        if self._shape() != other._shape():
            return False
        ours, theirs = self.words, other.words
        if min(len(ours), len(theirs)) < _ALIKE:
            return False
        return ours[:_ALIKE] == theirs[:_ALIKE] or ours[-_ALIKE:] == theirs[-_ALIKE:]

    def _shape(self) -> tuple[Any, ...]:
        turns = [*self.turns, *([] if self.turn is None else [self.turn])]
        return [turn["role"] for turn in turns], self.tools


@dataclass(frozen=True)
class Layout:
    """A front, the documents behind it, and what stands between them.

    Attributes:
        front: What precedes the first document.
        texts: The documents, in the order of the prompt.
        separators: What stands between them, one less than documents.
        rest: All that follows the front in the same content.
    """

    front: Front
    texts: Sequence[str]
    separators: Sequence[str]
    rest: str

    def join(self, texts: Sequence[str]) -> str:
        """Join other documents as these are, as far as it is known how."""
        joined = texts[0]
        for index, text in enumerate(texts[1:]):
            separator = self._separator(index)
            if separator is None:
                break
            joined += separator + text
        return joined

    def _separator(self, index: int) -> str | None:
        known = self.separators
        if index < len(known):
            found = known[index]
        elif known and len(set(known)) == 1:
            found = known[0]
        else:
            return None
        return found if len(found) <= _LONGEST_SEPARATOR else None


def read_layout(
    prompt: Prompt, tools: Tools | None, places: Sequence[Place]
) -> Layout | None:
    """Read the layout of a prompt.

    Args:
        prompt: Text, or the turns of a chat.
        tools: Tools for the chat template.
        places: The documents in its contents, in order.

    Returns:
        ``None`` if the first document stands there escaped.
    """
    part, begin = places[0].part, places[0].start
    if begin is None:
        return None
    content = contents(prompt)[part]
    texts, separators, stop = [places[0].text], [], places[0].stop
    for place in places[1:]:
        if place.part != part or place.start is None:
            break
        if stop is not None and place.start >= stop:
            separators.append(content[stop : place.start])
            texts.append(place.text)
            stop = place.stop
    front = _front(prompt, part, content[:begin], tools)
    return Layout(front, texts, separators, content[begin:])


def _front(prompt: Prompt, part: int, text: str, tools: Tools | None) -> Front:
    if isinstance(prompt, str):
        return Front((), None, text, tools)
    turn = {key: value for key, value in prompt[part].items() if key != "content"}
    return Front(list(prompt[:part]), turn, text, tools)
