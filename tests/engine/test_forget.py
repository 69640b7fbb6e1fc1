"""The right to be forgotten, end to end: in every tier, every process, every moment."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pcr_core import (
    Completion,
    Document,
    Engine,
    ForgetReceipt,
    RequestError,
    StoreError,
)
from pcr_core.explain.history import PromptHistory
from pcr_core.tiers.store.chunk_index import ChunkIndex, IndexTroubleError
from tests.engine.kit import (
    GREEDY,
    Reads,
    answer,
    ask,
    busy,
    gated_reads,
    keys_of,
    on_engine_thread,
    paused,
    states,
    stored_tokens,
    until,
)

SYSTEM = "answer from the documents, in one short sentence, and say which it was.\n"
# A capital letter is a token of its own, and in no other text here.
Q, Z, K = (Document(letter.lower(), letter * 50) for letter in "QZK")

reads = pytest.fixture(gated_reads)


@pytest.fixture
def make_engine(make_engine: Any) -> Any:
    """With rows at rest, as by default: they have to forget, too."""
    return partial(make_engine, resident_rows=2)


def rag(*documents: Document, question: str = "who?", system: str = SYSTEM) -> str:
    context = "\n".join(document.text for document in documents)
    return f"{system}{context}\nquestion: {question}"


def put(engine: Engine, *documents: Document, **options: Any) -> Any:
    return ask(engine, rag(*documents, **options), documents=documents)


def token_of(engine: Engine, document: Document) -> int:
    return int(engine.tokenizer.convert_tokens_to_ids(document.text[0]))


class Trail:
    """Everything that followed a document in the prompts of a test."""

    def __init__(self, engine: Engine, document: Document) -> None:
        self.document = document
        self._engine = engine
        self._token = token_of(engine, document)
        self.keys: set[bytes] = set()

    def add(self, *documents: Document, **options: Any) -> None:
        """A prompt that is, or will be, used."""
        tokens = self._engine.encode(rag(*documents, **options))
        head = tokens.index(self._token) // self._engine.config.chunk_tokens
        self.keys.update(keys_of(self._engine, tokens)[head:])

    def on_disk(self, folder: Path) -> list[str]:
        """Chunk files that contain or follow it."""
        return [
            key
            for key, tokens in stored_tokens(folder).items()
            if self._token in tokens or bytes.fromhex(key) in self.keys
        ]

    def in_memory(self, engine: Engine) -> list[str]:
        """Copies, records and remembered prompts of one engine."""

        def look() -> list[str]:
            tiers, ledger = engine._loop.tiers, engine._loop._ledger
            found = [f"slot {key.hex()}" for key in tiers._dram.slots]
            found += [f"node {node.key.hex()}" for node in tiers._tree.nodes()]
            found = [one for one in found if bytes.fromhex(one[5:]) in self.keys]
            history: PromptHistory = ledger._history
            found += [
                f"prompt of {len(past)} tokens"
                for past in history._by_age.values()
                if self._token in past.tokens
            ]
            found += [
                f"row of {len(row.tokens)} tokens"
                for row in engine._parts.prepared.runner._rows._resting
                if self._token in row.tokens
            ]
            return found

        result: list[str] = on_engine_thread(engine, look)
        return result

    def assert_gone(self, folder: Path, *engines: Engine) -> None:
        for engine in engines:
            assert engine.flush(60)
            until(lambda e=engine: not self.in_memory(e), "forgetting in memory")
        assert not self.on_disk(folder)
        for engine in engines:
            report = engine.check()
            assert report.ok, report


@pytest.fixture
def trail(engine: Engine) -> Trail:
    trail = Trail(engine, Q)
    for documents in ((Q,), (Z, Q), (Q, Z), (Z, Q, K)):
        trail.add(*documents)
    return trail


# --- in one engine ---


def test_what_contains_or_follows_a_document_goes(
    make_engine: Any, trail: Trail, tmp_path: Path
) -> None:
    engine = make_engine()
    before = put(engine, Z, Q)
    put(engine, Q, Z)
    put(engine, Z, K)
    assert engine.flush(60)
    doomed = trail.on_disk(tmp_path)
    assert doomed
    assert trail.in_memory(engine)
    receipt = engine.forget(Q.id)
    trail.assert_gone(tmp_path, engine)
    assert set(receipt.keys) == set(doomed)
    assert {name.removesuffix(".safetensors") for name in receipt.files} == set(doomed)
    assert receipt.ssd_bytes == len(doomed) * engine._loop.tiers._format.file_nbytes
    assert receipt.dram_chunks == len(doomed)
    assert receipt.prompts == 2
    assert receipt.epoch == 1
    assert not receipt.left
    assert str(receipt).startswith("forgot 'q': ")
    kept = engine.explain(rag(Z, Q), documents=[Z, Q])
    assert kept.prompt.dram_tokens == 3 * 32, "what is in front of it has stayed"
    assert put(engine, Z, K).usage.cached_tokens == 5 * 32
    after = put(engine, Z, Q)
    assert answer(after) == answer(before)
    assert put(engine, Z, Q).usage.cached_tokens > after.usage.cached_tokens, "again"


def test_twice_and_never_known(make_engine: Any, trail: Trail, tmp_path: Path) -> None:
    engine = make_engine()
    put(engine, Q)
    assert engine.forget(Q.id).keys
    again = engine.forget(Q.id)
    assert (again.keys, again.files, again.dram_chunks, again.prompts) == ((), (), 0, 0)
    assert str(again) == "forgot 'q': nothing was stored under this id"
    for id in ("never", "", " ", "q" * 100_000):
        assert engine.forget(id).keys == ()
    trail.assert_gone(tmp_path, engine)


@pytest.mark.parametrize("id", [None, 5, b"q", ["q"], Q])
def test_an_id_that_is_no_string(engine: Engine, id: Any) -> None:
    with pytest.raises(RequestError, match=f"id, not {type(id).__name__}"):
        engine.forget(id)


@pytest.mark.parametrize("id", ["a\0b", "\ud800", "e\u0301", "x" * 10_000, "../etc"])
def test_odd_ids(make_engine: Any, trail: Trail, tmp_path: Path, id: str) -> None:
    engine, odd = make_engine(), Document(id, Q.text)
    put(engine, odd)
    other = Document(id + "!", Z.text)
    put(engine, other)
    assert engine.flush(60)
    receipt = engine.forget(id)
    assert receipt.keys
    assert receipt.document == id
    assert repr(receipt)
    assert str(receipt).isprintable()
    trail.assert_gone(tmp_path, engine)
    assert put(engine, other).usage.cached_tokens > 64, "another id, another document"


def test_without_an_ssd_tier(make_engine: Any, trail: Trail, tmp_path: Path) -> None:
    engine = make_engine(ssd_bytes=0)
    put(engine, Z, Q)
    receipt = engine.forget(Q.id)
    assert receipt.files == ()
    assert receipt.dram_chunks == len(receipt.keys) > 0
    assert receipt.epoch == 0
    trail.assert_gone(tmp_path, engine)
    assert put(engine, Z, Q).usage.cached_tokens == 3 * 32
    assert engine.forget(Q.id).dram_chunks == receipt.dram_chunks
    trail.assert_gone(tmp_path, engine)


def test_a_document_in_the_last_partial_chunk(make_engine: Any) -> None:
    engine, tail = make_engine(), Document("tail", "QQ")
    prompt = "x" * 63 + tail.text
    ask(engine, prompt, documents=[tail])
    receipt = engine.forget("tail")
    assert receipt.keys == ()
    assert receipt.prompts == 1
    assert not Trail(engine, Q).in_memory(engine)


def test_several_texts_under_one_id(
    make_engine: Any, trail: Trail, tmp_path: Path
) -> None:
    engine, more = make_engine(), Document(Q.id, "w" * 50)
    prompt = f"{SYSTEM}{Z.text}\n{more.text}\nquestion: who?"
    ask(engine, prompt, documents=[Z, more])
    put(engine, Q)
    tokens = engine.encode(prompt)
    engine.forget(Q.id)
    assert states(engine, tokens)[:3] == ["dram"] * 3
    assert set(states(engine, tokens)[3:]) == {"none"}
    trail.assert_gone(tmp_path, engine)


# --- at every moment ---


def test_requests_that_wait_do_not_bring_it_back(
    make_engine: Any, hold: Any, trail: Trail, tmp_path: Path
) -> None:
    plain = make_engine(ssd_bytes=0)
    expected = [answer(put(plain, *d)) for d in ((Q,), (Z, Q), (Z, K))]
    engine = make_engine()
    put(engine, Q)  # one of them has been here, the other has not
    assert engine.flush(60)
    receipts: list[ForgetReceipt] = []
    with hold(engine):
        caller = threading.Thread(target=lambda: receipts.append(engine.forget(Q.id)))
        caller.start()
        until(lambda: bool(engine._door._calls), "the call")
        waiting = [
            engine.submit(rag(*documents), GREEDY, documents=documents)
            for documents in ((Q,), (Z, Q), (Z, K))
        ]
    caller.join(60)
    assert [answer(one.result(60)) for one in waiting] == expected
    trail.assert_gone(tmp_path, engine)
    assert receipts[0].keys
    assert put(engine, Z, K).usage.cached_tokens >= 5 * 32, "the rest was stored"
    engine.close()
    again = make_engine()
    assert again.forget(Q.id).keys == ()
    assert again.forget(Z.id).keys, "what a waiting request brought can be forgotten"


def test_a_request_that_waits_behind_another(
    make_engine: Any, trail: Trail, tmp_path: Path
) -> None:
    """The document is known to nobody yet: its first request has not begun."""
    engine = make_engine()
    with busy(engine):
        waiting = engine.submit(rag(Z, Q), GREEDY, documents=[Z, Q])
        caller = threading.Thread(target=engine.forget, args=[Q.id])
        caller.start()
        until(lambda: bool(engine._door._calls), "the call")
    caller.join(60)
    assert waiting.result(60).token_ids
    trail.assert_gone(tmp_path, engine)
    assert states(engine, engine.encode(rag(Z, Q)))[:3] == ["dram"] * 3


def test_while_one_is_running(make_engine: Any, trail: Trail, tmp_path: Path) -> None:
    engine = make_engine()
    long = GREEDY.model_copy(update={"max_tokens": 300, "min_tokens": 300})

    def submit() -> Completion:
        return engine.submit(rag(Z, Q), long, documents=[Z, Q])

    with ThreadPoolExecutor(1) as pool, paused(engine, submit) as running:
        forgetting = pool.submit(engine.forget, Q.id)
        until(lambda: bool(engine._door._calls), "the call")
    assert forgetting.result(60).dram_chunks > 0
    trail.assert_gone(tmp_path, engine)
    running.cancel()


def test_while_it_is_being_read(
    make_engine: Any, reads: Reads, hold: Any, trail: Trail, tmp_path: Path
) -> None:
    first = make_engine()
    before = put(first, Q)
    first.close()
    engine = make_engine()
    reads.close()
    engine.prefetch(rag(Q))
    until(lambda: reads.begun > 0, "a read")
    receipt = engine.forget(Q.id)
    assert receipt.files
    assert not trail.on_disk(tmp_path)
    reads.open()
    trail.assert_gone(tmp_path, engine)
    assert engine.stats().cache.forgotten >= len(receipt.files)
    after = put(engine, Q)
    assert after.usage.cached_tokens == 64
    assert answer(after) == answer(before)


def test_while_a_request_reads_it(
    make_engine: Any, reads: Reads, trail: Trail, tmp_path: Path
) -> None:
    first = make_engine()
    before = put(first, Q)
    first.close()
    engine, other = make_engine(), make_engine()
    reads.close()
    running = engine.submit(rag(Q), GREEDY, documents=[Q])
    until(lambda: reads.begun > 0, "a read")
    assert other.forget(Q.id).files
    reads.open()
    assert answer(running.result(60)) == answer(before)
    trail.assert_gone(tmp_path, engine, other)


def test_while_it_is_being_written(
    make_engine: Any,
    trail: Trail,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from pcr_core.tiers.store import commit_group

    engine, gate, begun = make_engine(), threading.Event(), threading.Event()
    write = commit_group.write_chunk

    def slow(*args: Any) -> bytes:
        begun.set()
        assert gate.wait(60)
        return write(*args)

    monkeypatch.setattr(commit_group, "write_chunk", slow)
    put(engine, Z, Q)
    assert begun.wait(60)
    caller = threading.Thread(target=engine.forget, args=[Q.id])
    caller.start()
    until(lambda: engine._loop.tiers._forgetting._heads.get(b"") is None, "the call")
    gate.set()
    caller.join(60)
    trail.assert_gone(tmp_path, engine)


def test_an_interrupted_call_is_carried_out(
    make_engine: Any,
    trail: Trail,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for ssd_bytes in ("4MiB", 0):
        engine = make_engine(ssd_bytes=ssd_bytes)
        put(engine, Q)
        engine.flush(60)
        with monkeypatch.context() as patch:

            def interrupt(*_: object) -> None:
                raise KeyboardInterrupt

            patch.setattr(engine._loop.tiers, "wait_for", interrupt)
            with pytest.raises(KeyboardInterrupt):
                engine.forget(Q.id)
        trail.assert_gone(tmp_path, engine)
        engine.close()


# --- from elsewhere ---


def test_from_another_engine_of_the_process(
    make_engine: Any, trail: Trail, tmp_path: Path
) -> None:
    engine, other = make_engine(), make_engine()
    put(engine, Z, Q)
    put(engine, Q)
    assert engine.flush(60)
    put(other, Q)
    receipt = other.forget(Q.id)
    assert receipt.files
    trail.assert_gone(tmp_path, engine, other)
    assert engine.forget(Q.id).keys == ()


def test_from_another_engine_while_requests_wait(
    make_engine: Any, hold: Any, trail: Trail, tmp_path: Path
) -> None:
    engine, other = make_engine(), make_engine()
    put(engine, Q)
    assert engine.flush(60)
    with hold(engine):
        waiting = [
            engine.submit(rag(*documents), GREEDY, documents=documents)
            for documents in ((Q,), (Z, Q), (Z, Q, K))
        ]
        assert other.forget(Q.id).files
    for one in waiting:
        assert one.result(60).token_ids
    trail.assert_gone(tmp_path, engine, other)
    assert other.forget(Q.id).keys == ()


def test_another_engines_call_between_look_and_lease(
    make_engine: Any, trail: Trail, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worst moment: the queue has just been told that there is no news."""
    engine, other = make_engine(), make_engine()
    put(engine, Q)
    assert engine.flush(60)
    note = engine._loop._ledger.note

    def late(request: Any) -> None:
        note(request)
        monkeypatch.undo()
        other.forget(Q.id)

    monkeypatch.setattr(engine._loop._ledger, "note", late)
    waiting = engine.submit(rag(Q, Z), GREEDY, documents=[Q, Z])
    assert waiting.result(60).token_ids
    trail.assert_gone(tmp_path, engine, other)
    put(engine, Q)
    assert engine.flush(60)
    assert other.forget(Q.id).files, "what is stored later is known to all"


def test_during_a_long_answer_of_another_engine(
    make_engine: Any, trail: Trail, tmp_path: Path
) -> None:
    engine, other = make_engine(), make_engine()
    put(engine, Q)
    assert engine.flush(60)
    long = GREEDY.model_copy(update={"max_tokens": 1800, "min_tokens": 1800})
    running = engine.submit("a long one", long)
    assert other.forget(Q.id).files
    until(lambda: not trail.in_memory(engine), "forgetting in memory")
    assert not running.done, "it waited for the answer's end"
    running.cancel()


def test_two_tenants_with_the_same_id(make_engine: Any, trail: Trail) -> None:
    first = make_engine(namespace="one")
    second = make_engine(namespace="two")
    for engine in (first, second):
        put(engine, Q)
        assert engine.flush(60)
    receipt = first.forget(Q.id)
    assert receipt.files
    assert put(second, Q).usage.cached_by_tier["dram"] > 64
    second.close()
    again = make_engine(namespace="two")
    assert put(again, Q).usage.cached_by_tier["ssd"] > 64
    mine = Trail(again, Q)
    mine.add(Q)
    assert set(receipt.keys).isdisjoint(key.hex() for key in mine.keys)


class Elsewhere:
    """An engine in another process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("engine_child.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, method: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([method, arguments]) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def put(self, *documents: Document) -> Any:
        pairs = [[document.id, document.text] for document in documents]
        return self("ask", prompt=rag(*documents), documents=pairs)

    def end(self) -> None:
        self._process.communicate(timeout=60)


@pytest.fixture
def elsewhere() -> Iterator[Elsewhere]:
    child = Elsewhere()
    yield child
    child.end()


def test_from_another_process(
    make_engine: Any, elsewhere: Elsewhere, tiny_llama_dir: Path, tmp_path: Path
) -> None:
    engine = make_engine(model=tiny_llama_dir, threads=1)
    trail = Trail(engine, Q)
    for documents in ((Q,), (Z, Q)):
        trail.add(*documents)
    before = put(engine, Z, Q)
    assert engine.flush(60)
    settings = engine.config.model_dump(mode="json", exclude={"trace"})
    assert elsewhere("open", **settings) == engine.stats().namespace
    ids, logprobs, cached = elsewhere.put(Z, Q)
    assert (ids, logprobs) == answer(before)
    assert cached > 3 * 32, "it reads what we have written"
    receipt = elsewhere("forget", id=Q.id)
    assert receipt["files"]
    trail.assert_gone(tmp_path, engine)

    # And the other way round, with what only the other process has seen.
    elsewhere.put(Q)
    assert elsewhere("flush")
    assert trail.on_disk(tmp_path)
    assert engine.forget(Q.id).files
    trail.assert_gone(tmp_path, engine)
    *_, cached = elsewhere.put(Q)
    assert cached == 64, "its memory has heard of it"
    elsewhere("close")


# --- a disk that refuses ---


@contextmanager
def refusing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    @contextmanager
    def refuse(self: ChunkIndex) -> Iterator[None]:
        raise IndexTroubleError("the cache index refused: disk full")
        yield

    with monkeypatch.context() as patch:
        patch.setattr(ChunkIndex, "write", refuse)
        yield


def test_an_index_that_refuses(
    make_engine: Any, trail: Trail, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    put(engine, Z, Q)
    assert engine.flush(60)
    with refusing(monkeypatch):
        with pytest.raises(StoreError, match=r"'q'.*disk full.*call forget again"):
            engine.forget(Q.id)
        assert not [x for x in trail.in_memory(engine) if x.startswith(("slot", "pro"))]
        assert trail.on_disk(tmp_path)
    assert engine.forget(Q.id).files
    trail.assert_gone(tmp_path, engine)


def test_an_index_that_refused_the_document(
    make_engine: Any, trail: Trail, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its chunks are stored later all the same, and must be found by its id."""
    engine = make_engine()
    with refusing(monkeypatch):
        put(engine, Z, Q)
        assert engine.flush(60)
    put(engine, Z, Q)
    assert engine.flush(60)
    assert trail.on_disk(tmp_path)
    engine.close()
    again = make_engine()
    assert again.forget(Q.id).files
    trail.assert_gone(tmp_path, again)


# --- at random ---


@pytest.mark.parametrize("seed", range(3))
def test_two_engines_at_random(
    make_engine: Any, trail: Trail, tmp_path: Path, seed: int
) -> None:
    dice = random.Random(seed)
    budgets = {"dram_bytes": "250KiB", "ssd_bytes": "500KiB"}
    engines = [make_engine(**budgets) for _ in range(2)]
    expected: dict[str, Any] = {}
    documents = [Q, Z, K]
    for _ in range(40):
        engine = dice.choice(engines)
        if dice.random() < 0.2:
            engine.forget(dice.choice(documents).id)
            continue
        chosen = dice.sample(documents, dice.randint(1, 3))
        prompt = rag(*chosen, question=dice.choice(["who?", "where, and what for?"]))
        if Q in chosen:
            tokens = engine.encode(prompt)
            head = tokens.index(token_of(engine, Q)) // 32
            trail.keys.update(keys_of(engine, tokens)[head:])
        result = ask(engine, prompt, documents=chosen)
        assert answer(result) == expected.setdefault(prompt, answer(result))
    engines[0].forget(Q.id)
    trail.assert_gone(tmp_path, *engines)
