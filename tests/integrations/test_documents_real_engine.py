"""Ordinary chains on a real engine: documents explained, prefetched and forgotten."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from langchain_core.documents import Document
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.runnables import RunnableLambda

from pcr_core import Document as NamedText
from pcr_core import Engine, EngineConfig
from pcr_integrations import documents
from pcr_integrations.documents._hints import HINTS
from pcr_integrations.langchain import ChatPCR, PCRRetriever
from tests.engine.kit import until
from tests.integrations.layout_kit import share_probes

GRID = 16
FOUND = [
    Document(id=name, page_content=f"The {name} has a page of its own, {name * 20}.")
    for name in ("ferry", "tides", "piers")
]
# As Llama 3 does with the results of tools, and with white space removed.
ESCAPING = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'tool' %}{{ message['content'] | tojson }}"
    "{% else %}{{ message['content'] | trim }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
Opened = Callable[..., Engine]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """On a busy machine two threads that wait for each other take 20 times longer."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def opened(
    make_tiny_model: Any, tiny_tokenizer: Any, tmp_path: Path, document_probes: Path
) -> Opened:
    share_probes(tmp_path, document_probes)

    def make(**settings: Any) -> Engine:
        config = EngineConfig(
            cache_dir=tmp_path,
            dram_bytes="8MiB",
            ssd_bytes="8MiB",
            chunk_tokens=GRID,
            resident_rows=0,
            **settings,
        )
        return Engine(config, model=make_tiny_model("llama"), tokenizer=tiny_tokenizer)

    return make


def messages(found: list[Document], question: str = "When?") -> list[Any]:
    text = "\n\n".join(document.page_content for document in found)
    return [SystemMessage(f"Use this:\n{text}"), HumanMessage(question)]


def turns(found: list[Document], question: str = "When?") -> list[dict[str, Any]]:
    system, human = messages(found, question)
    return [
        {"role": "system", "content": system.content},
        {"role": "user", "content": human.content},
    ]


def names(found: list[Document]) -> list[NamedText]:
    return [NamedText(one.id or "", one.page_content) for one in found]


def test_a_chain_can_be_explained_and_a_document_forgotten(
    opened: Opened,
) -> None:
    with opened() as engine:
        retriever = PCRRetriever(inner=RunnableLambda(lambda query: FOUND[:2]))
        chain = retriever | messages | ChatPCR(engine=engine, max_tokens=2)
        first = chain.invoke("q")
        swapped = engine.explain(turns(FOUND[1::-1]), documents=names(FOUND[:2]))
        assert {part.verdict for part in swapped.documents} == {"order changed"}
        found = documents.explain(engine, turns(FOUND[1::-1]))
        assert found == swapped
        assert len(documents.explain(engine, "nothing in here").documents) == 0
        receipt = engine.forget("tides")
        assert receipt.keys
        again = engine.explain(turns(FOUND[:2]), documents=names(FOUND[:2]))
        ferry, tides = again.documents
        assert ferry.hit_tokens > ferry.tokens - 2 * GRID
        assert tides.hit_tokens == 0
        assert chain.invoke("q").content == first.content


def test_predicted_documents_are_read_from_ssd_before_the_prompt_comes(
    opened: Opened,
) -> None:
    with opened() as engine:
        engine.warm([turns(FOUND)])
    with opened() as engine:
        retriever = PCRRetriever(
            inner=RunnableLambda(lambda query: FOUND[: int(query)])
        )
        model = ChatPCR(engine=engine, max_tokens=2)
        model.invoke(messages(retriever.invoke("1")))
        model.invoke(messages(retriever.invoke("2")))
        before = engine.explain(turns(FOUND)).prompt
        assert before.ssd_tokens > GRID * 3
        found = retriever.invoke("3")
        assert HINTS.wait(60)
        until(lambda: engine.explain(turns(FOUND)).prompt.ssd_tokens < GRID * 3)
        answer = model.invoke(messages(found))
        assert retriever.stats.confirmed == 2
        metadata = answer.response_metadata["pcr"]["usage"]
        assert metadata["cached_tokens"] >= before.hit_tokens - GRID


def test_the_cache_decides_the_order(opened: Opened) -> None:
    with opened() as engine:
        model = ChatPCR(engine=engine, max_tokens=2)
        inner = RunnableLambda(lambda query: [FOUND[int(number)] for number in query])
        retriever = PCRRetriever(inner=inner, order="cache")
        model.invoke(messages(retriever.invoke("012")))
        found = retriever.invoke("210")
        assert found == FOUND
        assert retriever.last is not None
        expected = engine.explain(turns(FOUND, "?")).hit_tokens
        assert retriever.last.cached_tokens is not None
        assert expected - 2 * GRID < retriever.last.cached_tokens <= expected
        answer = model.invoke(messages(found, "Where to?"))
        usage = answer.response_metadata["pcr"]["usage"]
        assert usage["cached_tokens"] >= retriever.last.cached_tokens


def test_documents_in_escaped_and_trimmed_turns_are_known(
    opened: Opened, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny_tokenizer, "chat_template", ESCAPING)
    odd = Document(id="odd", page_content='\n "Quoted", and\nbroken \\ lines ✓ \n')
    with opened() as engine:
        PCRRetriever(inner=RunnableLambda(lambda query: [odd])).invoke("q")
        model = ChatPCR(engine=engine, max_tokens=1)
        for role in ("user", "tool"):
            model.invoke(
                [
                    HumanMessage(f"question for the {role}"),
                    {"role": "assistant", "content": "", "tool_calls": []},
                    {"role": role, "content": odd.page_content, "tool_call_id": "1"},
                ]
            )
            assert engine.forget("odd").keys, role


def test_cached_tokens_are_those_of_explain(opened: Opened) -> None:
    with opened() as engine:
        prompts = [turns(FOUND[:count]) for count in (1, 2, 3)]
        assert engine.cached_tokens(prompts) == [0, 0, 0]
        engine.generate([prompts[1]])
        told = engine.cached_tokens(prompts)
        assert told == [engine.explain(prompt).hit_tokens for prompt in prompts]
        assert 0 < told[0] < told[1]
        assert engine.cached_tokens([]) == []
