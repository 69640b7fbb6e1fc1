"""Submitting a prompt with the documents that stand in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pcr_core import Document, DocumentNotFoundError
from pcr_integrations.documents._layouts import Prompt, Tools, contents, read_layout
from pcr_integrations.documents._registry import Place, registry

if TYPE_CHECKING:
    from pcr_core import Completion, Engine, Explanation, SamplingParams


def submit(
    engine: Engine,
    prompt: Prompt,
    params: SamplingParams,
    tools: Tools | None = None,
    **options: Any,
) -> Completion:
    """Submit a prompt, naming the known documents in it.

    Documents change no token and no answer. One that the messages hold and the rendered
    prompt does not (a template may cut or rewrite) is left out and counted.

    Args:
        engine: The engine.
        prompt: Text, or messages with ``role`` and ``content``.
        params: How to sample.
        tools: Tool schemas for the chat template.
        options: Further keywords of ``Engine.submit``.

    Raises:
        PcrError: See ``Engine.submit``.
    """
    known, given = registry(), {**options, **_given(tools=tools)}
    places = known.find(contents(prompt))
    if not places:
        return engine.submit(prompt, params, **given)
    documents = documents_of(places)
    completion, lost = submit_with(engine, prompt, params, documents, **given)
    known.count(len(documents), lost)
    try:
        _tell_source(engine, prompt, tools, places)
    except BaseException:  # such as a warning that the user has made an error
        completion.cancel()
        raise
    return completion


def submit_with(
    engine: Engine,
    prompt: Prompt,
    params: SamplingParams,
    documents: Sequence[Document],
    **options: Any,
) -> tuple[Completion, int]:
    """Submit a prompt with those of some documents that it holds when rendered.

    Args:
        engine: The engine.
        prompt: Text, or messages with ``role`` and ``content``.
        params: How to sample.
        documents: The documents.
        options: Further keywords of ``Engine.submit``.

    Returns:
        The completion, and how many of the documents it does not hold.

    Raises:
        PcrError: See ``Engine.submit``.
    """
    try:
        named = _given(documents=documents)
        return engine.submit(prompt, params, **options, **named), 0
    except DocumentNotFoundError as error:
        left = _without(documents, error)
    named = _given(documents=left)
    completion = engine.submit(prompt, params, **options, **named)
    return completion, len(documents) - len(left)


def explain(engine: Engine, prompt: Prompt, tools: Tools | None = None) -> Explanation:
    """Explain a prompt with the known documents in it; see ``Engine.explain``.

    Args:
        engine: The engine.
        prompt: Text, or messages with ``role`` and ``content``.
        tools: Tool schemas for the chat template.

    Raises:
        RequestError: See ``Engine.explain``.
    """
    documents = documents_of(registry().find(contents(prompt)))
    try:
        return engine.explain(prompt, tools=tools, documents=documents)
    except DocumentNotFoundError as error:
        left = _without(documents, error)
        return engine.explain(prompt, tools=tools, documents=left)


def _without(
    documents: Sequence[Document], error: DocumentNotFoundError
) -> list[Document]:
    return [one for one in documents if one not in error.documents]


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
