"""LlamaIndex on a real engine with a tiny random model: what a script cannot show."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

from pcr_core import Engine, EngineConfig, PromptTooLongError
from pcr_integrations.llama_index import PCRLLM, abatch_query, batch_query

pytestmark = pytest.mark.timeout(120)

DOCUMENT = "The Seine flows through Paris and the Thames through London. "
HELLO = [
    ChatMessage(role="system", content=DOCUMENT),
    ChatMessage(role="user", content="Which?"),
]
SHORT = "{context_str} {query_str}"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, request: Any) -> Iterator[Engine]:
    """One engine for all: what one test leaves in the cache must not hurt another."""
    make = request.getfixturevalue("make_tiny_model")
    tokenizer = request.getfixturevalue("tiny_tokenizer")
    config = EngineConfig(
        cache_dir=tmp_path_factory.mktemp("cache"),
        dram_bytes="32MiB",
        ssd_bytes=0,
        chunk_tokens=16,
        overlap="none",  # saves the probe of the start
        threads=1,
    )
    with Engine(config, model=make("llama"), tokenizer=tokenizer) as opened:
        yield opened


@pytest.fixture
def llm(engine: Engine) -> PCRLLM:
    return PCRLLM(engine=engine, max_tokens=5)


async def drain(stream: Any) -> list[Any]:
    return [item async for item in await stream]


def text(response: Any) -> str:
    content = response.message.content if hasattr(response, "message") else response
    return str(content)


def test_eight_endpoints_one_answer(llm: PCRLLM) -> None:
    whole = [text(llm.chat(HELLO)), text(asyncio.run(llm.achat(HELLO)))]
    streams = [
        list(llm.stream_chat(HELLO)),
        asyncio.run(drain(llm.astream_chat(HELLO))),
    ]
    whole += [text(stream[-1]) for stream in streams]
    whole += ["".join(response.delta for response in stream) for stream in streams]
    assert len(set(whole)) == 1
    whole = [text(llm.complete("Hi")), text(asyncio.run(llm.acomplete("Hi")))]
    streams = [
        list(llm.stream_complete("Hi")),
        asyncio.run(drain(llm.astream_complete("Hi"))),
    ]
    whole += [text(stream[-1]) for stream in streams]
    whole += ["".join(response.delta for response in stream) for stream in streams]
    assert len(set(whole)) == 1


def test_counts_are_those_of_the_template_with_one_bos(
    engine: Engine, llm: PCRLLM
) -> None:
    turns = [{"role": m.role.value, "content": m.content} for m in HELLO]
    ids = engine.tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert ids.count(engine.tokenizer.bos_token_id) == 1
    raw = json.loads(json.dumps(llm.chat(HELLO).raw))
    assert raw["usage"]["prompt_tokens"] == len(ids)
    # As one user turn unless it is formatted already, and never with a second BOS.
    one_turn = engine.encode([{"role": "user", "content": "Hi"}])
    for prompt, formatted, expected in (
        ("Hi", False, one_turn),
        ("Hi", True, engine.encode("Hi")),
    ):
        usage = llm.complete(prompt, formatted=formatted).raw["usage"]
        assert usage["prompt_tokens"] == len(expected)
        assert expected.count(engine.tokenizer.bos_token_id) == 1


def test_metadata_is_the_models(engine: Engine, llm: PCRLLM) -> None:
    metadata = llm.metadata
    assert metadata.context_window == engine.model.config.max_position_embeddings
    assert metadata.num_output < metadata.context_window
    assert metadata.is_chat_model  # the tokenizer has a template
    assert not metadata.is_function_calling_model  # which renders no tools


def test_reuse_changes_no_answer_and_is_reported(llm: PCRLLM) -> None:
    prompt = f"Once only. {DOCUMENT}"
    first = llm.complete(prompt, logprobs=True)
    again = llm.complete(prompt, logprobs=True)
    assert first.raw["usage"]["cached_tokens"] < 40  # the template's beginning
    usage = again.raw["usage"]
    assert usage["cached_tokens"] > usage["prompt_tokens"] // 2
    assert usage["cached_tokens"] + usage["computed_tokens"] == usage["prompt_tokens"]
    assert again.text == first.text
    assert again.raw["logprobs"] == first.raw["logprobs"]  # bit for bit


def test_a_stop_string_across_tokens(llm: PCRLLM) -> None:
    """One token is one byte here, so a stop of three letters crosses three."""
    only = {ord(letter): 100.0 for letter in "ab"}
    whole = llm.complete("Hi", max_tokens=20, logit_bias=only).text
    stop = whole[5:8]
    expected = whole[: whole.index(stop)]
    options: dict[str, Any] = {"max_tokens": 20, "logit_bias": only, "stop": [stop]}
    assert llm.complete("Hi", **options).text == expected
    pieces = list(llm.stream_complete("Hi", **options))
    assert pieces[-1].text == expected
    assert "".join(piece.delta for piece in pieces) == expected
    assert pieces[-1].raw["finish_reason"] == "stop"


def test_a_prompt_beyond_the_window_costs_nothing(engine: Engine, llm: PCRLLM) -> None:
    before = engine.stats()
    long = [ChatMessage(role="user", content="x" * (engine.context_window + 1))]
    with pytest.raises(PromptTooLongError):
        llm.chat(long)
    with pytest.raises(PromptTooLongError):
        list(llm.stream_chat(long))
    with pytest.raises(PromptTooLongError):
        asyncio.run(llm.achat(long))
    after = engine.stats()
    assert (after.finished, after.failed) == (before.finished, before.failed)


def test_threads_and_loops_at_once_answer_as_one_by_one(llm: PCRLLM) -> None:
    prompts = [f"{DOCUMENT} {number}" for number in range(3)]
    expected = [llm.complete(prompt).text for prompt in prompts]
    found: dict[str, list[str]] = {}

    async def gathered() -> list[str]:
        answers = await asyncio.gather(*(llm.acomplete(p) for p in prompts))
        return [answer.text for answer in answers]

    def one_by_one() -> list[str]:
        return [llm.complete(prompt).text for prompt in prompts]

    def in_a_loop() -> list[str]:
        return asyncio.run(gathered())

    threads = [
        threading.Thread(target=lambda n=name, f=way: found.update({n: f()}))
        for name, way in (
            ("thread 1", one_by_one),
            ("thread 2", one_by_one),
            ("loop 1", in_a_loop),
            ("loop 2", in_a_loop),
        )
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(answers == expected for answers in found.values())


def test_in_a_loop_that_runs(llm: PCRLLM) -> None:
    """As in a notebook: the methods without ``await`` work, too."""

    async def cell() -> tuple[str, str]:
        return text(llm.chat(HELLO)), text(list(llm.stream_chat(HELLO))[-1])

    whole, streamed = asyncio.run(cell())
    assert whole == streamed == text(llm.chat(HELLO))


# --- batch_query ---


class Shared(BaseRetriever):
    """The same document for every question."""

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [NodeWithScore(node=TextNode(text=DOCUMENT), score=1.0)]


def questions_engine(llm: PCRLLM) -> RetrieverQueryEngine:
    from llama_index.core import PromptTemplate

    short = PromptTemplate(SHORT)
    return RetrieverQueryEngine.from_args(Shared(), llm=llm, text_qa_template=short)


def test_a_batch_answers_as_one_by_one(llm: PCRLLM) -> None:
    query_engine = questions_engine(llm)
    questions = [f"Which of {number}?" for number in range(3)]
    alone = [str(query_engine.query(question)) for question in questions]
    together = batch_query(query_engine, questions, show_progress=False)
    awaited = asyncio.run(abatch_query(query_engine, questions, show_progress=False))
    assert [str(answer) for answer in together] == alone
    assert [str(answer) for answer in awaited] == alone


def test_a_batch_shows_what_it_reused(
    llm: PCRLLM, capsys: pytest.CaptureFixture[str]
) -> None:
    batch_query(questions_engine(llm), ["Who?", "When?", "Where?"])
    shown = capsys.readouterr().err
    assert "3/3" in shown
    share = shown.rpartition("% of prompts reused")[0].rpartition(" ")[2]
    assert int(share) > 30


def test_a_batch_larger_than_the_queue(
    tiny_llama: Any, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    config = EngineConfig(
        cache_dir=tmp_path, ssd_bytes=0, max_queue=2, overlap="none", threads=1
    )
    with Engine(config, model=tiny_llama, tokenizer=tiny_tokenizer) as engine:
        llm = PCRLLM(engine=engine, max_tokens=2)
        answers = batch_query(questions_engine(llm), [str(n) for n in range(6)])
    assert len(answers) == 6
