"""What a retriever's past prompts say about its next one. The owner has a lock."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import ReferenceType, ref

from pcr_integrations.documents._layouts import Front, Layout, Prompt, Tools

if TYPE_CHECKING:
    from pcr_core import Engine

_MOST_LAYOUTS = 4
_MOST_OPEN = 64
_MOST_SEQUENCES = 64
_MOST_WRONG = 2
"""Wrong predictions in a row, after which a front must be seen twice to be believed."""


@dataclass(frozen=True, eq=False)
class Prediction:
    """How the prompt for some documents will begin.

    Attributes:
        engine: Whose prompt; it may be gone.
        front: What precedes the documents.
        text: The documents, joined as in earlier prompts, as far as that is known.
    """

    engine: ReferenceType[Engine]
    front: Front
    text: str

    @property
    def prompt(self) -> Prompt:
        """The beginning as a prompt: text, or turns of a chat."""
        return self.front.prompt(self.text)

    @property
    def tools(self) -> Tools | None:
        """Tools that belong to it."""
        return self.front.tools

    def holds_for(self, layout: Layout) -> bool:
        """Whether a prompt begins as predicted."""
        return self.front == layout.front and layout.rest.startswith(self.text)


@dataclass(slots=True, eq=False)
class _Known:
    """A layout seen in prompts to an engine, and whether it is believed."""

    engine: ReferenceType[Engine]
    layout: Layout
    trusted: bool


@dataclass(slots=True, eq=False)
class Handed:
    """Documents handed over, until a prompt with any of them comes.

    Attributes:
        query: What they were searched with.
        texts: Their texts, in order.
        prediction: What was predicted of their prompt.
        seen: Whether such a prompt has come.
    """

    query: str
    texts: Sequence[str]
    prediction: Prediction | None = None
    seen: bool = False


class Learner:
    """Learns layouts from prompts and predicts how the next one begins.

    Only the prompt that begins with the first document handed over is predicted: a
    chain that asks about each document by itself has no other that can be known.

    Attributes:
        predicted: Predictions made.
        confirmed: Prompts that began as predicted.
        wrong: Prompts that did not.
        unused: Predictions that no prompt came for.
    """

    def __init__(self) -> None:
        self.predicted = self.confirmed = self.wrong = self.unused = 0
        self._layouts: list[_Known] = []  # newest last
        self._handed: OrderedDict[int, Handed] = OrderedDict()
        self._sequences: deque[Sequence[str]] = deque(maxlen=_MOST_SEQUENCES)
        self._wrong_in_a_row = 0
        self._next = 0

    def predict(self, texts: Sequence[str]) -> Prediction | None:
        """Return how a prompt with these documents would begin, if that is known."""
        for known in reversed(self._layouts):
            engine = known.engine()
            if known.trusted and texts and engine is not None and not engine.closed:
                layout = known.layout
                return Prediction(known.engine, layout.front, layout.join(texts))
        return None

    def sequences(self) -> list[Sequence[str]]:
        """Return the documents of earlier prompts, the newest prompt first."""
        return list(reversed(self._sequences))

    def expect(self, handed: Handed) -> None:
        """Take note that these documents are on their way to a prompt."""
        self._handed[self._next] = handed
        self._next += 1
        self.predicted += handed.prediction is not None
        if len(self._handed) > _MOST_OPEN:
            _, oldest = self._handed.popitem(last=False)
            self.unused += oldest.prediction is not None and not oldest.seen

    def note(self, engine: Engine, layout: Layout) -> Handed | None:
        """Learn from a prompt; returns the handover that its documents are from."""
        self._remember(layout.texts)
        handed = self._handover_of(layout.texts)
        if handed is None:
            return None
        if not handed.seen:
            handed.seen = True
            if handed.prediction is not None:
                self._judge(handed.prediction, layout)
        if layout.texts[0] == handed.texts[0]:
            self._learn(engine, layout)
        return handed

    def _remember(self, texts: Sequence[str]) -> None:
        sequence = tuple(texts)
        if sequence in self._sequences:
            self._sequences.remove(sequence)
        self._sequences.append(sequence)

    def _handover_of(self, texts: Sequence[str]) -> Handed | None:
        """The one that shares most documents; of those, not seen first, then newest."""
        wanted, best, found = set(texts), (0, False), None
        for handed in reversed(self._handed.values()):
            fit = len(wanted.intersection(handed.texts)), not handed.seen
            if fit[0] and fit > best:
                best, found = fit, handed
        return found

    def _judge(self, prediction: Prediction, layout: Layout) -> None:
        if prediction.holds_for(layout):
            self.confirmed += 1
            self._wrong_in_a_row = 0
            return
        self.wrong += 1
        self._wrong_in_a_row += 1
        for known in self._layouts:
            if known.layout.front == prediction.front:
                known.trusted = False

    def _learn(self, engine: Engine, layout: Layout) -> None:
        for known in self._layouts:
            if known.engine() is engine and known.layout.front == layout.front:
                self._layouts.remove(known)
                if not _extends(layout, known.layout):
                    known.layout = layout
                known.trusted = True
                break
        else:
            known = _Known(ref(engine), layout, self._wrong_in_a_row < _MOST_WRONG)
        self._layouts.append(known)
        del self._layouts[:-_MOST_LAYOUTS]


def _extends(short: Layout, long: Layout) -> bool:
    """Whether the second says all that the first does of separators, and more."""
    own = list(short.separators)
    return len(own) < len(long.separators) and list(long.separators)[: len(own)] == own
