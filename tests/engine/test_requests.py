"""What a request gives: text, tokens, usage, timing; streamed, cancelled, in lists."""

from __future__ import annotations

import itertools
import math
import random
import signal
import string
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from pcr_core import (
    CancelledError,
    Completion,
    Engine,
    QueueFullError,
    SamplingParams,
)

GREEDY = SamplingParams(max_tokens=8, logprobs=True)
_numbers = itertools.count()


def fresh(length: int) -> list[int]:
    """A prompt that no other test of this module has used."""
    return random.Random(f"requests {next(_numbers)}").choices(range(256), k=length)


# --- text and tokens ---


def test_result_and_stream_agree(engine: Engine) -> None:
    completion = engine.submit("Tell me something", SamplingParams(max_tokens=40))
    pieces = list(completion.stream())
    result = completion.result()
    assert "".join(pieces) == result.text
    assert result.text == engine.tokenizer.decode(
        result.token_ids, skip_special_tokens=True
    )
    assert result.usage.completion_tokens == len(result.token_ids)
    assert list(completion.stream()) == pieces, "from the start, as often as asked"
    assert completion.take() == pieces
    assert completion.take() == [], "this hands it out once"


def test_text_ids_and_messages_are_the_same_prompt(engine: Engine) -> None:
    message = {"role": "user", "content": "hello"}
    rendered = engine.tokenizer.apply_chat_template(
        [message], tokenize=False, add_generation_prompt=True
    )
    ids = engine.encode(rendered)
    assert ids.count(engine.tokenizer.bos_token_id) == 1
    assert engine.encode([message]) == ids
    answers = {engine.generate(p, GREEDY).text for p in (rendered, ids, [message])}
    assert len(answers) == 1


def test_lists_of_every_kind(engine: Engine) -> None:
    one = SamplingParams(max_tokens=2)
    assert len(engine.generate("hello", one).token_ids) == 2
    assert len(engine.generate([5, 6, 7], one).token_ids) == 2
    chat = [{"role": "user", "content": "hello"}]
    assert len(engine.generate(chat, one).token_ids) == 2
    for prompts in (["a", "b"], [[1, 2], [3]], [chat, chat], ["a", [1, 2], chat]):
        results = engine.generate(prompts, one)
        assert [r.token_ids for r in results] == [
            engine.generate(p, one).token_ids for p in prompts
        ]
    assert engine.generate(("a", "b"), one)[1].text == engine.generate("b", one).text


def test_logprobs_are_those_of_the_plain_distribution(
    engine: Engine, make_tiny_model: Any
) -> None:
    prompt = fresh(40)
    result = engine.generate(
        prompt,
        SamplingParams(max_tokens=5, logprobs=True, temperature=1.5, top_k=9, seed=3),
    )
    assert result.logprobs is not None
    ids = torch.tensor([[*prompt, *result.token_ids]])
    with torch.inference_mode():
        logits = make_tiny_model("llama")(ids).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
    assert result.logprobs == pytest.approx(expected.tolist(), abs=1e-3)
    assert engine.generate(prompt, SamplingParams(max_tokens=2)).logprobs is None


def test_seeds(engine: Engine) -> None:
    prompt = fresh(20)

    def sample(seed: int | None) -> list[int]:
        params = SamplingParams(max_tokens=12, temperature=2.0, seed=seed)
        return engine.generate(prompt, params).token_ids

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)
    assert sample(None) != sample(None)
    assert sample(-1) == sample(-1)
    assert sample(2**70) == sample(2**70)


def test_a_seeded_sample_does_not_depend_on_the_cache(engine: Engine) -> None:
    prompt = fresh(200)
    params = SamplingParams(max_tokens=12, temperature=1.0, top_p=0.9, seed=5)
    cold, warm = (engine.generate(prompt, params) for _ in range(2))
    assert (cold.usage.cached_tokens, warm.usage.cached_tokens) == (0, 192)
    assert cold.token_ids == warm.token_ids


def test_stop_strings_cut_the_text_and_end_the_request(engine: Engine) -> None:
    prompt, only = fresh(30), letters(engine)
    whole = engine.generate(prompt, SamplingParams(max_tokens=40, logit_bias=only))
    # Two tokens in the middle of the answer.
    stop = whole.text[5:7]
    at = whole.text.index(stop)
    for given in (stop, [stop, "never in it"]):
        params = SamplingParams(max_tokens=40, logit_bias=only, stop=given)
        completion = engine.submit(prompt, params)
        assert "".join(completion.stream()) == whole.text[:at]
        result = completion.result()
        assert (result.text, result.finish_reason) == (whole.text[:at], "stop")
        assert result.token_ids == whole.token_ids[: at + 2]


def letters(engine: Engine) -> dict[int, float]:
    """A bias that makes every token a lower-case letter: one token, one character."""
    alphabet = string.ascii_lowercase
    return dict.fromkeys(map(engine.tokenizer.convert_tokens_to_ids, alphabet), 500.0)


def test_stop_tokens(engine: Engine) -> None:
    prompt = fresh(30)
    whole = engine.generate(prompt, GREEDY).token_ids
    stop = whole[3]
    result = engine.generate(prompt, SamplingParams(max_tokens=8, stop_token_ids=stop))
    assert result.token_ids == whole[: whole.index(stop) + 1]
    assert result.finish_reason == "stop"


def test_end_of_sequence_and_min_tokens(engine: Engine) -> None:
    prompt, end = fresh(30), engine.tokenizer.eos_token_id
    wish = {end: 1000.0}
    ended = engine.generate(prompt, SamplingParams(max_tokens=8, logit_bias=wish))
    assert (ended.token_ids, ended.text, ended.finish_reason) == ([end], "", "stop")
    later = engine.generate(
        prompt, SamplingParams(max_tokens=8, min_tokens=4, logit_bias=wish)
    )
    assert len(later.token_ids) == 5
    assert later.token_ids[-1] == end
    assert end not in later.token_ids[:-1]


def test_the_last_token_allowed_is_a_length_finish(engine: Engine) -> None:
    result = engine.generate(fresh(10), SamplingParams(max_tokens=1))
    assert (len(result.token_ids), result.finish_reason) == (1, "length")


# --- usage and timing ---


@pytest.mark.parametrize("extra", [-1, 0, 1])
@pytest.mark.parametrize("chunks", [1, 2, 5])
def test_usage_around_chunk_multiples(
    engine: Engine, chunk: int, chunks: int, extra: int
) -> None:
    length = chunks * chunk + extra
    prompt = fresh(length)
    cold, warm = (engine.generate(prompt, GREEDY) for _ in range(2))
    assert cold.usage.cached_by_tier == {}
    assert (cold.usage.prompt_tokens, cold.usage.computed_tokens) == (length, length)
    reused = length // chunk * chunk
    if extra == 0:
        reused -= 16  # the last row tile runs again, for the logits
    assert warm.usage.cached_tokens == reused
    assert warm.usage.computed_tokens == length - reused
    assert warm.usage.cached_by_tier == ({"dram": reused} if reused else {})
    assert warm.token_ids == cold.token_ids
    assert warm.logprobs == cold.logprobs


def test_usage_after_a_restart_names_the_ssd(make_engine: Any) -> None:
    prompt = fresh(100)
    first = make_engine()
    before = first.generate(prompt, GREEDY)
    first.close()
    second = make_engine()
    after = second.generate(prompt, GREEDY)
    assert after.usage.cached_by_tier == {"ssd": 96}
    assert second.generate(prompt, GREEDY).usage.cached_by_tier == {"dram": 96}
    assert (after.token_ids, after.logprobs) == (before.token_ids, before.logprobs)


def test_another_namespace_shares_nothing(make_engine: Any) -> None:
    prompt = fresh(100)
    with make_engine(namespace="a") as first:
        first.generate(prompt, GREEDY)
    with make_engine(namespace="b") as second:
        assert second.generate(prompt, GREEDY).usage.cached_tokens == 0
    with make_engine(namespace="a") as third:
        assert third.generate(prompt, GREEDY).usage.cached_tokens == 96


def test_timing_adds_up(engine: Engine) -> None:
    timing = engine.generate(fresh(150), GREEDY).timing
    parts = (timing.queue, timing.load_wait, timing.prefill, timing.decode)
    assert min(parts) >= 0
    assert timing.ttft > 0
    assert timing.decode > 0
    assert math.isclose(timing.ttft, sum(parts[:3]), abs_tol=1e-6)
    assert math.isclose(timing.total, timing.ttft + timing.decode, abs_tol=1e-6)


def test_time_in_the_queue_is_counted(engine: Engine, hold: Any) -> None:
    with hold(engine):
        completions = [engine.submit(fresh(50), GREEDY) for _ in range(2)]
    first, second = (completion.result().timing for completion in completions)
    # The second waited at least while the first was prefilled.
    assert second.queue >= first.prefill
    assert second.total >= second.queue


# --- the cache from outside ---


def test_warm_makes_the_first_request_hit(make_engine: Any, capsys: Any) -> None:
    engine = make_engine()
    prompts = [fresh(70), fresh(100)]
    engine.warm(iter(prompts))
    assert "warming the cache" in capsys.readouterr().err
    assert engine.stats().cache.ssd_chunks == 2 + 3
    assert engine.generate(prompts[0], GREEDY).usage.cached_tokens == 64
    engine.close()
    assert make_engine().generate(prompts[1], GREEDY).usage.cached_tokens == 96


def test_stats_are_printable(engine: Engine) -> None:
    engine.generate(fresh(40), GREEDY)
    stats = engine.stats()
    text, page = str(stats), stats._repr_html_()
    for part in ("shape-independent", "float32 on cpu", "chunks of 32", "DRAM", "SSD"):
        assert part in text
        assert part in page
    assert page.startswith("<table>")
    assert stats.exact
    assert stats.finished > 0
    assert str(stats.cache) in text
    assert 0 < stats.cache.dram_bytes <= stats.cache.dram_budget


def test_check_finds_nothing_wrong(engine: Engine) -> None:
    engine.generate(fresh(100), GREEDY)
    assert engine.flush(60)
    report = engine.check()
    assert report.ok, report


# --- streams and cancelling ---


def test_closing_the_stream_cancels(engine: Engine) -> None:
    completion, stream = _paused_after_first_piece(engine)
    stream.close()
    _resume(completion)
    with pytest.raises(CancelledError):
        completion.result(60)
    assert engine.generate(fresh(10), GREEDY).token_ids


@pytest.mark.parametrize("end", ["close", "del"])
def test_a_stream_that_ends_before_it_begins_cancels(
    engine: Engine, hold: Any, end: str
) -> None:
    with hold(engine):
        completion = engine.submit(fresh(100), GREEDY)
        stream = completion.stream()
        if end == "close":
            stream.close()
            assert list(stream) == []
        del stream
        assert completion.cancelled
    with pytest.raises(CancelledError):
        completion.result(60)


def test_a_stream_that_was_read_to_its_end_cancels_nothing(engine: Engine) -> None:
    completion = engine.submit(fresh(30), GREEDY)
    stream = completion.stream()
    text = "".join(stream)
    stream.close()
    assert list(stream) == []
    assert completion.result(60).text == text
    assert not completion.cancelled


def test_streams_side_by_side(engine: Engine) -> None:
    params = SamplingParams(max_tokens=30, logit_bias=letters(engine))
    completion = engine.submit(fresh(30), params)
    both = zip(completion.stream(), completion.stream(), strict=True)
    assert all(one == other for one, other in both)
    assert completion.result(60).text


def test_an_interrupted_stream_cancels(
    engine: Engine, hold: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)

    with hold(engine):
        completion = engine.submit(fresh(100), GREEDY)
        monkeypatch.setattr(completion._changed, "wait_for", interrupt)
        with pytest.raises(KeyboardInterrupt):
            next(completion.stream())
        monkeypatch.undo()
        assert completion.cancelled


def test_a_failed_stream_says_why_once(engine: Engine, hold: Any) -> None:
    with hold(engine):
        completion = engine.submit(fresh(100), GREEDY)
        completion.cancel()
    stream = completion.stream()
    with pytest.raises(CancelledError):
        list(stream)
    assert list(stream) == []


def test_cancel_while_running(engine: Engine) -> None:
    before = engine.stats().cancelled
    completion, stream = _paused_after_first_piece(engine)
    completion.cancel()
    completion.cancel()
    _resume(completion)
    rest = []
    with pytest.raises(CancelledError):
        rest += stream
    assert len(rest) <= 1, "it went on for more than a step"
    assert engine.stats().cancelled == before + 1
    completion.cancel()


_gates: dict[Completion, threading.Event] = {}


def _paused_after_first_piece(engine: Engine) -> tuple[Completion, Any]:
    """A long request whose engine thread waits, once the first text has come."""
    gate = threading.Event()
    entered = threading.Event()

    def begin() -> None:
        assert entered.wait(60)

    engine._door.call(begin)
    completion = engine.submit(
        fresh(20), SamplingParams(max_tokens=1000, logit_bias=letters(engine))
    )

    def pause() -> None:
        assert gate.wait(60)

    completion.subscribe(pause)
    _gates[completion] = gate
    entered.set()
    stream = completion.stream()
    assert next(stream)
    return completion, stream


def _resume(completion: Completion) -> None:
    _gates.pop(completion).set()


def test_cancel_while_waiting(engine: Engine, hold: Any) -> None:
    before = engine.stats()
    with hold(engine):
        completion = engine.submit(fresh(100), GREEDY)
        completion.cancel()
    with pytest.raises(CancelledError):
        completion.result(60)
    assert completion.done
    assert completion.cancelled
    after = engine.stats()
    assert after.cache.requests == before.cache.requests, "it was computed"


def test_an_interrupt_cancels_and_the_engine_goes_on(
    engine: Engine, hold: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)

    with hold(engine):
        completion = engine.submit(fresh(100), GREEDY)
        monkeypatch.setattr(completion._changed, "wait_for", interrupt)
        with pytest.raises(KeyboardInterrupt):
            completion.result()
        monkeypatch.undo()
        assert completion.cancelled
    with pytest.raises(CancelledError):
        completion.result(60)
    assert engine.generate(fresh(10), GREEDY).token_ids
    assert engine.check().ok


def test_an_interrupt_of_a_list_cancels_all(
    engine: Engine, hold: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = engine.stats()

    def interrupt(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)

    with hold(engine), monkeypatch.context() as patch:
        patch.setattr(Completion, "result", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.generate([fresh(10) for _ in range(3)], GREEDY)
    after = engine.stats()
    assert after.cancelled == before.cancelled + 3
    assert after.finished == before.finished


def test_a_result_that_does_not_come_in_time(engine: Engine, hold: Any) -> None:
    with hold(engine):
        completion = engine.submit(fresh(10), GREEDY)
        with pytest.raises(TimeoutError, match="goes on"):
            completion.result(timeout=0)
    assert completion.result(60).token_ids


def test_listeners_hear_every_change(engine: Engine, hold: Any) -> None:
    heard: list[str] = []
    with hold(engine):
        completion = engine.submit(fresh(30), GREEDY)
        completion.subscribe(lambda: heard.extend(completion.take()))
    text = completion.result(60).text
    engine.stats()  # the listener runs on the engine thread, after the result is there
    assert "".join(heard) == text
    late: list[int] = []
    completion.subscribe(lambda: late.append(1))
    assert late == [1]


# --- many at once ---


def test_a_full_queue(make_engine: Any, hold: Any) -> None:
    engine = make_engine(max_queue=2)
    with hold(engine):
        waiting = [engine.submit(fresh(5), GREEDY) for _ in range(2)]
        with pytest.raises(QueueFullError, match="max_queue=2"):
            engine.submit(fresh(5), GREEDY)
    for completion in waiting:
        assert completion.result(60).token_ids
    assert engine.generate(fresh(5), GREEDY).token_ids


def test_eight_threads_get_the_serial_answers(make_engine: Any) -> None:
    engine = make_engine(dram_bytes="200KiB")
    families = [fresh(150) for _ in range(3)]
    prompts = [
        [*families[number % 3][: 40 * (number % 4)], *fresh(30)] for number in range(12)
    ]
    serial = [engine.generate(prompt, GREEDY) for prompt in prompts]

    def ask(number: int) -> list[Any]:
        order = prompts[number:] + prompts[:number]
        return [engine.generate(prompt, GREEDY) for prompt in order]

    with ThreadPoolExecutor(8) as pool:
        for number, answers in enumerate(pool.map(ask, range(8))):
            for offset, answer in enumerate(answers):
                expected = serial[(number + offset) % len(prompts)]
                assert answer.token_ids == expected.token_ids
                assert answer.logprobs == expected.logprobs
    assert engine.check().ok


def test_first_come_first_served(engine: Engine, hold: Any) -> None:
    order: list[int] = []
    with hold(engine):
        completions = [engine.submit(fresh(10), GREEDY) for _ in range(5)]
        for number, completion in enumerate(completions):
            completion.subscribe(_note_when_done(completion, number, order))
    completions[-1].result(60)
    engine.stats()
    assert order == [0, 1, 2, 3, 4]


def _note_when_done(completion: Completion, number: int, order: list[int]) -> Any:
    return lambda: order.append(number) if completion.done else None
