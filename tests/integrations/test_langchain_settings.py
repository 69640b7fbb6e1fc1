"""Settings and call options of ``ChatPCR``, and the engine that equal ones share."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.runnables import ConfigurableField

from pcr_core import ConfigError, RequestError
from pcr_integrations.langchain import ChatPCR

MakeEngine = Callable[..., Any]
pytestmark = pytest.mark.timeout(60)

# --- options ---


def test_options_by_constructor_bind_and_call(make_engine: MakeEngine) -> None:
    engine = make_engine()
    llm = ChatPCR(engine=engine, temperature=0.5, max_tokens=9, stop_sequences=["z"])
    llm.invoke("q")
    llm.bind(max_tokens=8, seed=3).invoke("q")
    llm.invoke("q", temperature=0.0, stop=["y"], top_p=0.9)
    first, second, third = (params for _, params, _ in engine.submitted)
    assert (first.temperature, first.max_tokens, first.stop) == (0.5, 9, ("z",))
    assert (second.max_tokens, second.seed, second.stop) == (8, 3, ("z",))
    assert (third.temperature, third.top_p, third.stop) == (0.0, 0.9, ("y",))


def test_stop_and_length(make_engine: MakeEngine) -> None:
    llm = ChatPCR(engine=make_engine(reply="one two three four"))
    stopped = llm.invoke("q", stop=["o thr"])
    assert stopped.content == "one tw"
    assert stopped.response_metadata["finish_reason"] == "stop"
    short = llm.invoke("q", max_tokens=2)
    assert short.content == "one two"
    assert short.response_metadata["finish_reason"] == "length"


@pytest.mark.parametrize("bad", [{"temprature": 1}, {"n": 3}, {"stop": [1]}])
def test_bad_call_options(make_engine: MakeEngine, bad: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        ChatPCR(engine=make_engine()).invoke("q", **bad)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"temprature": 1}, "did you mean 'temperature'"),
        ({"dram_byte": 1}, "did you mean 'dram_bytes'"),
        ({"dram_bytes": -1}, "negative"),
        ({"chunk_tokens": 17}, "multiple of 16"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"timeout": -1}, "timeout"),
        ({"model": "a", "model_name": "b"}, "model was given twice"),
    ],
)
def test_bad_settings(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ChatPCR(**bad)


def test_bad_sampling_setting() -> None:
    with pytest.raises(RequestError, match="temperature"):
        ChatPCR(temperature=-1)


def test_an_engine_beside_settings_is_refused(make_engine: MakeEngine) -> None:
    with pytest.raises(ConfigError, match="engine= was given together with cache_dir"):
        ChatPCR(engine=make_engine(), cache_dir="x")


# --- sharing ---


def test_equal_settings_share_an_engine(scripted_builds: list[Any]) -> None:
    ChatPCR(model="m", temperature=0.1).invoke("q")
    ChatPCR(model_name="m", max_tokens=3).invoke("q")
    assert len(scripted_builds) == 1
    ChatPCR(model="m", namespace="other").invoke("q")
    assert len(scripted_builds) == 2


def test_constructing_builds_nothing(scripted_builds: list[Any]) -> None:
    llm = ChatPCR(model="m")
    assert llm._identifying_params["model"] == "m"
    assert llm._get_ls_params()["ls_model_name"] == "m"
    assert not scripted_builds


def test_another_model_for_one_call(scripted_builds: list[Any]) -> None:
    llm = ChatPCR(model="m")
    llm.invoke("q", model="m")
    answer = llm.invoke("q", model="other")
    assert [engine.config.model for engine in scripted_builds] == ["m", "other"]
    assert answer.response_metadata["model_name"] == "other"


def test_an_explicit_engine_has_its_model(make_engine: MakeEngine) -> None:
    with pytest.raises(ConfigError, match="engine= was given together with model"):
        ChatPCR(engine=make_engine()).invoke("q", model="other")


def test_copies_share_the_engine(make_engine: MakeEngine) -> None:
    engine = make_engine()
    llm = ChatPCR(engine=engine)
    copied = copy.deepcopy(llm)
    field = ConfigurableField(id="t")
    changed = llm.configurable_fields(temperature=field).with_config(
        configurable={"t": 0.7}
    )
    copied.invoke("q")
    changed.invoke("q")
    assert [c.content for c in changed.stream("q")][:2] == ["one", " two"]
    assert len(engine.submitted) == 3
    assert engine.submitted[1][1].temperature == 0.7
