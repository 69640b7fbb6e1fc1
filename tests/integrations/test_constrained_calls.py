"""Forms that are asked for are kept: by a random model, through both frameworks."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest
import torch
from langchain_core.messages import AIMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from pydantic import BaseModel, Field
from transformers import AddedToken

from pcr_core import Engine, EngineConfig, RequestError, SamplingParams
from pcr_core.model.constraints import Grammars
from pcr_core.model.sampling import Sampler
from pcr_integrations._constraints import (
    answer_schema,
    call_grammar,
    constrained,
)
from pcr_integrations._options import read_options
from pcr_integrations._response_template import template_reply
from pcr_integrations._tool_calls import parse_reply
from pcr_integrations._tools import tool_use
from pcr_integrations.langchain import ChatPCR
from pcr_integrations.llama_index import PCRLLM

llguidance = pytest.importorskip("llguidance")

HERMES = "{% if tools %}<tool_call>\n{{ tools }}{% endif %}"
LLAMA = '{{ tools }} Respond as {"name": name, "parameters": {}}.'
MISTRAL = '{{ tools }}[TOOL_CALLS][{"name": "parameters": }]'
CODER = "{{ tools }}<tool_call>\n<function=name>"


class Paint(BaseModel):
    """Paint something."""

    color: Literal["red", "blue"]
    coats: int = Field(ge=1, le=9)


class Wait(BaseModel):
    """Wait for a while."""

    reason: Literal["dry", "rest"]


def tool(name: str, parameters: dict[str, Any] | None) -> dict[str, Any]:
    function: dict[str, Any] = {"name": name, "description": "d"}
    if parameters is not None:
        function["parameters"] = parameters
    return {"type": "function", "function": function}


PAINT = tool("paint", Paint.model_json_schema())
WAIT = tool("wait", None)


@pytest.fixture(scope="module")
def engine(
    make_tiny_model: Callable[..., Any],
    tiny_tokenizer: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Engine]:
    """A random model: what it says is right only because nothing else is possible."""
    config = EngineConfig(
        cache_dir=tmp_path_factory.mktemp("cache"),
        chunk_tokens=16,
        dram_bytes="8MiB",
        ssd_bytes=0,
        overlap="none",
    )
    model = make_tiny_model("llama")
    with Engine(config, model=model, tokenizer=tiny_tokenizer) as engine:
        yield engine


def params_of(engine: Any, **options: Any) -> SamplingParams:
    return constrained(engine, read_options({}, options))


# --- LangChain ---


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_langchain_gets_an_object(engine: Engine, method: str) -> None:
    llm = ChatPCR(engine=engine, temperature=2.0, seed=0)
    found = llm.with_structured_output(Paint, method=method).invoke("q")
    assert isinstance(found, Paint)


def test_langchain_json_mode_gets_an_object_of_some_kind(engine: Engine) -> None:
    llm = ChatPCR(engine=engine, temperature=1.0, seed=4, max_tokens=400)
    chosen = llm.bind(
        response_format={"type": "json_object"},
        logit_bias={_token(engine, one): 8.0 for one in '"}'},
    )
    assert isinstance(json.loads(chosen.invoke("q").content), dict)


def _token(engine: Engine, text: str) -> int:
    (token,) = engine.tokenizer(text, add_special_tokens=False).input_ids
    return int(token)


@pytest.mark.parametrize("choice", ["required", "Wait"])
def test_a_required_call_is_made(engine: Engine, choice: Any) -> None:
    llm = ChatPCR(engine=engine, temperature=2.0, seed=1)
    calling = llm.bind_tools(
        [Paint, Wait], tool_choice=choice, parallel_tool_calls=False
    )
    reply = calling.invoke("q")
    _check_calls(reply)
    assert choice != "Wait" or reply.tool_calls[0]["name"] == "Wait"
    streamed = sum(list(calling.stream("q"))[1:], next(iter(calling.stream("q"))))
    assert [(c["name"], c["args"]) for c in streamed.tool_calls] == [
        (c["name"], c["args"]) for c in reply.tool_calls
    ]


def _check_calls(reply: AIMessage) -> None:
    (call,) = reply.tool_calls
    assert not reply.invalid_tool_calls
    assert reply.content == ""
    {"Paint": Paint, "Wait": Wait}[call["name"]](**call["args"])


# --- LlamaIndex ---


def test_llama_index_gets_an_object(engine: Engine) -> None:
    llm = PCRLLM(engine=engine, temperature=2.0, seed=2)
    prompt = PromptTemplate("Paint {what}")
    found = asyncio.run(llm.astructured_predict(Paint, prompt, what="it"))
    assert isinstance(found, Paint)
    assert isinstance(llm.as_structured_llm(Paint).complete("Paint it").raw, Paint)
    # The caller's own constraint stays.
    kwargs = {"choices": ['{"color": "blue", "coats": 3}']}
    got = llm.structured_predict(Paint, prompt, llm_kwargs=kwargs, what="it")
    assert got == Paint(color="blue", coats=3)


def test_llama_index_forces_a_required_tool(engine: Engine) -> None:
    def paint(color: str) -> str:
        """Paint it."""
        return color

    llm = PCRLLM(engine=engine, is_function_calling_model=True, seed=1)
    bias = {_token(engine, one): 12.0 for one in '"}'}
    reply = llm.chat_with_tools(
        [FunctionTool.from_defaults(paint)],
        user_msg="q",
        tool_required=True,
        logit_bias=bias,
    )
    (call,) = llm.get_tool_calls_from_response(reply)
    assert call.tool_name == "paint"
    assert set(call.tool_kwargs) == {"color"}


# --- what is asked of the engine ---


def test_without_the_extra_the_model_is_only_asked(
    make_engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="pcr_integrations")
    plain = make_engine(constraints=False)
    able = make_engine(constraints=True)
    asked: dict[str, Any] = {"tools": [PAINT], "tool_choice": "required"}
    form: dict[str, Any] = {"response_format": {"type": "json_object"}}
    for options in (asked, form):
        caplog.clear()
        assert params_of(plain, **options).constraint is None
        assert "structured" in caplog.text
        assert params_of(able, **options).constraint is not None
    for options in ({}, {"tools": [PAINT]}, {"tools": [PAINT], "tool_choice": "none"}):
        assert params_of(able, **options).constraint is None


def test_response_formats(make_engine: Any) -> None:
    able = make_engine(constraints=True)
    schema = Paint.model_json_schema()
    for inner in (schema, {"name": "paint", "schema": schema, "strict": True}):
        form = {"type": "json_schema", "json_schema": inner}
        got = params_of(able, response_format=form).json_schema
        assert got["properties"] == schema["properties"]
    got = params_of(able, response_format={"type": "json_object"}).json_schema
    assert got["type"] == "object"


@pytest.mark.parametrize(
    "options",
    [
        {"tools": [PAINT], "tool_choice": "required"},
        {"response_format": {"type": "json_object"}},
    ],
)
@pytest.mark.parametrize("constraints", [True, False])
def test_two_constraints_at_once_are_refused(
    make_engine: Any, constraints: bool, options: dict[str, Any]
) -> None:
    with pytest.raises(RequestError, match="regex was given beside"):
        params_of(make_engine(constraints=constraints), regex="a", **options)


def test_a_schema_is_a_mapping() -> None:
    form = {"type": "json_schema", "json_schema": "text"}
    with pytest.raises(RequestError, match="response_format"):
        read_options({}, {"response_format": form})


# --- the grammar of calls ---


class Templated:
    """An engine as far as the grammar needs one."""

    def __init__(self, template: str, tokenizer: Any, *special: str) -> None:
        self.supports_tools = "tools" in template

        class Tokenizer:
            chat_template = template
            all_special_tokens = special

        self.tokenizer = Tokenizer()
        self.real = tokenizer


@pytest.mark.parametrize(
    ("template", "special", "example"),
    [
        ("", (), '<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>'),
        (HERMES, (), '<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>'),
        (HERMES, ("<tool_call>",), '{"name": "wait", "arguments": {}}'),
        (LLAMA, (), '{"name": "wait", "parameters": {}}'),
        (MISTRAL, (), '{"name": "wait", "arguments": {}}'),
        (CODER, (), '{"name": "wait", "arguments": {}}'),
    ],
)
def test_a_call_has_the_form_of_the_template(
    tiny_tokenizer: Any, template: str, special: tuple[str, ...], example: str
) -> None:
    use = tool_use([PAINT, WAIT], choice="required", parallel=False)
    assert use is not None
    engine: Any = Templated(template, tiny_tokenizer, *special)
    grammar = call_grammar(engine, use)
    assert _accepts(tiny_tokenizer, grammar, example)
    assert not _accepts(tiny_tokenizer, grammar, f"{example}\n{example}")
    other = example.replace("wait", "paint").replace(
        "{}", '{"color": "red", "coats": 2}'
    )
    assert _accepts(tiny_tokenizer, grammar, other)
    assert not _accepts(tiny_tokenizer, grammar, other.replace("red", "green"))
    for text in (example, other):
        reply = parse_reply(text, use)
        assert len(reply.calls) == 1, text
        assert not reply.invalid


def _accepts(tokenizer: Any, grammar: str, text: str) -> bool:
    """Whether the grammar takes the text as a whole."""
    import llguidance.hf

    words = llguidance.hf.from_tokenizer(tokenizer, n_vocab=264, eos_token=258)
    matcher = llguidance.LLMatcher(words, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer(text, add_special_tokens=False).input_ids
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def test_references_and_odd_names_and_unknown_keywords(tiny_tokenizer: Any) -> None:
    class Inner(BaseModel):
        x: Literal["é"]

    class Outer(BaseModel):
        inner: Inner

    schema = Outer.model_json_schema()
    schema["properties"]["inner"]["x-unknown"] = 1
    schema["not"] = {"type": "string"}  # llguidance does not know it
    use = tool_use([tool('say "é"', schema)], choice="any", parallel=False)
    assert use is not None
    engine: Any = Templated("", tiny_tokenizer)
    text = '<tool_call>\n{"name": "say \\"\\u00e9\\"", "arguments": {"inner": '
    text += '{"x": "é"}}}\n</tool_call>'
    assert _accepts(tiny_tokenizer, call_grammar(engine, use), text)
    assert parse_reply(text, use).calls[0].name == 'say "é"'


def test_several_calls_only_where_they_are_welcome(tiny_tokenizer: Any) -> None:
    engine: Any = Templated("", tiny_tokenizer)
    one = '<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>'
    for parallel in (True, False):
        use = tool_use([WAIT], choice="any", parallel=parallel)
        assert use is not None
        grammar = call_grammar(engine, use)
        assert _accepts(tiny_tokenizer, grammar, one)
        assert _accepts(tiny_tokenizer, grammar, f"{one}\n{one}") is parallel


def test_tags_may_be_tokens_of_their_own(tiny_tokenizer: Any) -> None:
    """As Qwen's: added to the vocabulary, shown as text."""
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tags = ["<tool_call>", "</tool_call>"]
    tokenizer.add_tokens([AddedToken(tag, special=False) for tag in tags])
    tokenizer.chat_template = HERMES
    engine: Any = Templated(HERMES, tokenizer)
    engine.tokenizer = tokenizer
    use = tool_use([WAIT], choice="any", parallel=False)
    assert use is not None
    text = '<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>'
    assert len(tokenizer(text, add_special_tokens=False).input_ids) < len(text) - 20
    grammar = call_grammar(engine, use)
    assert _accepts(tokenizer, grammar, text)
    grammars = Grammars(tokenizer, 264, [258])
    params = SamplingParams(grammar=grammar)
    sampler = Sampler(params, [1], [258], grammars.compile(params))
    random = torch.Generator().manual_seed(1)
    tokens: list[int] = []
    while not sampler.complete:
        tokens.append(sampler.choose(torch.randn(1, 264, generator=random)))
    assert tokenizer.decode(tokens, skip_special_tokens=True) == text
    with pytest.raises(RequestError, match="special token"):
        grammars.compile(SamplingParams(choices=["a <tool_call>"]))


def test_objects_are_closed_unless_they_say_otherwise() -> None:
    part = {"type": "object", "properties": {"a": {"type": "integer"}}}
    open_part = {**part, "additionalProperties": True}
    closed = {**part, "additionalProperties": False}
    schema = {
        "type": "object",
        "properties": {
            "part": part,
            "open": open_part,
            "list": {"type": "array", "items": part},
            "any": {"anyOf": [part, {"type": "null"}]},
            "all": {"allOf": [part]},
            "const": {"const": part},
            "properties": {"type": "object"},
        },
        "$defs": {"Part": part},
    }
    got = answer_schema(schema)
    found = got["properties"]
    assert got["additionalProperties"] is False
    assert (found["part"], found["open"]) == (closed, open_part)
    assert found["list"]["items"] == found["any"]["anyOf"][0] == closed
    assert got["$defs"]["Part"] == closed
    assert found["all"]["allOf"] == [part]
    assert found["const"] == {"const": part}
    assert found["properties"] == {"type": "object"}


# --- the tokenizer's own parser ---


class OwnParser:
    """A tokenizer with a response template, as transformers has them."""

    def __init__(self, message: Any) -> None:
        self.response_template: Any = {"version": 1}
        self.message = message
        self.seen: tuple[Any, ...] = ()

    def decode(self, tokens: list[int], **_: Any) -> str:
        return " ".join(map(str, tokens))

    def parse_response(self, text: str, **more: Any) -> Any:
        self.seen = (text, more)
        if isinstance(self.message, Exception):
            raise self.message
        return self.message


class WithParser:
    def __init__(self, message: Any) -> None:
        self.tokenizer = OwnParser(message)

    def encode(self, turns: Any, tools: Any = None) -> list[int]:
        return [7, 8]


CALL = {"type": "function", "function": {"name": "paint", "arguments": {"coats": 1}}}


def test_the_tokenizers_own_parser_comes_first() -> None:
    engine: Any = WithParser({"content": "hm", "tool_calls": [CALL]})
    reply = template_reply(engine, [1, 2], [], [PAINT])
    assert reply is not None
    assert (reply.text, reply.calls[0].name) == ("hm", "paint")
    assert reply.calls[0].arguments == {"coats": 1}
    assert engine.tokenizer.seen == ("1 2", {"prefix": "7 8", "tools": [PAINT]})


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"tool_calls": []},
        {"tool_calls": [{"function": {"arguments": {}}}]},
        {"tool_calls": 5},
        "text",
        ValueError("bad"),
    ],
)
def test_the_tolerant_parser_takes_what_it_cannot_read(message: Any) -> None:
    engine: Any = WithParser(message)
    assert template_reply(engine, [1], [], None) is None


def test_tokenizers_without_a_parser_are_not_asked(engine: Engine) -> None:
    assert template_reply(engine, [1], [], None) is None


def test_an_older_transformers_takes_no_prefix() -> None:
    engine: Any = WithParser({"tool_calls": [CALL]})
    engine.tokenizer.response_template = None
    engine.tokenizer.response_schema = {"type": "object"}
    assert template_reply(engine, [1], [], None) is not None
    assert engine.tokenizer.seen == ("1", {})


RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "content": {"close": "<|im_end|>"},
        "tool_calls": {
            "open": "@call ",
            "close": "@",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        },
    },
}


@pytest.mark.parametrize("stream", [False, True])
def test_a_dialect_that_only_its_tokenizer_reads(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    if not hasattr(engine.tokenizer, "response_template"):
        pytest.skip("this transformers has no response templates")
    monkeypatch.setattr(engine.tokenizer, "response_template", RESPONSE_TEMPLATE)
    said = '@call {"name": "Wait", "arguments": {"reason": "dry"}}@'
    llm = ChatPCR(engine=engine, choices=[said]).bind_tools([Wait])
    if stream:
        pieces = list(llm.stream("q"))
        reply = sum(pieces[1:], pieces[0])
    else:
        reply = llm.invoke("q")
    (call,) = reply.tool_calls
    assert (call["name"], call["args"]) == ("Wait", {"reason": "dry"})
