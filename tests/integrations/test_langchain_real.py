"""LangChain models on a real engine: counts, stops, reuse, threads, the suite."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_classic.chains import create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import (
    AIMessage,
    HumanMessage,
    SystemMessage,
    trim_messages,
)
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_tests.integration_tests import ChatModelIntegrationTests

from pcr_core import Engine, EngineConfig
from pcr_integrations.langchain import PCRLLM, ChatPCR
from tests.integrations.asking import ask_twice

SEINE = "The Seine flows through Paris and the Thames through London. " * 2
AARE = "Bern lies on the Aare and Rome on the Tiber, as everybody knows. " * 2
HISTORY = [
    SystemMessage("Be brief."),
    HumanMessage("Which river?"),
    AIMessage("The Seine."),
    HumanMessage("And then?"),
]


def fresh(name: str) -> str:
    """Documents that no other test has asked about."""
    return f"({name}) {SEINE}"


@pytest.fixture
def chat(real_engine: Engine) -> ChatPCR:
    return ChatPCR(engine=real_engine, max_tokens=8)


# --- answers and counts ---


def test_the_four_ways_agree(chat: ChatPCR) -> None:
    async def both() -> tuple[str, str]:
        streamed = [piece.text async for piece in chat.astream(HISTORY)]
        return (await chat.ainvoke(HISTORY)).text, "".join(streamed)

    streamed = "".join(piece.text for piece in chat.stream(HISTORY))
    batched = [answer.text for answer in chat.batch([HISTORY, HISTORY])]
    answers = [chat.invoke(HISTORY).text, streamed, *batched, *asyncio.run(both())]
    assert len(set(answers)) == 1


def test_counts_are_those_of_the_chat_template(
    chat: ChatPCR, real_engine: Engine
) -> None:
    turns = [
        {"role": role, "content": message.content}
        for role, message in zip(
            ["system", "user", "assistant", "user"], HISTORY, strict=True
        )
    ]
    ids = real_engine.tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, tokenize=True
    )["input_ids"]
    bos = real_engine.tokenizer.bos_token_id
    assert ids.count(bos) == 1
    assert real_engine.encode(turns) == ids
    assert chat.get_num_tokens_from_messages(HISTORY) == len(ids)
    answer = chat.invoke(HISTORY)
    usage = answer.usage_metadata
    assert usage is not None
    assert usage["input_tokens"] == len(ids)
    details = usage["input_token_details"]
    assert details["cache_read"] + details["cache_creation"] == len(ids)
    assert usage["output_tokens"] <= 8
    assert answer.response_metadata["finish_reason"] == "length"


def test_trimming_counts_with_the_template(chat: ChatPCR) -> None:
    budget = chat.get_num_tokens_from_messages(HISTORY[2:])
    kept = trim_messages(HISTORY, max_tokens=budget, token_counter=chat)
    assert kept == HISTORY[2:]


@pytest.mark.parametrize("how", ["constructor", "call", "bind"])
def test_a_stop_string_across_tokens(real_engine: Engine, how: str) -> None:
    plain = ChatPCR(engine=real_engine, max_tokens=24)
    text = plain.invoke("Go on").text
    stop = next(  # two tokens' worth of text, neither at the start nor the end
        text[at : at + 2]
        for at in range(2, len(text) - 2)
        if text.find(text[at : at + 2]) == at and text[at : at + 2].isprintable()
    )
    if how == "constructor":
        llm: Any = ChatPCR(engine=real_engine, max_tokens=24, stop=[stop])
    else:
        llm = plain.bind(stop=[stop]) if how == "bind" else plain
    options = {"stop": [stop]} if how == "call" else {}
    expected = text[: text.find(stop)]
    answer = llm.invoke("Go on", **options)
    assert answer.text == expected
    assert answer.response_metadata["finish_reason"] == "stop"
    streamed = "".join(piece.text for piece in llm.stream("Go on", **options))
    assert streamed == expected


# --- reuse ---


def cache_read(answer: Any) -> int:
    return int(answer.usage_metadata["input_token_details"]["cache_read"])


@pytest.mark.parametrize("how", ["batch", "abatch"])
def test_a_batch_computes_what_it_shares_once(chat: ChatPCR, how: str) -> None:
    system = SystemMessage(fresh(how))
    inputs = [[system, HumanMessage(f"{n}?")] for n in range(6)]
    answers = (
        chat.batch(list(inputs)) if how == "batch" else asyncio.run(chat.abatch(inputs))
    )
    shared = chat.get_num_tokens_from_messages([system]) // 16 * 16
    reused = [cache_read(answer) for answer in answers]
    assert reused[0] < 32  # the BOS and a few words that other tests share
    assert all(read >= shared - 32 > 64 for read in reused[1:])


def test_both_models_share_a_batch_of_text(real_engine: Engine) -> None:
    llm = PCRLLM(engine=real_engine, max_tokens=4)
    prompts = [f"{fresh('text')} {n}" for n in range(4)]
    batched = llm.generate(prompts)
    infos = [one[0].generation_info for one in batched.generations]
    assert all(info["pcr"]["usage"]["cached_tokens"] > 64 for info in infos[1:])
    assert llm.batch(list(prompts)) == [one[0].text for one in batched.generations]


DOCS_FIRST = ChatPromptTemplate.from_messages(
    [("system", "Answer from the context:\n\n{context}"), ("human", "{input}")]
)
QUESTION_FIRST = ChatPromptTemplate.from_template(
    "You are an assistant for question-answering tasks.\nQuestion: {input} \n"
    "Context: {context} \nAnswer:"
)


def lcel(llm: ChatPCR, docs: list[Document], prompt: Any) -> Any:
    join = RunnableLambda(lambda found: "\n\n".join(d.page_content for d in found))
    retriever = RunnableLambda(lambda _: docs)
    sources = {"context": retriever | join, "input": RunnablePassthrough()}
    return sources | prompt | llm | StrOutputParser()


def classic(llm: ChatPCR, docs: list[Document], prompt: Any) -> Any:
    retriever = RunnableLambda(lambda _: docs)
    chain = create_retrieval_chain(retriever, create_stuff_documents_chain(llm, prompt))
    return RunnableLambda(lambda q: {"input": q}) | chain


class Reuse:
    """A model's callbacks: how many prompt tokens each call reused."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def handler(self) -> Any:
        from langchain_core.callbacks import BaseCallbackHandler

        seen = self.read

        class Handler(BaseCallbackHandler):
            def on_llm_end(self, response: Any, **rest: Any) -> None:
                seen.append(cache_read(response.generations[0][0].message))

        return Handler()


@pytest.mark.parametrize("chain", [lcel, classic])
def test_documents_are_reused_where_they_come_first(chat: ChatPCR, chain: Any) -> None:
    text = fresh(chain.__name__)
    docs, reuse = [Document(text), Document(AARE)], Reuse()
    made = chain(chat, docs, DOCS_FIRST)
    for question in ("Which river?", "Another one?"):
        made.invoke(question, {"callbacks": [reuse.handler()]})
    tokens = chat.get_num_tokens(f"{text}\n\n{AARE}")
    assert reuse.read[0] < 64
    assert reuse.read[1] > tokens - 16


@pytest.mark.parametrize("chain", [lcel, classic])
def test_a_question_in_front_keeps_them_from_being_reused(
    chat: ChatPCR, chain: Any
) -> None:
    text = fresh(f"{chain.__name__} question first")
    docs, reuse = [Document(text), Document(AARE)], Reuse()
    made = chain(chat, docs, QUESTION_FIRST)
    for question in ("Which river?", "Another one?"):
        made.invoke(question, {"callbacks": [reuse.handler()]})
    instruction = chat.get_num_tokens("You are an assistant for question-answering")
    assert instruction - 16 < reuse.read[1] < 2 * instruction + 32
    made.invoke("Another one?", {"callbacks": [reuse.handler()]})
    assert reuse.read[2] > chat.get_num_tokens(text)  # the same question: all of it


# --- stopping, threads ---


def test_a_stream_that_is_left_and_a_task_that_is_cancelled(
    chat: ChatPCR, real_engine: Engine
) -> None:
    stream = chat.stream("hello", max_tokens=1500)
    next(stream)
    stream.close()

    async def main() -> None:
        task = asyncio.ensure_future(chat.ainvoke("hello", max_tokens=1500))
        streaming = chat.astream("hello", max_tokens=1500)
        await anext(streaming)
        task.cancel()
        await streaming.aclose()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert chat.invoke("hello", max_tokens=2).text  # the engine is free again


def test_batches_of_six_threads_are_as_one(chat: ChatPCR) -> None:
    inputs = [[SystemMessage(SEINE), HumanMessage(f"{n}?")] for n in range(3)]
    alone = [chat.invoke(one).text for one in inputs]
    answers: list[list[str]] = []

    def ask() -> None:
        answers.append([answer.text for answer in chat.batch(list(inputs))])

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [alone] * 6


# --- the suite ---


class OnARealModel(ChatModelIntegrationTests):
    """Everything that does not ask the model to be clever.

    Skipped, because a model of this size does not call tools or write the JSON it is
    told to: all tests of tools, agents, structured output and JSON mode
    (``test_langchain_suite`` runs them). Skipped, because an engine given by hand has
    its model: ``..._with_model_override``. Skipped as there: images, PDF, audio,
    recordings; and ``test_anthropic_inputs``, which binds a tool.
    """

    engine: Engine

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatPCR

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"engine": self.engine, "max_tokens": 8, "timeout": None}

    @property
    def has_tool_calling(self) -> bool:
        return False

    @property
    def has_structured_output(self) -> bool:
        return False

    @property
    def supports_model_override(self) -> bool:
        return False

    @property
    def supported_usage_metadata_details(self) -> dict[Any, Any]:
        details = ["cache_read_input", "cache_creation_input"]
        return {"invoke": details, "stream": details}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        return ask_twice(ChatPCR(engine=self.engine, max_tokens=2), stream=stream)

    def invoke_with_cache_creation_input(self, *, stream: bool = False) -> AIMessage:
        return ask_twice(ChatPCR(engine=self.engine, max_tokens=2), stream=stream)


class TestOnATinyModel(OnARealModel):
    """A random one: its answers are noise, its counts, streams and events are not."""

    @pytest.fixture(autouse=True)
    def _engine(self, real_engine: Engine) -> None:
        self.engine = real_engine


@pytest.fixture(scope="module")
def smollm2_engine(smollm2_dir: Path, tmp_path_factory: Any) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("smollm2")
    config = EngineConfig(model=str(smollm2_dir), cache_dir=folder, ssd_bytes=0)
    with Engine(config) as engine:
        yield engine


@pytest.mark.slow
class TestOnSmolLM2(OnARealModel):
    """A trained one, with a chat template of its own."""

    @pytest.fixture(autouse=True)
    def _engine(self, smollm2_engine: Engine) -> None:
        self.engine = smollm2_engine
