"""What a call asks for, as a constraint on decoding where the engine can follow one."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pcr_core import RequestError, SamplingParams
from pcr_integrations._tools import ToolUse

if TYPE_CHECKING:
    from pcr_core import Engine
    from pcr_integrations._options import CallOptions

_log = logging.getLogger("pcr_integrations")

_STYLE = {
    "lenient": True,
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
"""Keywords that llguidance does not know are left to whoever validates the answer."""

_LEFT_ALONE = frozenset({"allOf", "const", "default", "enum", "examples", "not"})

_NO_ARGUMENTS: Mapping[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}


def constrained(engine: Engine, options: CallOptions) -> SamplingParams:
    """Return the call's sampling parameters, held to the form it asks for.

    A required tool call is held to the tools' schemas, ``response_format`` to its own.
    An engine that cannot constrain decoding is only asked, in the prompt.

    Raises:
        RequestError: If the call has a constraint of its own beside such a form.
    """
    use, form = options.tools, options.response_format
    forced = use is not None and use.required
    if not forced and form is None:
        return options.params
    if options.params.constraint is not None:
        name, _ = options.params.constraint
        asked = "a required tool call" if forced else "response_format"
        raise RequestError(f"{name} was given beside {asked}; pass one of them")
    if not engine.supports_constraints:
        _log.info(
            "the model is asked for %s, but not held to it: that needs the extra "
            "'structured' and a fast tokenizer",
            "a tool call" if forced else "JSON",
        )
        return options.params
    if use is not None and forced:
        return _with(options.params, grammar=call_grammar(engine, use))
    assert form is not None
    return _with(options.params, json_schema=answer_schema(schema_of(form)))


def schema_of(form: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema in a checked ``response_format``; OpenAI wraps it once more."""
    if form["type"] == "json_object":
        return {"type": "object"}
    inner: Mapping[str, Any] = form["json_schema"]
    wrapped = inner.get("schema")
    if isinstance(wrapped, Mapping) and "properties" not in inner:
        return wrapped
    return inner


def answer_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema to decode by.

    Keywords that llguidance does not know are left out, and objects have no properties
    but those named unless ``additionalProperties`` says so: a model would go on adding.
    """
    style = {**_STYLE, **schema.get("x-guidance", {})}
    return {**_closed(schema), "x-guidance": style}


def _closed(node: Any) -> Any:
    if isinstance(node, list):
        return [_closed(one) for one in node]
    if not isinstance(node, Mapping):
        return node
    # What is combined with other schemas must stay open for their properties.
    made = {k: v if k in _LEFT_ALONE else _closed(v) for k, v in node.items()}
    named = node.get("type") == "object" and isinstance(node.get("properties"), Mapping)
    if named and "allOf" not in node and "$ref" not in node:
        made.setdefault("additionalProperties", False)
    return made


def call_grammar(engine: Engine, use: ToolUse) -> str:
    """Return a grammar of calls of these tools, in the form that the template shows.

    That is the Hermes form if the template has ``<tool_call>`` or no tools at all
    (then the prompt describes that form), and otherwise one bare JSON object, with
    ``parameters`` where the template says so, as Llama's. ``parse_reply`` reads them.
    """
    tags, key = _form(engine)
    opening, closing = (_tag(engine, tag) for tag in ("<tool_call>", "</tool_call>"))
    line = _quoted("\n")
    rules = []
    for index, tool in enumerate(use.tools):
        function = tool["function"]
        head = f'{{"name": {json.dumps(function["name"])}, "{key}": '
        schema = answer_schema(function.get("parameters") or _NO_ARGUMENTS)
        body = f"{_quoted(head)} args{index} {_quoted('}')}"
        if tags:
            body = f"{opening} {line} {body} {line} {closing}"
        rules += [f"call{index}: {body}", f"args{index}: %json {json.dumps(schema)}"]
    any_call = " | ".join(f"call{index}" for index in range(len(use.tools)))
    more = f" ({line} call)*" if use.parallel and tags else ""
    return "\n".join([f"start: call{more}", f"call: {any_call}", *rules])


def _form(engine: Engine) -> tuple[bool, str]:
    """Whether a call stands between tags, and the name of its arguments."""
    template = str(getattr(engine.tokenizer, "chat_template", None) or "")
    if "<tool_call>" not in getattr(engine.tokenizer, "all_special_tokens", ()):
        hermes = "<tool_call>" in template and "<function=" not in template
        if hermes or not engine.supports_tools:
            return True, "arguments"
    parameters = '"parameters": ' in template and "[TOOL_CALLS]" not in template
    return False, "parameters" if parameters else "arguments"


def _tag(engine: Engine, tag: str) -> str:
    """A tag as the grammar names it: a token of its own, as Qwen's, or text."""
    added = getattr(engine.tokenizer, "added_tokens_encoder", ())
    return tag if tag in added else _quoted(tag)


def _quoted(text: str) -> str:
    """A string of the grammar."""
    return json.dumps(text, ensure_ascii=False)


def _with(params: SamplingParams, **constraint: Any) -> SamplingParams:
    return params.model_copy(update=constraint)
