"""How the prompt for some documents will begin, one document after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pcr_core import Document
from pcr_integrations.documents import DocumentSource, Item, registry
from pcr_integrations.documents._layouts import Prompt, Tools, contents
from pcr_integrations.documents._submit import documents_of

if TYPE_CHECKING:
    from pcr_core import Engine


@dataclass(frozen=True, slots=True)
class Step:
    """The beginning of a prompt up to the end of one of its documents.

    Attributes:
        prompt: Text, or turns of a chat.
        documents: The documents in it, for ``engine.forget``.
        tools: Tools for the chat template.
    """

    prompt: Prompt
    documents: Sequence[Document] = ()
    tools: Tools | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What to prefill, shortest first: each step begins with the one before it.

    Attributes:
        engine: Whose prompt it will be.
        steps: One for each document.
    """

    engine: Engine
    steps: Sequence[Step]


Planner = Callable[[Sequence[Any]], Plan | None]
"""Says how the prompt for some documents will begin; ``None`` if that is not known."""


class Predicted:
    """A planner that goes by the prompts that a retriever's documents were in.

    Args:
        source: The wrapper's source; what it plans for are its ``Item``, in the order
            in which they would be handed over.
    """

    def __init__(self, source: DocumentSource) -> None:
        self._source = source

    def __call__(self, items: Sequence[Item]) -> Plan | None:
        """Return the plan; ``None`` before the first prompt was seen."""
        # Named in the prefill, or ``forget`` would not know what is stored of them.
        registry().add((form for item in items for form in item.forms), self._source)
        counts = range(1, len(items) + 1)
        guesses = [self._source.predict(items[:count]) for count in counts]
        engine = None if not guesses or guesses[0] is None else guesses[0].engine()
        if engine is None:
            return None
        steps: list[Step] = []
        for guess in guesses:
            if guess is not None and (not steps or guess.prompt != steps[-1].prompt):
                places = registry().find(contents(guess.prompt))
                steps.append(Step(guess.prompt, documents_of(places), guess.tools))
        return Plan(engine, steps)


def explicit(
    engine: Engine,
    prompt_of: Callable[[Sequence[Any]], Prompt],
    named: Callable[[Any], Document] | None = None,
) -> Planner:
    """Return a planner for prompts whose beginning is known.

    Args:
        engine: Whose prompt it will be.
        prompt_of: Returns the beginning of the prompt for some documents, from its
            first character to the end of the last document.
        named: Returns a document as it stands in the prompt, with its id; needed if
            ``engine.forget`` is to remove what was prefilled of it.
    """

    def plan(items: Sequence[Any]) -> Plan | None:
        steps = []
        for count in range(1, len(items) + 1):
            known = () if named is None else tuple(map(named, items[:count]))
            steps.append(Step(prompt_of(items[:count]), known))
        return Plan(engine, steps)

    return plan
