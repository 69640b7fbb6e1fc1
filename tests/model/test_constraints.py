"""Constrained decoding: whatever the model says, the text keeps the promise."""

from __future__ import annotations

import json
import random
import re
import sys
import threading
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from pydantic import BaseModel, Field
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor

from pcr_core.errors import ModelError, RequestError
from pcr_core.model.constraints import Constraint, Grammars, Matcher
from pcr_core.model.sampling import Sampler
from pcr_core.sampling_params import SamplingParams

pytest.importorskip("llguidance")

fixtures = settings(
    max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
VOCABULARY = 264
END = 258


@pytest.fixture(scope="module")
def grammars(tiny_tokenizer: Any) -> Grammars:
    return Grammars(tiny_tokenizer, VOCABULARY, [END])


def written(
    grammars: Grammars,
    tokenizer: Any,
    seed: int,
    *,
    steps: int = 400,
    ends: tuple[int, ...] = (END,),
    liked: str = "",
    **fields: Any,
) -> tuple[str, bool]:
    """A text drawn from random logits, and whether it came to its end.

    Tokens that are in ``liked`` are likelier, so that texts end before long.
    """
    params = SamplingParams(temperature=1.0, seed=seed, max_tokens=steps, **fields)
    sampler = Sampler(params, [1], ends, grammars.compile(params))
    noise = torch.Generator().manual_seed(seed)
    bonus = torch.zeros(1, VOCABULARY)
    bonus[0, tokenizer(liked, add_special_tokens=False).input_ids] = 6.0
    tokens: list[int] = []
    for _ in range(steps):
        logits = torch.randn(1, VOCABULARY, generator=noise) * 3 + bonus
        token = sampler.choose(logits)
        if token in ends:
            return tokenizer.decode(tokens), True
        tokens.append(token)
        if sampler.complete:
            return tokenizer.decode(tokens), True
    return tokenizer.decode(tokens), False


# --- choices ---


@fixtures
@given(
    choices=st.lists(
        st.text(min_size=1, max_size=6).filter(lambda text: text.isprintable()),
        min_size=1,
        max_size=5,
    ),
    seed=st.integers(0, 999),
)
def test_the_text_is_one_of_the_choices(
    grammars, tiny_tokenizer, choices, seed
) -> None:
    text, ended = written(grammars, tiny_tokenizer, seed, choices=choices)
    assert ended
    assert text in choices


@pytest.mark.parametrize("odd", ["a.b*", "x|y", "(", "\\", "\n", "✓😀", " ", "<|bos"])
def test_choices_are_texts_not_patterns(grammars, tiny_tokenizer, odd: str) -> None:
    assert written(grammars, tiny_tokenizer, 1, choices=[odd]) == (odd, True)


def test_a_choice_may_begin_another(grammars, tiny_tokenizer) -> None:
    both = {
        written(grammars, tiny_tokenizer, seed, choices=["yes", "yes!"])[0]
        for seed in range(40)
    }
    assert both == {"yes", "yes!"}


# --- regular expressions ---


@fixtures
@given(
    pattern=st.sampled_from(
        [
            r"[0-9]{4}-[0-9]{2}-[0-9]{2}",
            r"(yes|no)( sir)?",
            r"[a-c]+x",
            r"\+[1-9][0-9]{1,5}",
            r"[äöü]{2}|😀",
            r"a*",
        ]
    ),
    seed=st.integers(0, 999),
)
def test_the_whole_text_matches(grammars, tiny_tokenizer, pattern, seed) -> None:
    text, ended = written(grammars, tiny_tokenizer, seed, regex=pattern)
    assert ended
    assert re.fullmatch(pattern, text)


# --- JSON ---

leaves = st.sampled_from(
    [
        {"type": "integer", "minimum": -5, "maximum": 2000},
        {"type": "boolean"},
        {"type": "null"},
        {"type": "string", "maxLength": 6},
        {"enum": ["red", "green", 3]},
        {"const": "x"},
    ]
)


def _objects(inner: st.SearchStrategy) -> st.SearchStrategy:
    names = st.dictionaries(st.sampled_from(["a", "b b", "ü"]), inner, max_size=3)
    return names.map(
        lambda properties: {
            "type": "object",
            "properties": properties,
            "required": sorted(properties)[:2],
            "additionalProperties": False,
        }
    )


schemas = st.recursive(
    leaves,
    lambda inner: (
        _objects(inner)
        | st.builds(lambda one: {"type": "array", "items": one, "maxItems": 2}, inner)
        | st.builds(lambda one, other: {"anyOf": [one, other]}, inner, inner)
    ),
    max_leaves=5,
)


@fixtures
@given(schema=schemas, seed=st.integers(0, 999))
def test_the_text_is_json_of_the_schema(grammars, tiny_tokenizer, schema, seed) -> None:
    text, ended = written(
        grammars, tiny_tokenizer, seed, liked='"]}', steps=2000, json_schema=schema
    )
    assert ended, text
    assert _is_valid(json.loads(text), schema), text


def _is_valid(value: Any, schema: Any) -> bool:
    """A validator for the few keywords used above, independent of llguidance."""
    if "anyOf" in schema:
        return any(_is_valid(value, one) for one in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"]
    if "const" in schema:
        return value == schema["const"]
    kind = schema["type"]
    if kind == "null":
        return value is None
    if kind == "boolean":
        return isinstance(value, bool)
    if kind == "integer":
        low, high = schema["minimum"], schema["maximum"]
        return type(value) is int and low <= value <= high
    if kind == "string":
        return isinstance(value, str) and len(value) <= schema["maxLength"]
    if kind == "array":
        return len(value) <= 2 and all(_is_valid(v, schema["items"]) for v in value)
    known = schema["properties"]
    return (
        isinstance(value, dict)
        and set(schema["required"]) <= set(value) <= set(known)
        and all(_is_valid(one, known[name]) for name, one in value.items())
    )


def test_json_is_written_on_one_line(grammars, tiny_tokenizer) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    schema["additionalProperties"] = False
    for seed in range(5):
        got = written(grammars, tiny_tokenizer, seed, json_schema=schema)
        assert got == ('{"a": 1}', True)


def test_a_grammar(grammars, tiny_tokenizer) -> None:
    lark = 'start: "<a>" inner "</a>"\ninner: %json {"type": "boolean"}\n'
    text, ended = written(grammars, tiny_tokenizer, 3, grammar=lark)
    assert ended
    assert text in ("<a>true</a>", "<a>false</a>")


# --- beside other parameters ---


def test_cut_short_by_max_tokens(grammars, tiny_tokenizer) -> None:
    schema = {"type": "string", "minLength": 50}
    text, ended = written(grammars, tiny_tokenizer, 1, json_schema=schema, steps=10)
    assert not ended
    assert text.startswith('"')


def test_a_constraint_is_stronger_than_bias_and_min_tokens(
    grammars, tiny_tokenizer
) -> None:
    (b,) = tiny_tokenizer("b", add_special_tokens=False).input_ids
    fields: dict[str, Any] = {"logit_bias": {b: 100.0, END: 100.0}, "min_tokens": 20}
    for seed in range(5):
        got = written(grammars, tiny_tokenizer, seed, choices=["a"], **fields)
        assert got == ("a", True)
    # Where the text may go on, it must.
    text, ended = written(
        grammars,
        tiny_tokenizer,
        1,
        regex="b+",
        steps=19,
        **{**fields, "min_tokens": 19},
    )
    assert (text, ended) == ("b" * 19, False)


def test_a_bias_still_chooses_among_what_is_possible(grammars, tiny_tokenizer) -> None:
    (n,) = tiny_tokenizer("n", add_special_tokens=False).input_ids
    for seed in range(5):
        text, _ = written(
            grammars, tiny_tokenizer, seed, choices=["yes", "no"], logit_bias={n: 100.0}
        )
        assert text == "no"


def test_a_model_without_end_tokens_ends_with_its_text(tiny_tokenizer) -> None:
    grammars = Grammars(tiny_tokenizer, VOCABULARY, [])
    got = written(grammars, tiny_tokenizer, 1, choices=["abc"], ends=())
    assert got == ("abc", True)


def test_without_a_constraint_nothing_is_complete() -> None:
    assert not Sampler(SamplingParams(), [1], [END]).complete


# --- compiling ---


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"json_schema": {"type": "nope"}}, "json_schema.*nope"),
        ({"json_schema": {"$ref": "#/nope"}}, "json_schema.*nope"),
        ({"json_schema": {"type": "string", "not": {}}}, "json_schema.*not"),
        ({"regex": "("}, "(?s)regex.*unclosed"),
        ({"regex": "(?=a)b"}, "(?s)regex.*look"),
        ({"grammar": "start: nope"}, "(?s)grammar cannot be compiled.*nope"),
        ({"choices": ["a", "b<|bos|>"]}, "special token"),
    ],
)
def test_what_cannot_be_compiled_is_refused(grammars, fields, message) -> None:
    with pytest.raises(RequestError, match=message):
        grammars.compile(SamplingParams(**fields))


def test_compiled_constraints_are_kept_and_never_advanced(
    grammars, tiny_tokenizer
) -> None:
    params = SamplingParams(json_schema={"type": "boolean"})
    first = grammars.compile(params)
    assert written(grammars, tiny_tokenizer, 1, json_schema={"type": "boolean"})[1]
    again = grammars.compile(SamplingParams(json_schema={"type": "boolean"}, seed=2))
    assert again is first
    for number in range(70):
        grammars.compile(SamplingParams(choices=[str(number)]))
    assert grammars.compile(params) is not first
    assert len(grammars._compiled) <= 64


def test_two_texts_of_one_constraint_do_not_meet(grammars) -> None:
    constraint = grammars.compile(SamplingParams(choices=["ab", "ba"]))
    assert constraint is not None

    def possible_in(matcher: Matcher) -> list[int]:
        scores = np.zeros(VOCABULARY, dtype=np.float32)
        matcher(scores)
        found: list[int] = np.flatnonzero(scores == 0).tolist()
        return found

    one, other = constraint.start(), constraint.start()
    possible = possible_in(one)
    assert len(possible) == 2
    one.accept(possible[0])
    other.accept(possible[1])
    assert possible_in(one) == [possible[1]]
    assert possible_in(other) == [possible[0]]


def test_many_threads_compile_at_once(tiny_tokenizer) -> None:
    grammars = Grammars(tiny_tokenizer, VOCABULARY, [END])
    made: list[Any] = []

    def compile_some(seed: int) -> None:
        numbers = random.Random(seed).sample(range(20), 10)
        made.extend(
            grammars.compile(SamplingParams(choices=[str(one)])) for one in numbers
        )

    threads = [threading.Thread(target=compile_some, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 60
    assert all(isinstance(one, Constraint) for one in made)


def test_without_the_extra_it_is_named(tiny_tokenizer, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    grammars = Grammars(tiny_tokenizer, VOCABULARY, [END])
    assert not grammars.usable
    assert grammars.compile(SamplingParams()) is None
    with pytest.raises(RequestError, match=r'pip install "pcr-rag\[structured\]"'):
        grammars.compile(SamplingParams(regex="a"))


def test_a_tokenizer_that_cannot_be_read_is_said() -> None:
    class Slow:
        eos_token_id = 1

        def __len__(self) -> int:
            return 5

    grammars = Grammars(Slow(), 5, [1])
    assert not grammars.usable
    with pytest.raises(RequestError, match="tokenizer cannot be used"):
        grammars.compile(SamplingParams(regex="a"))


def test_a_constraint_that_fails_midway_is_a_typed_error() -> None:
    class Failing:
        failed = False

        def deep_copy(self) -> Failing:
            return Failing()

        def is_error(self) -> bool:
            return self.failed

        def is_stopped(self) -> bool:
            return self.failed

        def get_error(self) -> str:
            return "too complex"

        def compute_logit_bias(self) -> bytes:
            return b"\xc8" * VOCABULARY

        def consume_token(self, token: int) -> None:
            self.failed = True

    params = SamplingParams(regex="a")
    sampler = Sampler(params, [1], [END], Constraint(Failing()))
    with pytest.raises(ModelError, match="too complex"):
        sampler.choose(torch.zeros(1, VOCABULARY))


def test_a_token_that_only_the_constraint_allows_but_the_model_excludes() -> None:
    logits = torch.full((1, VOCABULARY), float("-inf"))
    logits[0, 200] = 1.0

    class Only:
        def deep_copy(self) -> Only:
            return self

        def is_error(self) -> bool:
            return False

        def compute_logit_bias(self) -> bytes:
            return b"\xc8" + b"\0" * (VOCABULARY - 1)

    sampler = Sampler(SamplingParams(regex="a"), [1], [END], Constraint(Only()))
    with pytest.raises(ModelError, match="no token is possible"):
        sampler.choose(logits)


# --- a real model ---


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)
    hobbies: list[str] = Field(max_length=3)


ASKED = "Anna is 31 and likes chess. Answer with name, age and hobbies."


def test_a_real_model_fills_in_a_form(smollm2_dir: Path) -> None:
    """Greedily, through tokens of many letters."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.bfloat16)
    chat = [{"role": "user", "content": ASKED}]
    inputs = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )["input_ids"]
    grammars = Grammars(tokenizer, model.config.vocab_size, [2])
    params = SamplingParams(json_schema=Person, max_tokens=80)
    constraint = grammars.compile(params)
    assert constraint is not None
    matcher, prompt = constraint.start(), inputs.shape[1]

    class Follow(LogitsProcessor):
        def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if ids.shape[1] > prompt:
                matcher.accept(int(ids[0, -1]))
            scores = scores.float()
            matcher(scores[0].numpy())
            return scores

    tokens = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        logits_processor=[Follow()],
        max_new_tokens=params.max_tokens,
    )[0, prompt:]
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    person = Person.model_validate_json(text)
    assert (person.name, person.age) == ("Anna", 31)
    assert json.dumps(person.model_dump()) == text, "on one line"


def test_any_way_to_cut_forced_text_into_tokens_is_followed(smollm2_dir: Path) -> None:
    """The mask after a token is that of the text, wherever tokens were cut."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    grammars = Grammars(tokenizer, 49152, [2])
    for seed in range(8):
        params = SamplingParams(
            choices=["weather: rain 100% ✓", "weather: unknown"],
            temperature=100.0,
            seed=seed,
        )
        sampler = Sampler(params, [1], [2], grammars.compile(params))
        tokens: list[int] = []
        while not sampler.complete:
            tokens.append(sampler.choose(torch.zeros(1, 49152)))
        assert tokenizer.decode(tokens) in (params.choices or ())
