"""explain on a real engine: every verdict, true, and nothing is changed by asking."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from pcr_core import (
    Document,
    Engine,
    EngineClosedError,
    Explanation,
    PromptTooLongError,
    RequestError,
)
from pcr_core.explain.explanation import Part
from tests.engine.kit import (
    GREEDY,
    ask,
    chunk_files,
    fresh,
    on_engine_thread,
    slots_for,
    until,
)

SYSTEM = "answer from the documents, in one short sentence, and say which it was.\n"
A, B, C = (Document(letter, letter.upper() * 60) for letter in "abc")


def rag(*documents: Document, question: str = "who?", system: str = SYSTEM) -> str:
    context = "\n".join(document.text for document in documents)
    return f"{system}{context}\nquestion: {question}"


def put(engine: Engine, *documents: Document, **options: Any) -> Any:
    return ask(engine, rag(*documents, **options), documents=documents)


def look(engine: Engine, *documents: Document, **options: Any) -> Explanation:
    return engine.explain(rag(*documents, **options), documents=documents)


def verdicts(found: Explanation) -> dict[str, str]:
    return {part.name: part.verdict for part in found.documents}


def part(found: Explanation, name: str) -> Part:
    return next(part for part in found.documents if part.name == name)


# --- each verdict ---


def test_reused_and_the_end_of_the_prompt(make_engine: Any) -> None:
    engine = make_engine()
    put(engine, A, B, question="who was it, and where?")
    found = look(engine, A, B, question="who was it, and where?")
    assert verdicts(found) == {"a": "reused", "b": "reused"}
    full = found.prompt.tokens // 32 * 32
    assert (found.prompt.dram_tokens, found.prompt.ssd_tokens) == (full, 0)
    assert found.prompt.verdict == "end of prompt"
    assert f"the last {found.prompt.tokens - full} tokens always run" in str(found)


def test_never_seen(make_engine: Any) -> None:
    found = look(make_engine(), A)
    assert found.prompt.verdict == "not known"
    assert verdicts(found) == {"a": "not known"}
    assert found.hit_tokens == 0
    assert found.difference is None


def test_order_changed(make_engine: Any) -> None:
    engine = make_engine()
    put(engine, A, B)
    found = look(engine, B, A)
    assert verdicts(found) == {"b": "order changed", "a": "order changed"}
    assert "a fixed order would be reused" in part(found, "a").why
    assert found.difference is not None
    assert found.difference.now.startswith("B")
    assert found.difference.then.startswith("A")


def test_other_documents_in_front(make_engine: Any) -> None:
    engine = make_engine()
    put(engine, A, B)
    found = look(engine, A, C, B)
    assert verdicts(found)["b"] == "other documents before it"
    assert verdicts(found)["c"] == "not known"


def test_text_changed(make_engine: Any) -> None:
    engine = make_engine()
    put(engine, A, B)
    found = look(engine, A, Document("b", "b" * 60))
    assert found.prompt.verdict == "text changed"
    assert verdicts(found) == {"a": "shared chunk", "b": "text changed"}
    assert found.difference is not None
    assert found.difference.index == found.documents[1].first_token
    assert (found.difference.now[0], found.difference.then[0]) == ("b", "B")


def test_other_text_in_front(make_engine: Any) -> None:
    engine = make_engine()
    put(engine, A, system="today is 2026-03-01. " + SYSTEM)
    found = look(engine, A, system="today is 2026-03-02. " + SYSTEM)
    assert verdicts(found) == {"a": "other text before it"}
    assert found.difference is not None
    assert (found.difference.now, found.difference.then) == ("2", "1")
    assert any("looks like a date" in hint for hint in found.hints)
    assert any("behind the documents" in hint for hint in found.hints)


def test_a_chunk_shared_with_what_is_new(make_engine: Any) -> None:
    engine = make_engine()
    put(engine, A, question="who was it?")
    found = look(engine, A, question="where was it, and why was it there at all?")
    assert verdicts(found) == {"a": "shared chunk"}


def test_evicted_from_dram_and_by_whom(make_engine: Any) -> None:
    engine = make_engine(ssd_bytes=0)
    engine = make_engine(ssd_bytes=0, dram_bytes=slots_for(engine, 5))
    put(engine, A)
    ask(engine, fresh(5 * 32))
    found = look(engine, A)
    assert found.prompt.verdict == "gone"
    assert "left DRAM at" in found.prompt.why
    assert "(dram budget, for request 2)" in found.prompt.why
    assert "a larger dram_bytes keeps more" in found.prompt.why


def test_evicted_from_ssd_and_by_whom(make_engine: Any) -> None:
    engine = make_engine()
    file = engine._loop.tiers._format.file_nbytes
    engine = make_engine(dram_bytes=slots_for(engine, 5), ssd_bytes=5 * file)
    put(engine, A)
    assert engine.flush(60)
    ask(engine, fresh(5 * 32))
    assert engine.flush(60)
    found = look(engine, A)
    assert found.prompt.verdict == "gone"
    assert "(ssd budget, for request 2)" in found.prompt.why
    assert "a larger ssd_bytes keeps more" in found.prompt.why


def test_evicted_by_reading_ahead(make_engine: Any) -> None:
    stored = fresh(4 * 32)  # what is read ahead at a time, of ten slots
    with make_engine() as first:
        ask(first, stored)
        slot = slots_for(first, 1)
    engine = make_engine(dram_bytes=10 * slot, ssd_bytes="40MiB", eviction="lru")
    put(engine, A)
    ask(engine, fresh(6 * 32))
    assert engine.flush(60)
    engine.prefetch(stored)
    until(lambda: engine.stats().cache.prefetch_issued == 4, "prefetching")
    departures = engine._loop.tiers.departures
    causes = [gone.by for gone in departures._gone.values() if gone.tier == "dram"]
    assert causes[-1] == "reading ahead"
    assert "request" not in "".join(causes)


def test_over_the_quota(make_engine: Any) -> None:
    engine = make_engine()
    file = engine._loop.tiers._format.file_nbytes
    budgets = {"dram_bytes": slots_for(engine, 5), "namespace_bytes": 5 * file}
    engine = make_engine(namespace="tenant", **budgets)
    put(engine, A)
    assert engine.flush(60)
    ask(engine, fresh(5 * 32))
    assert engine.flush(60)
    found = look(engine, A)
    assert found.prompt.verdict == "gone"
    assert "(quota, for request 2)" in found.prompt.why
    assert "a larger namespace_bytes keeps more" in found.prompt.why


def test_forgotten(make_engine: Any) -> None:
    engine = make_engine()
    put(engine, A, B)
    assert engine.flush(60)
    engine.forget("b")
    found = look(engine, A, B)
    assert verdicts(found)["b"] == "gone"
    assert "(forgotten)" in part(found, "b").why
    assert found.difference is None, "nothing of it is remembered"


def test_damaged(make_engine: Any, tmp_path: Path) -> None:
    with make_engine() as first:
        put(first, A)
    engine = make_engine(prefetch="wait_complete")
    for path in chunk_files(tmp_path):
        path.write_bytes(path.read_bytes()[:-1] + b"!")
    engine.prefetch(rag(A))
    until(lambda: engine.stats().cache.corrupt > 0, "prefetching")
    until(lambda: look(engine, A).hit_tokens == 0, "prefetching")
    found = look(engine, A)
    assert found.prompt.verdict == "gone"
    assert "left SSD" in found.prompt.why
    assert "(damaged)" in found.prompt.why


def test_removed_by_another_engine(make_engine: Any) -> None:
    engine = make_engine(dram_bytes="100KiB")
    other = make_engine()
    put(engine, A)
    assert engine.flush(60)
    other.forget("a")
    until(lambda: look(engine, A).hit_tokens <= 64, "catching up")
    assert "(forgotten)" in part(look(engine, A), "a").why


@pytest.mark.parametrize("ssd_bytes", [0, "4MiB"])
def test_no_room_at_all(make_engine: Any, ssd_bytes: Any) -> None:
    engine = make_engine()
    engine = make_engine(ssd_bytes=ssd_bytes, dram_bytes=slots_for(engine, 2))
    put(engine, A)
    assert engine.flush(60)
    found = look(engine, A)
    assert found.hit_tokens == 64
    assert found.prompt.verdict == "not stored"
    assert "there was no room" in found.prompt.why
    assert "holds 2; raise dram_bytes" in found.prompt.why


def test_after_a_restart_files_tell_what_was_there(make_engine: Any) -> None:
    with make_engine() as first:
        put(first, A, B, question="who was it, when, where, and how many were there?")
    engine = make_engine()
    found = look(engine, A, C, question="who?")
    assert found.prompt.ssd_tokens == 128
    assert found.prompt.verdict == "text changed"
    assert found.difference is not None
    assert (found.difference.now[0], found.difference.then[0]) == ("C", "B")
    assert verdicts(found) == {"a": "shared chunk", "c": "not known"}
    first_chunk = look(engine, A, system="respond from the documents, at once.\n")
    assert first_chunk.hit_tokens == 0
    assert first_chunk.difference is not None
    assert first_chunk.difference.then.startswith("a"), "from 'answer'"


def test_after_a_restart_a_document_behind_other_text(make_engine: Any) -> None:
    with make_engine() as first:
        put(first, A, B)
        put(first, C)
        assert first.flush(60)
        first.forget("c")
    engine = make_engine()
    swapped = look(engine, B, A)
    assert verdicts(swapped) == dict.fromkeys("ab", "other text before it")
    dated = look(engine, A, system="2026-03-02: " + SYSTEM)
    assert verdicts(dated) == {"a": "other text before it"}
    forgotten = look(engine, C)
    assert verdicts(forgotten) == {"c": "not known"}
    assert "restart" in part(forgotten, "c").why


def test_after_a_restart_the_tail_of_a_document(make_engine: Any) -> None:
    with make_engine() as first:
        ask(first, A.text * 2, documents=[Document("aa", A.text * 2)])
    engine = make_engine()
    text = f"{A.text * 2}\nwhat is it, and what is it good for?"
    found = engine.explain(text, documents=[Document("aa", A.text * 2)])
    assert (found.hit_tokens, verdicts(found)) == (96, {"aa": "shared chunk"})


def test_in_the_other_tenants_tier(make_engine: Any) -> None:
    engine, other = make_engine(namespace="one"), make_engine(namespace="two")
    put(engine, A)
    assert engine.flush(60)
    found = look(other, A)
    assert found.hit_tokens == 0
    assert found.prompt.verdict == "not known"
    assert found.difference is None, "nor does a file of another tenant tell anything"


# --- asking changes nothing ---


def test_asking_changes_nothing(make_engine: Any) -> None:
    engine = make_engine(dram_bytes="250KiB", ssd_bytes="500KiB")
    put(engine, A, B)
    put(engine, B, C)
    ask(engine, fresh(200))
    assert engine.flush(60)

    def everything() -> Any:
        tiers = engine._loop.tiers
        nodes = sorted(tiers._tree.nodes(), key=lambda node: node.key)
        slots = type(nodes[0]).__slots__
        plain = [name for name in slots if name != "parent"]
        return (
            [[getattr(node, name) for name in plain] for node in nodes],
            tiers._tree.host_victim(),
            tiers._tree.disk_victim(),
            sorted(tiers._dram.slots),
            list(tiers.departures._gone.items()),
            list(engine._loop._ledger._history._by_age),
            tiers.version,
        )

    before = on_engine_thread(engine, everything), engine.stats()
    for documents in ((A, B), (B, C), (C, A), (A,)):
        first = look(engine, *documents)
        assert look(engine, *documents) == first
    engine.explain("x" * 500)
    assert (on_engine_thread(engine, everything), engine.stats()) == before


@pytest.mark.parametrize("seed", range(4))
def test_it_says_what_the_next_request_finds(make_engine: Any, seed: int) -> None:
    """Also at the edges of chunks, where the last tile runs again."""
    dice = random.Random(seed)
    engine = make_engine(
        dram_bytes="300KiB", ssd_bytes="700KiB", prefetch="wait_complete"
    )
    prompts = []
    for _ in range(6):
        head = dice.choice(prompts)[: dice.randrange(200)] if prompts else []
        prompts.append([*head, *fresh(dice.choice([1, 31, 32, 33, 64, 96, 128, 150]))])
    for _ in range(30):
        prompt = dice.choice(prompts)
        prompt = prompt[: dice.choice([len(prompt), 32, 64, 65, 96]) or 1]
        assert engine.flush(60)
        found = engine.explain(prompt)
        usage = ask(engine, prompt).usage
        assert found.prompt.dram_tokens == usage.cached_by_tier.get("dram", 0)
        assert found.prompt.ssd_tokens == usage.cached_by_tier.get("ssd", 0)
        assert found.computed_tokens == usage.computed_tokens
    assert engine.check().ok


# --- prompts of every kind ---


def test_text_ids_and_messages(make_engine: Any) -> None:
    engine = make_engine()
    message = {"role": "user", "content": rag(A, B)}
    ask(engine, [message], documents=[A, B])
    found = engine.explain([message], documents=[A, B])
    assert verdicts(found) == {"a": "reused", "b": "reused"}
    ids = engine.encode([message])
    assert engine.explain(ids, documents=[A, B]) == found
    text = engine.tokenizer.apply_chat_template(
        [message], tokenize=False, add_generation_prompt=True
    )
    assert engine.explain(text, documents=[A, B]) == found
    assert engine.explain(ids).documents == ()
    assert engine.explain("hi").prompt.tokens == 3


def test_with_tools(make_engine: Any) -> None:
    engine = make_engine()
    template = engine.tokenizer.chat_template
    engine.tokenizer.chat_template = "{{ tools | tojson if tools else '' }}" + template
    try:
        tool = {"type": "function", "function": {"name": "find", "parameters": {}}}
        messages = [{"role": "user", "content": rag(A)}]
        engine.submit(messages, GREEDY, tools=[tool], documents=[A]).result(60)
        found = engine.explain(messages, tools=[tool], documents=[A])
        assert verdicts(found) == {"a": "reused"}
        assert engine.explain(messages, documents=[A]).hit_tokens == 0
        engine.prefetch(messages, tools=[tool])
    finally:
        engine.tokenizer.chat_template = template


def test_documents_that_are_not_there(engine: Engine) -> None:
    for use in (engine.explain, engine.submit):
        with pytest.raises(RequestError, match=r"document 'b' is not in the prompt"):
            use(rag(A), documents=[A, B])
        with pytest.raises(RequestError, match="must be Document objects"):
            use(rag(A), documents=["a"])
    for prompt in (None, [], 5, [1, 10**6]):
        with pytest.raises(RequestError):
            engine.explain(prompt)


def test_a_prompt_longer_than_the_window(engine: Engine) -> None:
    """What cannot be run is refused by all that take a prompt, in the same words."""
    for take in (engine.submit, engine.explain, engine.prefetch):
        with pytest.raises(PromptTooLongError, match="3001 tokens"):
            take("x" * 3000)


def test_a_closed_engine(make_engine: Any) -> None:
    engine = make_engine()
    engine.close()
    with pytest.raises(EngineClosedError):
        engine.explain("hello")


def test_it_prints(make_engine: Any) -> None:
    engine = make_engine()
    put(engine, A, B)
    text = str(look(engine, B, A))
    for words in ("reused", "order changed", "first difference", "document a"):
        assert words in text
    assert look(engine, B, A)._repr_html_().startswith("<table>")
