"""Parsers and call options behind ``with_structured_output``."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import Any

from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import (
    JsonOutputKeyToolsParser,
    PydanticToolsParser,
)
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import (
    convert_to_json_schema,
    convert_to_openai_tool,
)
from langchain_core.utils.pydantic import is_basemodel_subclass

from pcr_core import RequestError

Schema = Mapping[str, Any] | type


def response_format(schema: Schema, method: str) -> dict[str, Any]:
    """Return the call option that asks for JSON, or for JSON of this schema.

    Raises:
        RequestError: If it is no schema.
    """
    if method == "json_mode":
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": _json_schema(schema)}


def tool_parser(schema: Schema) -> Runnable[Any, Any]:
    """Return what makes an object of ``schema`` from a message with a tool call."""
    if isinstance(schema, type) and is_basemodel_subclass(schema):
        return PydanticToolsParser(tools=[schema], first_tool_only=True)
    name = convert_to_openai_tool(schema)["function"]["name"]
    return JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)


def json_parser(schema: Schema) -> Runnable[Any, Any]:
    """Return what makes an object of ``schema`` from a message that is JSON."""
    if isinstance(schema, type) and is_basemodel_subclass(schema):
        return PydanticOutputParser[Any](pydantic_object=schema)
    return JsonOutputParser()


def parsed(
    model: Runnable[Any, Any], parser: Runnable[Any, Any], *, include_raw: bool
) -> Runnable[Any, Any]:
    """Chain model and parser; with ``include_raw`` keep the message and the error."""
    if not include_raw:
        return model | parser
    assigned = RunnablePassthrough.assign(
        parsed=itemgetter("raw") | parser, parsing_error=lambda _: None
    )
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=model) | assigned.with_fallbacks(
        [failed], exception_key="parsing_error"
    )


def _json_schema(schema: Schema) -> dict[str, Any]:
    try:
        return convert_to_json_schema(
            dict(schema) if isinstance(schema, Mapping) else schema
        )
    except Exception as error:  # pydantic's, Python's and LangChain's own
        raise RequestError(
            f"{schema!r:.80} cannot be made a JSON schema; pass a Pydantic class, a "
            f"TypedDict or a schema with a title: {error}"
        ) from error
