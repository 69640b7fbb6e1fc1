"""LangChain's many kinds of tools as the one kind that models are told of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool

from pcr_core import RequestError

Tool = Mapping[str, Any] | type | Callable[..., Any] | BaseTool


def tool_specs(
    tools: Sequence[Tool], *, strict: bool | None = None
) -> list[dict[str, Any]]:
    """Return OpenAI function tools: name, description and a JSON schema.

    Raises:
        RequestError: For a tool that cannot be described so: an argument of a type
            that JSON does not have, an unknown annotation, or no tool at all.
    """
    return [_spec(tool, strict) for tool in tools]


def _spec(tool: Tool, strict: bool | None) -> dict[str, Any]:
    try:
        return convert_to_openai_tool(tool, strict=strict)
    except Exception as error:  # pydantic's, Python's and LangChain's own
        name = getattr(tool, "name", None) or getattr(tool, "__name__", repr(tool))
        raise RequestError(
            f"the tool {name} cannot be described to a model: {error}"
        ) from error
