"""Submitting a prompt with the documents that stand in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pcr_core import Document, DocumentNotFoundError
from pcr_integrations.documents._layouts import Prompt, Tools, contents, read_layout
from pcr_integrations.documents._registry import Place, registry

if TYPE_CHECKING:
    from pcr_core import Completion, Engine, SamplingParams


def submit(
    engine: Engine, prompt: Prompt, params: SamplingParams, tools: Tools | None = None
) -> Completion:
    """Submit a prompt, naming the known documents in it.

    Documents change no token and no answer. One that the messages hold and the rendered
    prompt does not (a template may cut or rewrite) is left out and counted.

    Raises:
        PcrError: See ``Engine.submit``.
    """
    places = registry().find(contents(prompt))
    if not places:
        return engine.submit(prompt, params, **_given(tools=tools))
    documents = documents_of(places)
    completion, lost = submit_with(engine, prompt, params, tools, documents)
    registry().count(len(documents), lost)
    _tell_source(engine, prompt, tools, places)
    return completion


def submit_with(
    engine: Engine,
    prompt: Prompt,
    params: SamplingParams,
    tools: Tools | None,
    documents: Sequence[Document],
) -> tuple[Completion, int]:
    """Submit a prompt with the documents of ``documents`` that it holds when rendered.

    Returns:
        The completion, and how many of the documents it does not hold.

    Raises:
        PcrError: See ``Engine.submit``.
    """
    given = _given(tools=tools, documents=documents)
    try:
        return engine.submit(prompt, params, **given), 0
    except DocumentNotFoundError as error:
        left = [one for one in documents if one not in error.documents]
    given = _given(tools=tools, documents=left)
    return engine.submit(prompt, params, **given), len(documents) - len(left)


def documents_of(places: Sequence[Place]) -> list[Document]:
    """Return the documents at some places, each once."""
    return list(dict.fromkeys(one for place in places for one in place.documents))


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value}


def _tell_source(
    engine: Engine, prompt: Prompt, tools: Tools | None, places: Sequence[Place]
) -> None:
    """Let the retriever whose document comes first learn how it was used."""
    reference = places[0].source
    source = None if reference is None else reference()
    layout = None if source is None else read_layout(prompt, tools, places)
    if source is not None and layout is not None:
        source.note(engine, layout)
