"""What each chain puts where, and so, what of the documents its next prompt reuses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integrations import layouts_langchain, layouts_llama_index
from tests.integrations.layout_kit import (
    QUESTIONS,
    Watched,
    share_probes,
    watched_engine,
)

# What the frameworks say about their own parts.
pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings(
        "ignore::langchain_core._api.LangChainDeprecationWarning"
    ),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def _loop_of_this_thread() -> Iterator[None]:
    """LlamaIndex asks for the thread's loop, makes one if need be, never closes it."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    loop.close()
    asyncio.set_event_loop(None)


@pytest.fixture(scope="module")
def watched(
    tmp_path_factory: pytest.TempPathFactory,
    document_probes: Path,
    make_tiny_model: Any,
    tiny_tokenizer: Any,
) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("layouts")
    share_probes(folder, document_probes)
    with watched_engine(folder, make_tiny_model("llama"), tiny_tokenizer) as watched:
        yield watched


def check(
    watched: Watched, name: str, ask: Callable[..., Any], reused: list[bool]
) -> None:
    first, second = QUESTIONS
    ask(name, watched.engine, first)
    watched.reused()
    ask(name, watched.engine, second)
    assert watched.ids() == {f"{name}-0", f"{name}-1"}
    assert watched.reused() == reused


@pytest.mark.parametrize("row", layouts_llama_index.ROWS)
def test_llama_index(watched: Watched, row: str) -> None:
    check(watched, f"index {row}", *layouts_llama_index.ROWS[row])


@pytest.mark.parametrize("row", layouts_langchain.ROWS)
def test_langchain(watched: Watched, row: str) -> None:
    check(watched, f"chain {row}", *layouts_langchain.ROWS[row])
