"""Speculation on a real engine: what is computed ahead, kept, and forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pcr_core import Document, Engine, EngineConfig, Result, SamplingParams
from pcr_integrations.retrieval import StagedFaissIndex
from pcr_integrations.speculation import Speculation, Speculator, explicit
from pcr_integrations.speculation._worker import WORKER
from tests.engine.kit import busy

faiss = pytest.importorskip("faiss")

HEAD = "Answer from these pages.\n\n"
PAGES = [
    f"Page {i} tells of the harbour: {word * 20}." for i, word in enumerate("abcd")
]
GREEDY = SamplingParams(max_tokens=3, logprobs=True)


@pytest.fixture(scope="module")
def engine(make_tiny_model: Any, tiny_tokenizer: Any, tmp_path_factory: Any) -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    config = EngineConfig(
        cache_dir=tmp_path_factory.mktemp("cache"),
        dram_bytes="16MiB",
        ssd_bytes=0,
        chunk_tokens=16,
        resident_rows=0,
    )
    model = make_tiny_model("llama")
    with Engine(config, model=model, tokenizer=tiny_tokenizer) as engine:
        yield engine
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _nothing_left_over(engine: Engine) -> Iterator[None]:
    yield
    settle(engine)


def settle(engine: Engine) -> None:
    """Wait until neither side has anything to do."""
    while not (engine.idle and WORKER.wait(60) and engine.idle):
        engine.stats()  # answered between two steps, or when there is none


def prompt_of(numbers: Any) -> str:
    return HEAD + "\n\n".join(PAGES[number] for number in numbers)


def named(number: int) -> Document:
    return Document(id=f"page-{number}", text=PAGES[number])


def ask(engine: Engine, numbers: Any) -> Result:
    prompt = f"{prompt_of(numbers)}\n\nWhat is in the harbour?"
    documents = [named(number) for number in numbers]
    return engine.submit(prompt, GREEDY, documents=documents).result(60)


def begun(engine: Engine) -> tuple[Speculator, Speculation]:
    speculator = Speculator(explicit(engine, prompt_of, named), agreeing=1)
    return speculator, speculator.begin()


def finish(engine: Engine, speculation: Speculation, numbers: Any) -> None:
    settle(engine)
    speculation.finish(numbers)
    settle(engine)


def test_what_was_computed_ahead_is_reused_and_changes_no_bit(engine: Engine) -> None:
    cold = ask(engine, (0, 1))
    assert cold.usage.cached_tokens == 0
    for number in (0, 1):
        engine.forget(f"page-{number}")
    speculator, speculation = begun(engine)
    speculation.stage([0, 1])
    finish(engine, speculation, [0, 1])
    warm = ask(engine, (0, 1))
    assert (warm.token_ids, warm.logprobs) == (cold.token_ids, cold.logprobs)
    assert warm.usage.cached_tokens >= len(prompt_of((0, 1))) - 16
    stats = speculator.stats
    assert (stats.launched, stats.used, stats.failed) == (1, 1, 0)
    assert stats.computed_tokens >= len(PAGES[0]) + len(PAGES[1])
    assert stats.wasted_tokens == 0


def test_what_was_computed_for_another_order_can_be_forgotten(engine: Engine) -> None:
    speculator, speculation = begun(engine)
    speculation.stage([2, 3])
    finish(engine, speculation, [2])
    assert speculator.stats.cancelled == 1
    assert speculator.stats.wasted_tokens >= len(PAGES[3])
    assert engine.cached_tokens([prompt_of((2, 3))])[0] > len(prompt_of((2,)))
    assert engine.forget("page-3").dram_chunks > 0
    assert engine.cached_tokens([prompt_of((2, 3))])[0] <= len(prompt_of((2,)))


def test_an_engine_is_idle_once_every_request_has_ended(engine: Engine) -> None:
    assert engine.idle
    with busy(engine, ["Some words to compute."]) as waiting:
        assert not engine.idle
    seen: list[bool] = []
    last = engine.submit("Others.", GREEDY)
    last.subscribe(lambda: seen.append(last.done == engine.idle))
    last.result(60)
    assert waiting[0].done
    assert engine.idle
    settle(engine)
    assert all(seen)


def test_many_documents_follow_one_another_without_a_pause(engine: Engine) -> None:
    for _ in range(20):  # each goes on as soon as the one before has ended
        speculator, speculation = begun(engine)
        speculation.stage([0, 1, 2, 3])
        finish(engine, speculation, [0, 1, 2, 3])
        assert speculator.stats.yielded == 0


def test_a_search_drives_it(engine: Engine) -> None:
    rng = np.random.default_rng(0)
    index = faiss.IndexFlatL2(4)
    index.add(rng.standard_normal((len(PAGES), 4)).astype(np.float32))
    staged = StagedFaissIndex(index, stages=(2, 3))
    speculator, _ = begun(engine)
    query = rng.standard_normal(4)
    with speculator.begin() as speculation:
        for stage in staged.stages(query, k=2):
            found = stage.ids[0].tolist()
            if stage.last:
                speculation.finish(found)
            else:
                speculation.stage(found)
                settle(engine)
    assert found == index.search(query[None].astype(np.float32), 2)[1][0].tolist()
    stats = speculator.stats
    assert stats.launched >= 1
    assert stats.launched == stats.used + stats.cancelled
    assert stats.failed == 0


def test_a_closed_engine_reaches_nobody(
    make_tiny_model: Any, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    config = EngineConfig(
        cache_dir=tmp_path, dram_bytes="8MiB", ssd_bytes=0, chunk_tokens=16
    )
    model = make_tiny_model("llama")
    closing = Engine(config, model=model, tokenizer=tiny_tokenizer)
    closing.close()
    speculator, speculation = begun(closing)
    speculation.stage([0])
    assert WORKER.wait(60)
    speculation.finish([0])
    assert speculator.stats.failed == 2
    assert speculator.stats.last_error.startswith("EngineClosedError")
