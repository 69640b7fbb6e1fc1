"""The wrappers on a real engine with a tiny random model: the seams fit."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import HumanMessage, SystemMessage
from llama_index.core.base.llms.types import ChatMessage

from pcr_core import Engine, EngineConfig, PromptTooLongError
from pcr_integrations.langchain import PCRLLM as TextPCR
from pcr_integrations.langchain import ChatPCR
from pcr_integrations.llama_index import PCRLLM

DOCUMENT = "The Seine flows through Paris and the Thames through London. " * 2


@pytest.fixture
def engine(tiny_llama: Any, tiny_tokenizer: Any, tmp_path: Path) -> Iterator[Engine]:
    config = EngineConfig(
        cache_dir=tmp_path, dram_bytes="8MiB", ssd_bytes=0, chunk_tokens=16
    )
    with Engine(config, model=tiny_llama, tokenizer=tiny_tokenizer) as opened:
        yield opened


def test_both_frameworks_answer_alike_and_reuse_each_others_cache(
    engine: Engine,
) -> None:
    chat = ChatPCR(engine=engine, max_tokens=6)
    answer = chat.invoke([SystemMessage(DOCUMENT), HumanMessage("Which?")])
    llm = PCRLLM(engine=engine, max_tokens=6)
    messages = [
        ChatMessage(role="system", content=DOCUMENT),
        ChatMessage(role="user", content="Which?"),
    ]
    again = llm.chat(messages)
    assert again.message.content == answer.content
    assert answer.usage_metadata is not None
    prompt = answer.usage_metadata["input_tokens"]
    usage = again.raw["usage"]
    assert usage["prompt_tokens"] == prompt
    assert usage["cached_by_tier"] == {"device": (prompt - 1) // 16 * 16}
    *_, last = llm.stream_chat(messages)
    assert last.message.content == answer.content


def test_counts_are_those_of_the_engine(engine: Engine) -> None:
    chat = ChatPCR(engine=engine, max_tokens=2)
    message = HumanMessage("How long?")
    counted = chat.get_num_tokens_from_messages([message])
    answer = chat.invoke([message])
    assert answer.usage_metadata is not None
    assert counted == answer.usage_metadata["input_tokens"]


def test_async_and_batches(engine: Engine) -> None:
    text = TextPCR(engine=engine, max_tokens=4)
    prompts = [f"{DOCUMENT} {number}" for number in range(3)]
    assert asyncio.run(text.abatch(prompts)) == text.batch(prompts)


def test_leaving_a_stream_leaves_the_engine_usable(engine: Engine) -> None:
    chat = ChatPCR(engine=engine, max_tokens=60)
    stream = chat.stream("hello")
    next(stream)
    stream.close()
    assert chat.invoke("hello", max_tokens=2).usage_metadata is not None


def test_a_prompt_beyond_the_window(engine: Engine) -> None:
    message = HumanMessage("x" * (engine.context_window + 1))
    chat = ChatPCR(engine=engine)
    with pytest.raises(PromptTooLongError):
        chat.invoke([message])
    assert chat.get_num_tokens_from_messages([message]) > engine.context_window
